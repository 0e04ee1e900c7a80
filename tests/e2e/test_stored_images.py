"""A prefix with an image in a storage: after a restart of its group, the same user finds it, and no other user."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from common.settings import (
    GatewaySettings,
    HostTierSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    StorageSettings,
    TokenizerSettings,
    WorkerSettings,
    WorkerStorageSettings,
)
from common.settings.tokenizer import ImageDecodingSettings
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import chat_prompt, continued, save_seeing_model
from tests.e2e.test_images import TOKENS, ask, cached, message
from tests.services.tokenizer.images.pictures import picture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PAGE = 16
PARTS = picture(200, 60, seed=2), "What is it?"
WHOLE_PAGES = len(chat_prompt(*PARTS).ids) // PAGE


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def storing(directory: Path, run_root: Path) -> Iterator[Served]:
    place = Path(tempfile.mkdtemp(prefix="pando-storage-"))
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32", images="on"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            host_tier=HostTierSettings(pages=200),
            storage=StorageSettings(prefetch="wait_complete", keyring=place / "keyring.db"),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(str(place / "files")), timeout_s=100.0)),
        tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
    )
    yield from serve(settings, run_root)
    shutil.rmtree(place)


def found(served: Served, user: str, parts: tuple[Any, ...], expected: list[int]) -> int:
    """Return the number of cached tokens of a prompt, after a check of the answer to it."""
    with served.leaving_nothing_behind():
        answer = ask(served, user, message(*parts))
    assert answer["choices"][0]["token_ids"] == expected
    return cached(answer)


def test_an_image_is_found_in_a_storage_by_the_same_user_only(storing: Served, directory: Path) -> None:
    other = picture(200, 60, seed=3), PARTS[1]
    expected = continued(directory, chat_prompt(*PARTS), TOKENS)
    assert found(storing, "ada", PARTS, expected) == 0
    wait_until(lambda: storing.state().storage.stored_pages >= WHOLE_PAGES)
    restarts = storing.deployment.restarts_of("worker")
    storing.deployment.kill("worker")
    wait_until(lambda: storing.deployment.restarts_of("worker") > restarts)
    wait_until(storing.is_ready, timeout_s=120.0)
    # Device and host are empty: all that is found now comes from the storage.
    assert found(storing, "bob", PARTS, expected) == 0
    assert found(storing, "ada", other, continued(directory, chat_prompt(*other), TOKENS)) < PAGE * 2
    assert storing.state().storage.fetched_pages < 2
    assert found(storing, "ada", PARTS, expected) == WHOLE_PAGES * PAGE
    assert storing.state().storage.fetched_pages >= WHOLE_PAGES - 1
