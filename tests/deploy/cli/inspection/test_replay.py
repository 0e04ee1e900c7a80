from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from deploy.cli import main
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.debug.replay import encode_header

if TYPE_CHECKING:
    from pathlib import Path

HEADER = encode_header("shared", 2, 4, CacheConfig())
COMMIT = {
    "number": 1,
    "operation": "commit",
    "given": {
        "view": ["tenant", "user/ann", ""],
        "token_ids": [1, 2, 3],
        "repeated": False,
        "may_promote": True,
        "priority": 0,
        "session": None,
    },
    "outcome": {"lock": 0, "pages": []},
    "events": [],
}


def test_sound_log_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join([HEADER, orjson.dumps(COMMIT)]))
    assert main(["cache", "replay", str(log)]) == 0
    output = capsys.readouterr().out
    assert "1 operations of 1 starts replayed" in output
    assert "no difference" in output


def test_difference_is_shown_and_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    wrong = {**COMMIT, "outcome": {"lock": 7, "pages": []}}
    log.write_bytes(b"\n".join([HEADER, orjson.dumps(wrong)]))
    assert main(["cache", "replay", str(log)]) == 1
    output = capsys.readouterr().out
    assert "first difference: operation 1 (commit), line 2" in output
    assert "outcome.lock" in output


@pytest.mark.parametrize("content", [b"", b"neither json", None])
def test_a_file_that_is_not_a_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    log = tmp_path / "log"
    if content is not None:
        log.write_bytes(content)
    assert main(["cache", "replay", str(log)]) == 2
    assert "pando cache replay:" in capsys.readouterr().err
