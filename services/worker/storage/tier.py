"""Transfers between a rank's host memory and storage, beside the engine: threads, which also encrypt, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from common.circuit_breaker import CircuitBreaker
from common.logs import get_logger
from common.transfers import TransferAck, TransferDirection
from services.worker import metrics
from services.worker.storage.interface import StorageError, StorageTimeoutError
from services.worker.storage.objects import Miss
from services.worker.stream_pages import StreamEndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import Gauge

    from common.transfers import Transfer
    from services.worker.storage.interface import Blob, Storage
    from services.worker.storage.objects import ObjectFormat
    from services.worker.stream_pages import StreamPages

T = TypeVar("T")

# Pages of one call to the back end: enough to hide a round trip, and few megabytes at a time.
BATCH_PAGES = 8
# Objects that one call looks for: no content moves, but a server may be asked for each of them.
BATCH_NAMES = 64


class _CallFailedError(Exception):
    """The back end did not answer, or not in time, or refused."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


class _Gate:
    """Lets calls of one kind through while they succeed, and tells operators when it closes and opens again."""

    def __init__(self, closed_event: str, opened_event: str, gauge: Gauge | None = None) -> None:
        """Start open; log these events, and set `gauge` to 1 while open, else to 0."""
        self._breaker = CircuitBreaker()
        self._closed_event = closed_event
        self._opened_event = opened_event
        self._gauge = gauge
        self._log = get_logger("storage")
        self._set_gauge()

    @property
    def is_closed(self) -> bool:
        """Whether calls are held back, but for one now and then."""
        return self._breaker.is_open

    def is_ready(self, now: float) -> bool:
        """Whether a call may be made."""
        return self._breaker.is_ready(now)

    def allows(self, now: float) -> bool:
        """Begin a call, if one may be made; return whether it may."""
        return self._breaker.allows(now)

    def succeed(self) -> None:
        """Take note of a call that went well."""
        was_closed = self.is_closed
        self._breaker.succeed()
        if was_closed:
            self._log.info(self._opened_event)
            self._set_gauge()

    def fail(self, now: float, reason: str, *, is_silent: bool = False) -> None:
        """Take note of a call that failed, or with `is_silent` of one that got no answer in time."""
        was_closed = self.is_closed
        self._breaker.fail(now, is_silent=is_silent)
        if self.is_closed and not was_closed:
            self._log.warning(self._closed_event, reason=reason)
            self._set_gauge()

    def _set_gauge(self) -> None:
        if self._gauge is not None:
            self._gauge.set(not self.is_closed)


class WorkerStorageTier:
    """Owns the back end and its threads. Methods belong to the event loop.

    Every transfer is acknowledged, in bounded time: a call that takes longer than `timeout_s` counts as failed, and
    after some failures the back end is left alone for a while, so that transfers fail at once.

    A back end that answers but refuses to write, as its disk is full or read-only, is read all the same, and only its
    writes pause; likewise if it refuses to delete.
    """

    def __init__(
        self, storage: Storage, timeout_s: float, threads: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take over `storage`; at most `threads` calls to it run at the same time, of which half may write."""
        self._storage = storage
        self._timeout_s = timeout_s
        self._clock = clock
        self._reading = _Gate("storage.unavailable", "storage.back", metrics.STORAGE_AVAILABLE)
        self._writing = _Gate("storage.writes_paused", "storage.writes_resumed", metrics.STORAGE_WRITABLE)
        self._deleting = _Gate("storage.deletions_paused", "storage.deletions_resumed")
        self._threads = ThreadPoolExecutor(threads, "storage")
        # Requests wait for reads.
        self._writers = asyncio.Semaphore(max(1, threads // 2))
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("storage")

    def begin(self, transfer: Transfer, shard: Shard, deliver: Callable[[TransferAck], None]) -> None:
        """Start on a transfer with `shard`; `deliver` gets its acknowledgement, unless the stream has ended."""
        task = asyncio.create_task(self._run(transfer, shard, deliver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float = 1.0) -> bool:
        """Stop; return whether all threads have come to their end."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        ending = asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        done, _ = await asyncio.wait([ending], timeout=timeout_s)
        if done:
            self._storage.close()
        return bool(done)

    async def _run(self, transfer: Transfer, shard: Shard, deliver: Callable[[TransferAck], None]) -> None:
        outcomes: list[Miss | None] = []
        started = self._clock()
        try:
            if transfer.direction is TransferDirection.FIND_IN_STORAGE:
                outcomes += [None] * await self._find(transfer.object_keys, shard)
            elif transfer.direction is TransferDirection.STORAGE_TO_HOST:
                await self._carry_out(transfer, shard, outcomes)
            else:
                async with self._writers:
                    started = self._clock()
                    await self._carry_out(transfer, shard, outcomes)
        except _CallFailedError as error:
            outcomes.append(error.miss)
        except StreamEndedError:
            return
        except Exception:  # noqa: BLE001  (whatever it is, the transfer is acknowledged)
            self._log.exception("storage.transfer_failed", direction=transfer.direction.value)
        seconds = self._clock() - started
        _count(transfer, outcomes, seconds)
        done = sum(outcome is None for outcome in outcomes)
        deliver(TransferAck(transfer.transfer_id, done, round(seconds * 1e6)))

    async def _carry_out(self, transfer: Transfer, shard: Shard, outcomes: list[Miss | None]) -> None:
        """Append each object's outcome, None for success; a miss is the last."""
        keys, places = transfer.object_keys, (*transfer.host_pages.tolist(), *transfer.host_snapshots.tolist())
        # A snapshot takes as much memory as many pages.
        at_once = 1 if len(transfer.host_snapshots) else BATCH_PAGES
        for first in range(0, len(keys), at_once):
            end = first + at_once
            outcomes += await self._move(transfer, shard, keys[first:end], places[first:end])
            if outcomes[-1] is not None:
                return

    async def _find(self, keys: Sequence[bytes], shard: Shard) -> int:
        """Return the number of keys up to the last one whose object exists."""
        for end in range(len(keys), 0, -BATCH_NAMES):
            first = max(end - BATCH_NAMES, 0)
            names = shard.names(keys[first:end])
            found = await self._call(partial(self._storage.exists_many, names))
            if any(found):
                return end - list(reversed(found)).index(True)
        return 0

    async def _move(
        self, transfer: Transfer, shard: Shard, keys: Sequence[bytes], pages: Sequence[int]
    ) -> list[Miss | None]:
        match transfer.direction:
            case TransferDirection.STORAGE_TO_HOST:
                blobs = await self._call(lambda: self._storage.get_many(shard.names(keys)))
                outcomes = await self._in_thread(lambda: shard.load(keys, transfer.cipher_key, blobs, pages))
                if outcomes[-1] not in (None, Miss.MISSING):
                    # Make room for a whole one, which would not replace it. The others were read even if this fails.
                    with contextlib.suppress(_CallFailedError):
                        await self._delete(shard.names(keys[len(outcomes) - 1 :][:1]))
                return outcomes
            case TransferDirection.HOST_TO_STORAGE:
                if not self._writing.is_ready(self._clock()):
                    raise _CallFailedError(Miss.UNAVAILABLE)
                # Also which were written before an earlier attempt failed.
                found = await self._call(lambda: self._storage.exists_many(shard.names(keys)))
                new = {key: page for key, page, is_there in zip(keys, pages, found, strict=True) if not is_there}
                if new:
                    objects = await self._in_thread(lambda: shard.dump(new, transfer.cipher_key))
                    await self._call(lambda: self._storage.put_many(objects), self._writing)
            case TransferDirection.DROP_FROM_STORAGE:
                names = shard.names(keys)
                found = await self._call(lambda: self._storage.exists_many(names))
                await self._delete([name for name, is_there in zip(names, found, strict=True) if is_there])
            case _:
                raise AssertionError(f"{transfer.direction} is the engine's")
        return [None] * len(keys)

    async def _delete(self, names: Sequence[str]) -> None:
        """Delete objects that exist."""
        if names:
            await self._call(lambda: self._storage.delete_many(names), self._deleting)

    async def _call(self, function: Callable[[], T], gate: _Gate | None = None) -> T:
        """Call the back end to read, or after a read has succeeded, through the gate of another kind of calls.

        Raises:
            _CallFailedError: it fails, takes too long or is not to be tried now.
        """
        gate = self._reading if gate is None else gate
        if not gate.allows(self._clock()):
            raise _CallFailedError(Miss.UNAVAILABLE)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._in_thread(function)
        except TimeoutError:
            # The thread continues; its result is dropped.
            gate.fail(self._clock(), f"no answer within {self._timeout_s:g} s", is_silent=True)
            raise _CallFailedError(Miss.SLOW) from None
        except StorageError as error:
            gate.fail(self._clock(), str(error), is_silent=isinstance(error, StorageTimeoutError))
            raise _CallFailedError(Miss.UNAVAILABLE) from error
        except Exception as error:
            # Of a package's back end, say. Its caller logs it.
            gate.fail(self._clock(), repr(error))
            raise
        gate.succeed()
        return answer

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _count(transfer: Transfer, outcomes: Sequence[Miss | None], seconds: float) -> None:
    direction = transfer.direction.value
    if transfer.direction is not TransferDirection.FIND_IN_STORAGE:
        moved = metrics.STORAGE_SNAPSHOTS_TOTAL if len(transfer.host_snapshots) else metrics.STORAGE_PAGES_TOTAL
        for outcome in outcomes:
            moved.labels(direction, "done" if outcome is None else outcome.value).inc()
    metrics.STORAGE_SECONDS.labels(direction).observe(seconds)


class Shard:
    """Turns host pages, or snapshots of recurrent states, into objects and back. Its methods belong to no thread."""

    def __init__(self, pages: StreamPages, form: ObjectFormat) -> None:
        """Read and write `pages`, or the snapshots beside them, as objects of the form `form`."""
        has_states = form.state_bytes is not None
        self._read: Callable[[int], bytes] = pages.read_state if has_states else pages.read_page
        self._write: Callable[[int, memoryview], None] = pages.write_state if has_states else pages.write_page
        self._form = form

    def names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of this rank's objects."""
        return [self._form.name(key) for key in keys]

    def dump(self, pages: Mapping[bytes, int], cipher_key: bytes) -> dict[str, Blob]:
        """Return the objects to write for host pages or slots by storage key, by name.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        objects: dict[str, Blob] = {}
        for key, page in pages.items():
            content = self._read(page)
            objects[self._form.name(key)] = self._form.encode(key, cipher_key, content)
        return objects

    def load(
        self, keys: Sequence[bytes], cipher_key: bytes, blobs: Sequence[Blob | None], pages: Sequence[int]
    ) -> list[Miss | None]:
        """Decrypt what was read and write it to host pages or slots, up to the first one that cannot be had.

        Returns:
            The outcomes, in order: None for one that was loaded; a miss is the last.

        Raises:
            StreamEndedError: the stream of plans has ended.
        """
        outcomes: list[Miss | None] = []
        for key, blob, page in zip(keys, blobs, pages, strict=True):
            payload = Miss.MISSING if blob is None else self._form.decode(key, cipher_key, blob)
            if isinstance(payload, Miss):
                outcomes.append(payload)
                break
            self._write(page, payload)
            outcomes.append(None)
        return outcomes
