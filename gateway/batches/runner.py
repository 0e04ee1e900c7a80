"""Runs the lines of batches, in every gateway: each batch in the one that holds its lease."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson

from common.errors import UnavailableError
from common.logs import get_logger
from gateway.batches.batches import ENDED, BatchOutputs
from gateway.batches.files import NewFile, new_file_id
from gateway.batches.lines import MAX_ERRORS, BatchLineError, answered, parse_line, split_lines, unanswered
from gateway.batches.turns import LineTurns
from gateway.server.errors import HttpError
from gateway.server.middleware import BATCH_CALLER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message

    from gateway.batches.batches import Batches, BatchLease, BatchRecord
    from gateway.batches.contents import ContentWriter
    from gateway.batches.files import Files
    from gateway.batches.lines import BatchLine
    from gateway.identity.caller import Caller

Json: TypeAlias = dict[str, Any]  # Any: free JSON

POLL_S: Final = 1.0
SWEEP_S: Final = 600.0
RENEW_S: Final = 3.0
# A line that is refused for the time being is tried again after this, or after what the refusal says.
LEAST_WAIT_S: Final = 0.5
MOST_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class LineBounds:
    """Bounds on lines: how many run in this gateway at a time, how many a batch may have, and the bytes of one."""

    at_once: int
    of_batch: int
    line_bytes: int


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The HTTP response to a line's request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def wait_s(self) -> float | None:
        """Seconds after which the request should be repeated; None if its outcome is final."""
        if self.status not in (408, 429) and self.status < 500:
            return None
        if self.headers.get("x-should-retry") != "true":
            return None
        wanted = int(self.headers.get("retry-after-ms", "1000")) / 1000
        return min(max(wanted, LEAST_WAIT_S), MOST_WAIT_S)


async def request_line(app: ASGIApp, caller: Caller, path: str, body: Json) -> LineResponse:
    """Send a request to the application in the name of `caller`, without a connection."""
    content = orjson.dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        BATCH_CALLER: caller,
    }
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    forever = asyncio.Event()
    status, sent, parts = 500, {}, []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await forever.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, sent
        if message["type"] == "http.response.start":
            status = message["status"]
            sent = {name.decode().lower(): value.decode() for name, value in message.get("headers", ())}
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return LineResponse(status, sent, b"".join(parts))


class BatchRunner:
    """Takes leases of unfinished batches and runs their lines.

    The first outcome that is stored for a line is its only one. So the output has each line exactly once, even if a
    gateway whose lease ran out while it hung still stores outcomes.
    """

    def __init__(
        self,
        app: ASGIApp,
        batches: Batches,
        files: Files,
        bounds: LineBounds,
    ) -> None:
        """Send the lines' requests to `app`."""
        self._app = app
        self._batches = batches
        self._files = files
        self._bounds = bounds
        self._holder = secrets.token_hex(8)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._turns = LineTurns(bounds.at_once)
        self._log = get_logger("batches")

    async def run(self, stopping: asyncio.Event) -> None:
        """Work on batches until `stopping` is set; then leave them to other gateways, or to the next start."""
        sweep_at = 0.0
        try:
            while not stopping.is_set():
                try:
                    if time.monotonic() >= sweep_at:
                        sweep_at = time.monotonic() + SWEEP_S
                        await self._files.sweep()
                    self._batches.created.clear()
                    await self._claim()
                except UnavailableError as error:
                    self._log.warning("batches.waiting", reason=error.message)
                await self._pause(stopping)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _pause(self, stopping: asyncio.Event) -> None:
        """Wait until it is time to look for batches again."""
        events = [asyncio.create_task(event.wait()) for event in (stopping, self._batches.created)]
        try:
            await asyncio.wait(events, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()

    async def _claim(self) -> None:
        for batch_id in await self._batches.open_ids():
            if batch_id in self._running:
                continue
            lease = await self._batches.claim(batch_id, self._holder)
            if lease is not None:
                task = asyncio.create_task(self._work(batch_id, lease))
                self._running[batch_id] = task
                task.add_done_callback(lambda _, batch_id=batch_id: self._running.pop(batch_id, None))  # type: ignore[misc]

    async def _work(self, batch_id: str, lease: BatchLease) -> None:
        keeper = _LeaseKeeper(self._batches, batch_id, lease)
        try:
            batch = await self._batches.find(lease.owner, batch_id)
            if batch is None:
                await self._batches.close(batch_id)
                return
            self._log.info("batch.taken", batch=batch_id, tenant=batch.caller.tenant, status=batch.status)
            async with keeper:
                run = BatchRun(batch, self._app, self._batches, self._files, self._bounds, self._turns)
                await run.run()
        except _LeaseLostError:
            self._log.warning("batch.lost", batch=batch_id)
        except UnavailableError as error:
            self._log.warning("batch.interrupted", batch=batch_id, reason=error.message)
        except Exception as error:  # noqa: BLE001  (the edge of the batch's task; another try follows after its lease)
            self._log.error("batch.failed", batch=batch_id, exc_info=error)
        except asyncio.CancelledError:
            with contextlib.suppress(UnavailableError):
                await self._batches.give_up(batch_id, keeper.lease)
            raise


class _LeaseLostError(Exception):
    """Another gateway works on the batch."""


class _LeaseKeeper:
    """Renews a lease during a block, and cancels the block when it is lost."""

    def __init__(self, batches: Batches, batch_id: str, lease: BatchLease) -> None:
        self.lease = lease
        self._batches = batches
        self._batch_id = batch_id
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        await self._group.__aenter__()
        self._task = self._group.create_task(self._renew())

    async def __aexit__(self, *details: Any) -> None:  # Any: the protocol of context managers
        assert self._task is not None
        self._task.cancel()
        try:
            await self._group.__aexit__(*details)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            renewed = await self._batches.renew(self._batch_id, self.lease)
            if renewed is None:
                raise _LeaseLostError
            self.lease = renewed


class BatchRun:
    """One batch in the gateway that holds its lease, from any state that another gateway has left it in."""

    def __init__(
        self,
        batch: BatchRecord,
        app: ASGIApp,
        batches: Batches,
        files: Files,
        bounds: LineBounds,
        turns: LineTurns,
    ) -> None:
        """`turns` bounds the lines of all batches of the gateway."""
        self._batch = batch
        self._app = app
        self._batches = batches
        self._files = files
        self._bounds = bounds
        self._turns = turns
        self._outcomes: dict[int, bool] = {}
        self._log = get_logger("batches")

    async def run(self) -> None:
        """Bring the batch to its end."""
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status in {"in_progress", "cancelling"}:
            self._outcomes = await self._batches.outcomes(self._batch.id)
        if self._batch.status == "in_progress":
            await self._run_lines()
        if self._batch.status not in ENDED:
            await self._finalize()
        # In this order: after an interruption, the batch is taken once more.
        await self._batches.forget_outcomes(self._batch.id)
        await self._batches.close(self._batch.id)
        self._log.info("batch.ended", batch=self._batch.id, status=self._batch.status)

    async def _change(self, status: str, only_from: str, end: str | None = None, **fields: object) -> None:
        """Change the status unless the batch has been cancelled meanwhile."""
        now = int(self._batches.clock())

        def change(batch: BatchRecord) -> BatchRecord | None:
            if batch.status != only_from:
                return None
            return replace(batch.changed(status=status, **{f"{status}_at": now}, **fields), end=end)

        self._batch = await self._batches.update(self._batch, change)

    async def _validate(self) -> None:
        errors, total, seen = [], 0, set()
        try:
            await self._files.get(self._batch.owner, self._batch.shown["input_file_id"])
            async for number, raw in self._raw_lines():
                total += 1
                try:
                    line = self._parse(raw, number)
                    if line.custom_id in seen:
                        raise BatchLineError("duplicate_custom_id", "'custom_id' occurs more than once.", "custom_id")
                    seen.add(line.custom_id)
                    if total > self._bounds.of_batch:
                        message = f"The file has more lines than the limit of {self._bounds.of_batch}."
                        raise BatchLineError("too_many_lines", message)
                except BatchLineError as error:
                    errors.append(_error(error.code, error.message, error.param, number + 1))
                    if len(errors) >= MAX_ERRORS or error.code == "too_many_lines":
                        break
        except HttpError:
            errors.append(_error("file_not_found", "The input file does not exist.", "input_file_id", None))
        if not total and not errors:
            errors.append(_error("empty_file", "The input file has no lines.", "input_file_id", None))
        if errors:
            await self._change("failed", "validating", errors={"object": "list", "data": errors})
            return
        counts = {"total": total, "completed": 0, "failed": 0}
        await self._change("in_progress", "validating", request_counts=counts)

    async def _raw_lines(self) -> AsyncIterator[tuple[int, bytes]]:
        content = self._files.content(self._batch.shown["input_file_id"])
        number = 0
        async for raw in split_lines(content, self._bounds.line_bytes):
            yield number, raw
            number += 1

    def _parse(self, raw: bytes, number: int) -> BatchLine:
        return parse_line(raw, number, self._batch.shown["endpoint"], self._bounds.line_bytes)

    async def _run_lines(self) -> None:
        """Run the lines without an outcome, until all have one or the batch is cancelled or expires."""
        lines = asyncio.create_task(self._start_lines())
        try:
            while not lines.done() and self._batch.status == "in_progress":
                remaining = self._batch.shown["expires_at"] - self._batches.clock()
                if remaining <= 0:
                    break
                await asyncio.wait([lines], timeout=min(POLL_S, remaining))
                self._batch = await self._batches.update(self._batch, self._with_counts)
            if lines.done():
                try:
                    lines.result()
                except BaseExceptionGroup as group:
                    raise group.exceptions[0] from group
        finally:
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)

    def _with_counts(self, batch: BatchRecord) -> BatchRecord | None:
        if batch.status in ENDED:
            return None
        succeeded = sum(self._outcomes.values())
        total = batch.shown["request_counts"]["total"]
        counts = {"total": total, "completed": succeeded, "failed": len(self._outcomes) - succeeded}
        return None if counts == batch.shown["request_counts"] else batch.changed(request_counts=counts)

    async def _start_lines(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for number, raw in self._raw_lines():
                if number in self._outcomes:
                    continue
                await self._turns.take(self._batch.owner)
                task = group.create_task(self._run_line(self._parse(raw, number)))
                task.add_done_callback(lambda _: self._turns.give_back(self._batch.owner))

    async def _run_line(self, line: BatchLine) -> None:
        batch = self._batch
        while True:
            response = await request_line(self._app, batch.caller, batch.shown["endpoint"], line.body)
            if response.wait_s is None:
                break
            await asyncio.sleep(response.wait_s)
        succeeded = response.status == 200
        request_id = response.headers.get("x-request-id", "")
        output = answered(batch.id, line, response.status, request_id, response.body)
        await self._batches.note_outcome(batch.id, line.index, succeeded=succeeded, output=output)
        self._outcomes[line.index] = succeeded

    async def _finalize(self) -> None:
        """Write the output files and end the batch; goes on from any point at which another gateway was interrupted."""
        if self._batch.status == "in_progress":
            is_whole = len(self._outcomes) == self._batch.shown["request_counts"]["total"]
            await self._change("finalizing", "in_progress", end="completed" if is_whole else "expired")
        end = self._batch.end or "cancelled"
        if self._batch.outputs is None:
            await self._write_files(end)
        outputs = self._batch.outputs
        if outputs is None or self._batch.status in ENDED:
            raise _LeaseLostError
        for kind, file_id, size in (
            ("output", outputs.output_id, outputs.output_bytes),
            ("errors", outputs.errors_id, outputs.errors_bytes),
        ):
            if file_id is not None:
                name = f"{self._batch.id}_{kind}.jsonl"
                await self._files.add(self._batch.owner, NewFile(file_id), name, "batch_output", size)
        total = self._batch.shown["request_counts"]["total"]
        counts = {"total": total, "completed": outputs.succeeded, "failed": outputs.failed}
        ids = {"output_file_id": outputs.output_id, "error_file_id": outputs.errors_id}
        await self._change(end, self._batch.status, **ids, request_counts=counts)

    async def _write_files(self, end: str) -> None:
        """Write the contents of the output files, and note them in the batch.

        A gateway that hung may go on here after it has lost its lease, when outcomes may have been forgotten. So each
        attempt writes files of its own, whose ids are in the batch, and its files count only if they still are there.
        """
        drafts = (new_file_id(), new_file_id())
        abandoned: tuple[str, ...] = ()

        def begin(batch: BatchRecord) -> BatchRecord | None:
            nonlocal abandoned
            abandoned = batch.drafts
            return None if batch.outputs or batch.status in ENDED else replace(batch, drafts=drafts)

        self._batch = await self._batches.update(self._batch, begin)
        if self._batch.drafts != drafts:
            return
        for file_id in abandoned:
            await self._files.discard(NewFile(file_id))
        outputs, errors = (self._files.writer(file_id) for file_id in drafts)
        try:
            succeeded, failed = await self._write_outputs(end, outputs, errors)
            for writer in (outputs, errors):
                if writer.size:
                    await writer.finish()
        except BaseException:
            await outputs.discard()
            await errors.discard()
            raise
        ids = [file_id if writer.size else None for file_id, writer in zip(drafts, (outputs, errors), strict=True)]
        made = BatchOutputs(succeeded, failed, ids[0], outputs.size, ids[1], errors.size)

        def note(batch: BatchRecord) -> BatchRecord | None:
            return replace(batch, outputs=made, drafts=()) if batch.drafts == drafts else None

        self._batch = await self._batches.update(self._batch, note)
        for file_id in drafts:
            if self._batch.outputs != made or file_id not in ids:
                await self._files.discard(NewFile(file_id))

    async def _write_outputs(self, end: str, outputs: ContentWriter, errors: ContentWriter) -> tuple[int, int]:
        """Write the stored outcomes in the order of the lines; return the numbers of successes and failures."""
        succeeded = failed = 0
        async for number, raw in self._raw_lines():
            outcome = await self._batches.outcome(self._batch.id, number)
            if outcome is None and end == "expired":
                message = "This request could not be executed before the completion window expired."
                await errors.write(unanswered(self._batch.id, self._parse(raw, number), "batch_expired", message))
            if outcome is None:
                continue
            is_success, output = outcome
            succeeded += is_success
            failed += not is_success
            await (outputs if is_success else errors).write(output)
        return succeeded, failed


def _error(code: str, message: str, param: str | None, line: int | None) -> Json:
    return {"code": code, "message": message, "param": param, "line": line}
