from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.errors import ConfigurationError
from gateway.stored_responses import Holder, StoredResponse, StoredResponses

if TYPE_CHECKING:
    from pathlib import Path

ANN, BOB = Holder("acme", "ann"), Holder("acme", "bob")
MEBIBYTE = 1024 * 1024


def stored(response_id: str, size: int = 10) -> StoredResponse:
    return StoredResponse({"id": response_id, "text": "x" * size}, [{"role": "user", "content": "Hello"}], [])


async def test_what_is_put_is_found_and_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    first = StoredResponses(path, 60.0, MEBIBYTE)
    first.put(ANN, stored("a"))
    assert await first.find(ANN, "a") == stored("a")
    first.close()
    second = StoredResponses(path, 60.0, MEBIBYTE)
    assert await second.find(ANN, "a") == stored("a")
    assert await second.find(BOB, "a") is None
    assert not await second.delete(BOB, "a")
    assert await second.delete(ANN, "a")
    assert await second.find(ANN, "a") is None
    second.close()


async def test_what_is_too_old_is_gone() -> None:
    kept = StoredResponses(None, 0.0, MEBIBYTE)
    kept.put(ANN, stored("a"))
    assert await kept.find(ANN, "a") is None
    kept.close()


async def test_room_is_bounded_and_one_holder_cannot_take_that_of_others() -> None:
    kept = StoredResponses(None, 60.0, MEBIBYTE)
    kept.put(BOB, stored("bobs", 1000))
    for number in range(100):
        kept.put(ANN, stored(str(number), 20_000))
    found = [number for number in range(100) if await kept.find(ANN, str(number))]
    assert found == list(range(100 - len(found), 100))
    assert 10 <= len(found) <= 13
    assert await kept.find(BOB, "bobs")
    kept.close()


def test_a_file_that_is_no_database_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_text("no database, but a text that is long enough to be none" * 50)
    with pytest.raises(ConfigurationError, match="responses file"):
        StoredResponses(path, 60.0, MEBIBYTE)
