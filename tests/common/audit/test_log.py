"""The audit log of a process: acts are refused while they cannot be recorded, decisions are kept until they can be."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest
import structlog

from common.audit import log as audit_log
from common.audit.chain import AuditChain, files_of
from common.audit.log import AuditLog, NoAudit, open_audit
from common.audit.records import AuditRecord, read_records
from common.audit.verification import verify_chain
from common.errors import InvalidRequestError, UnavailableError
from common.settings import AuditSettings
from tests.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

ANN = {"tenant": "acme", "subject": "user/ann", "credential": "key/k1"}


class FullDisk(AuditChain):
    """A chain whose disk can be full."""

    is_full = False

    def append(self, entries: Sequence[Mapping[str, object]], now: str) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append(entries, now)


@pytest.fixture
def chain(tmp_path: Path) -> FullDisk:
    return FullDisk(tmp_path, "gateway", 1 << 20)


@pytest.fixture
def log(chain: FullDisk) -> Iterator[AuditLog]:
    opened = AuditLog(chain, "gateway", clock=lambda: 1_000_000.0)
    yield opened
    chain.is_full = False
    opened.close()
    assert verify_chain(files_of(chain.directory)).broken is None


def fields_of(chain: AuditChain) -> list[dict[str, Any]]:
    parts = [part for path in files_of(chain.directory) for part in read_records(path.read_bytes())]
    return [dict(part.fields) for part in parts if isinstance(part, AuditRecord)]


async def test_an_act_has_a_record_before_it_is_done_and_one_with_its_outcome(chain: FullDisk, log: AuditLog) -> None:
    structlog.contextvars.bind_contextvars(http_request_id="req_1")
    try:
        async with log.act("cache.flush", ANN, {"model": "m"}) as results:
            assert [each["action"] for each in fields_of(chain)] == ["service.started", "cache.flush"]
            results["freed_pages"] = 3
    finally:
        structlog.contextvars.clear_contextvars()
    _, begun, done = fields_of(chain)
    assert (begun["outcome"], begun["what"], begun["actor"]) == ("begun", {"model": "m"}, ANN)
    assert (begun["time"], begun["service"]) == ("1970-01-12T13:46:40.000000+00:00", "gateway")
    assert (done["outcome"], done["what"], done["actor"]) == ("done", {"freed_pages": 3}, ANN)
    assert done["began"] == begun["sequence"]
    assert begun["request_id"] == done["request_id"] == "req_1"


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (InvalidRequestError("a message that may quote a prompt"), "failed", "invalid_request"),
        (RuntimeError("another"), "failed", "RuntimeError"),
        (asyncio.CancelledError(), "cancelled", "CancelledError"),
    ],
)
async def test_an_act_that_fails_is_recorded_without_its_message(
    chain: FullDisk, log: AuditLog, error: BaseException, outcome: str, code: str
) -> None:
    with pytest.raises(type(error)):
        async with log.act("cache.pin", ANN, {}):
            raise error
    await until(lambda: len(fields_of(chain)) == 3)
    ended = fields_of(chain)[-1]
    assert (ended["outcome"], ended["what"]) == (outcome, {"error": code})


async def test_an_act_that_cannot_be_recorded_is_refused_and_not_done(chain: FullDisk, log: AuditLog) -> None:
    await until(lambda: fields_of(chain))
    chain.is_full = True
    refused = audit_log.REFUSED_TOTAL._value.get()
    with pytest.raises(UnavailableError, match=r"cannot be recorded in the audit log .* No space"):
        async with log.act("cache.flush", ANN, {}):
            pytest.fail("it was done")
    assert audit_log.REFUSED_TOTAL._value.get() == refused + 1
    chain.is_full = False
    async with log.act("cache.flush", ANN, {}):
        pass
    assert [each["action"] for each in fields_of(chain)] == ["service.started", "cache.flush", "cache.flush"]


async def test_the_outcome_of_an_act_is_kept_while_the_disk_is_full(chain: FullDisk, log: AuditLog) -> None:
    async with log.act("cache.flush", ANN, {}) as results:
        chain.is_full = True
        results["freed_pages"] = 1
    chain.is_full = False
    await until(lambda: fields_of(chain)[-1]["outcome"] == "done")
    assert fields_of(chain)[-1]["what"] == {"freed_pages": 1}


def test_decisions_are_kept_while_the_disk_is_full_and_more_are_counted(
    chain: FullDisk, log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "MAX_UNWRITTEN", 3)
    wait_until(lambda: fields_of(chain))
    chain.is_full = True
    for number in range(5):
        log.note("cache.promoted", {"node": number})
    wait_until(lambda: audit_log.UNWRITTEN._value.get() == 5)
    chain.is_full = False
    wait_until(lambda: audit_log.UNWRITTEN._value.get() == 0)
    _, lost, *kept = fields_of(chain)
    assert (lost["action"], lost["what"]) == ("audit.lost", {"records": 2})
    assert [each["what"]["node"] for each in kept] == [0, 1, 2]


def test_metrics_and_log_have_the_head(chain: FullDisk, capsys: pytest.CaptureFixture[str]) -> None:
    log = AuditLog(chain, "gateway")
    log.note("limits.changed", {})
    log.close()
    assert (audit_log.RECORDS._value.get(), audit_log.HEAD._value.get()) == (3, int(chain.hash[:12], 16))
    shown = capsys.readouterr()
    assert f"3:{chain.hash}" in shown.out + shown.err


async def test_without_a_directory_nothing_is_recorded() -> None:
    log = open_audit(AuditSettings(), "gateway")
    assert isinstance(log, NoAudit)
    async with log.act("cache.flush", ANN, {}) as results:
        results["freed_pages"] = 1
    log.note("keys.changed", {})
    log.close()


def test_the_settings_choose_the_directory(tmp_path: Path) -> None:
    log = open_audit(AuditSettings(directory=tmp_path), "scheduler")
    log.note("cache.promoted", {"node": 1})
    log.close()
    report = verify_chain(files_of(tmp_path / "scheduler"))
    assert (report.broken, report.records) == (None, 3)
