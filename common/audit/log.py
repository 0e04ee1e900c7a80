"""The audit log of a process: acts of administrators are refused if they cannot be recorded, decisions are not."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

import structlog
from prometheus_client import Counter, Gauge

from common.audit.chain import AuditChain
from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.version import version

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from common.settings import AuditSettings

# Fields of a record, which are JSON: names and numbers, never a secret or a prompt's text.
What = dict[str, object]

# Seconds after which a changed head is logged, and after which records are tried again that could not be written.
HEAD_INTERVAL_S = 300.0
RETRY_S = 1.0
# Records that wait until they can be written: some MB.
MAX_UNWRITTEN = 10_000
# Bits of the head's hash in the metric, which is a floating point number.
HEAD_DIGITS = 12
REFUSED = "this act cannot be recorded in the audit log now, and is refused"
LOST = "audit.lost"

RECORDS = Gauge("pando_audit_records", "Number of the last record in the audit log; 0: there is none.")
HEAD = Gauge(
    "pando_audit_head", "First 48 bits of the last record's hash, as a number; `pando audit verify --head` compares it."
)
UNWRITTEN = Gauge("pando_audit_unwritten_records", "Records that could not be written yet; 0 is right.")
LOST_TOTAL = Counter("pando_audit_lost_records_total", "Records that could not be written, and were given up.")
REFUSED_TOTAL = Counter(
    "pando_audit_refused_acts_total", "Acts of administrators that were refused because they could not be recorded."
)


class Audit(Protocol):
    """Records who did what."""

    def act(
        self, action: str, actor: Mapping[str, object], what: Mapping[str, object]
    ) -> AbstractAsyncContextManager[What]:
        """Record an act that is done within the block, which may add its results to the yielded mapping.

        One record is durable before the block runs, and another one has its outcome.

        Raises:
            UnavailableError: the act cannot be recorded; the block does not run.
        """

    def note(self, action: str, what: Mapping[str, object], outcome: str = "done") -> None:
        """Record a decision of this process, or something that it has noticed, without waiting."""

    def close(self) -> None:
        """Write what has been noted."""


class NoAudit:
    """Implements `Audit` where no log is configured."""

    @contextlib.asynccontextmanager
    async def act(self, _action: str, _actor: Mapping[str, object], _what: Mapping[str, object]) -> AsyncIterator[What]:
        """Record nothing."""
        yield {}

    def note(self, _action: str, _what: Mapping[str, object], _outcome: str = "done") -> None:
        """Record nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Entry:
    fields: What
    # Called with None when the record is durable, or with the error; absent: the record is kept until then.
    settle: Callable[[OSError | None], None] | None = None
    sequence: int = 0


class AuditLog:
    """Implements `Audit` with a chain of records, written by a thread of its own, several at a time."""

    def __init__(self, chain: AuditChain, service: str, clock: Callable[[], float] = time.time) -> None:
        """Continue `chain`; `clock` returns seconds since 1970."""
        self._chain = chain
        self._service = service
        self._clock = clock
        self._log = get_logger("audit")
        self._entries: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._kept: deque[_Entry] = deque()
        self._lost = 0
        self._is_failing = False
        self._shown = (0, 0.0)
        self.note("service.started", {"version": version()})
        self._thread = threading.Thread(target=self._write, name="audit-log", daemon=True)
        self._thread.start()

    @contextlib.asynccontextmanager
    async def act(self, action: str, actor: Mapping[str, object], what: Mapping[str, object]) -> AsyncIterator[What]:
        """See `Audit.act`."""
        begun = _Entry(self._fields(action, "begun", actor, what))
        try:
            await self._durable(begun)
        except OSError as error:
            REFUSED_TOTAL.inc()
            self._log.error("audit.act_refused", action=action, reason=str(error))
            raise UnavailableError(f"{REFUSED}: {error.strerror or error}") from error
        results: What = {}
        try:
            yield results
        except BaseException as error:
            outcome = "failed" if isinstance(error, Exception) else "cancelled"
            code = error.code.value if isinstance(error, PandoError) else type(error).__name__
            self._put(_Entry(self._fields(action, outcome, actor, {"error": code}, begun.sequence)))
            raise
        ended = _Entry(self._fields(action, "done", actor, results, begun.sequence))
        try:
            await self._durable(ended)
        except OSError:
            # It is done, so its outcome is kept until it can be written.
            self._put(_Entry(ended.fields))

    def note(self, action: str, what: Mapping[str, object], outcome: str = "done") -> None:
        """See `Audit.note`."""
        self._put(_Entry(self._fields(action, outcome, {"system": self._service}, what)))

    def close(self) -> None:
        """Write what has been noted, and close the file."""
        self.note("service.stopped", {})
        self._entries.put(None)
        self._thread.join()
        self._chain.close()

    def _fields(
        self,
        action: str,
        outcome: str,
        actor: Mapping[str, object],
        what: Mapping[str, object],
        began: int | None = None,
    ) -> What:
        bound = structlog.contextvars.get_contextvars()
        request_id = bound.get("http_request_id") or bound.get("request_id")
        fields: What = {"time": self._now(), "service": self._service, "action": action, "outcome": outcome}
        if began is not None:
            fields["began"] = began
        if request_id is not None:
            fields["request_id"] = request_id
        return {**fields, "actor": dict(actor), "what": dict(what)}

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="microseconds")

    def _put(self, entry: _Entry) -> None:
        self._entries.put(entry)

    async def _durable(self, entry: _Entry) -> None:
        """Wait until a record is durable.

        Raises:
            OSError: it cannot be written.
        """
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()

        def settle(error: OSError | None) -> None:
            if not written.done():
                written.set_exception(error) if error is not None else written.set_result(None)

        def settle_soon(error: OSError | None) -> None:
            # A loop that has ended awaits nothing.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, error)

        entry.settle = settle_soon
        self._put(entry)
        await written

    # --- the thread ---

    def _write(self) -> None:
        is_over = False
        while not is_over:
            batch, is_over = self._take()
            self._write_batch(batch)
            self._show_head(is_over=is_over)

    def _take(self) -> tuple[list[_Entry], bool]:
        """Wait for entries; return all that are there, and whether they are the last ones."""
        batch: list[_Entry] = []
        try:
            entry = self._entries.get(timeout=RETRY_S if self._kept or self._lost else HEAD_INTERVAL_S)
            while entry is not None:
                batch.append(entry)
                entry = self._entries.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _write_batch(self, batch: list[_Entry]) -> None:
        entries = [*self._kept, *batch]
        if self._lost:
            entries.insert(0, _Entry(self._fields(LOST, "failed", {"system": self._service}, {"records": self._lost})))
        if not entries:
            return
        try:
            self._chain.append([entry.fields for entry in entries], self._now())
        except OSError as error:
            self._on_failure(batch, error)
            return
        for number, entry in enumerate(reversed(entries)):
            entry.sequence = self._chain.sequence - number
        for entry in batch:
            if entry.settle is not None:
                entry.settle(None)
        if self._is_failing:
            self._log.warning("audit.written_again", lost=self._lost)
        self._kept.clear()
        self._lost, self._is_failing = 0, False
        UNWRITTEN.set(0)
        RECORDS.set(self._chain.sequence)
        HEAD.set(int(self._chain.hash[:HEAD_DIGITS], 16))

    def _on_failure(self, batch: list[_Entry], error: OSError) -> None:
        for entry in batch:
            if entry.settle is not None:
                entry.settle(error)
            elif len(self._kept) < MAX_UNWRITTEN:
                self._kept.append(entry)
            else:
                self._lost += 1
                LOST_TOTAL.inc()
        UNWRITTEN.set(len(self._kept) + self._lost)
        if not self._is_failing:
            self._is_failing = True
            self._log.error("audit.not_written", directory=str(self._chain.directory), reason=str(error))

    def _show_head(self, *, is_over: bool) -> None:
        """Log number and hash of the last record, so that records removed from the end are missed."""
        sequence, shown_at = self._shown
        is_due = not shown_at or is_over or time.monotonic() - shown_at >= HEAD_INTERVAL_S
        if is_due and self._chain.sequence != sequence:
            self._shown = self._chain.sequence, time.monotonic()
            self._log.info(
                "audit.head",
                directory=str(self._chain.directory),
                head=f"{self._chain.sequence}:{self._chain.hash}",
            )


def open_audit(settings: AuditSettings, service: str) -> Audit:
    """Return the audit log of this process, which records nothing unless a directory is configured.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    if settings.directory is None:
        return NoAudit()
    return AuditLog(AuditChain(settings.directory, service, settings.max_file_bytes), service)
