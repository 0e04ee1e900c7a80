"""Carries out transfers with storage beside the engine: in threads of their own, which also encrypt, with deadlines."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from common.logs import get_logger
from common.transfers import TransferAck, TransferDirection
from services.worker import metrics
from services.worker.storage.breaker import CircuitBreaker
from services.worker.storage.interface import StorageError
from services.worker.storage.objects import Miss
from services.worker.storage.shard import ShardClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.transfers import Transfer
    from services.worker.storage.interface import Storage
    from services.worker.storage.shard import Shard

T = TypeVar("T")

# Pages of one call to the back end: enough to hide a round trip, and few megabytes at a time.
BATCH_PAGES = 8


class _CallFailedError(Exception):
    """The back end did not answer, or not in time."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


class WorkerStorageTier:
    """Owns the back end and its threads. Methods belong to the event loop.

    Every transfer is acknowledged, in bounded time: a call that takes longer than `timeout_s` counts as failed, and
    after some failures the back end is left alone for a while, so that transfers fail at once.
    """

    def __init__(
        self, storage: Storage, timeout_s: float, threads: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take over `storage`; at most `threads` calls to it run at the same time, of which half may write."""
        self._storage = storage
        self._timeout_s = timeout_s
        self._clock = clock
        self._breaker = CircuitBreaker()
        self._threads = ThreadPoolExecutor(threads, "storage")
        # Requests wait for reads.
        self._writers = asyncio.Semaphore(max(1, threads // 2))
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("storage")
        metrics.STORAGE_AVAILABLE.set(1)

    def begin(self, transfer: Transfer, shard: Shard, deliver: Callable[[TransferAck], None]) -> None:
        """Start on a transfer of pages of `shard`; `deliver` gets its acknowledgement, unless the shard is closed."""
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
            if transfer.direction is TransferDirection.STORAGE_TO_HOST:
                await self._carry_out(transfer, shard, outcomes)
            else:
                async with self._writers:
                    started = self._clock()
                    await self._carry_out(transfer, shard, outcomes)
        except _CallFailedError as error:
            outcomes.append(error.miss)
        except ShardClosedError:
            return
        except Exception:  # noqa: BLE001  (whatever it is, the transfer is acknowledged)
            self._log.exception("storage.transfer_failed", direction=transfer.direction.value)
        seconds = self._clock() - started
        _count(transfer, outcomes, seconds)
        done = sum(outcome is None for outcome in outcomes)
        deliver(TransferAck(transfer.transfer_id, done, round(seconds * 1e6)))

    async def _carry_out(self, transfer: Transfer, shard: Shard, outcomes: list[Miss | None]) -> None:
        """Append each page's outcome, None for success; a miss is the last."""
        keys, pages = transfer.object_keys, transfer.host_pages.tolist()
        for first in range(0, len(keys), BATCH_PAGES):
            end = first + BATCH_PAGES
            outcomes += await self._move(transfer, shard, keys[first:end], pages[first:end])
            if outcomes[-1] is not None:
                return

    async def _move(
        self, transfer: Transfer, shard: Shard, keys: Sequence[bytes], pages: Sequence[int]
    ) -> list[Miss | None]:
        match transfer.direction:
            case TransferDirection.STORAGE_TO_HOST:
                blobs = await self._call(lambda: self._storage.get_many(shard.names(keys)))
                outcomes = await self._in_thread(lambda: shard.load(keys, transfer.cipher_key, blobs, pages))
                if outcomes[-1] not in (None, Miss.MISSING):
                    # Make room for a whole one, which would not replace it.
                    await self._call(lambda: self._storage.delete_many(shard.names(keys[len(outcomes) - 1 :][:1])))
                return outcomes
            case TransferDirection.HOST_TO_STORAGE:
                found = await self._call(lambda: self._storage.exists_many(shard.names(keys)))
                new = {key: page for key, page, is_there in zip(keys, pages, found, strict=True) if not is_there}
                if new:
                    objects = await self._in_thread(lambda: shard.dump(new, transfer.cipher_key))
                    await self._call(lambda: self._storage.put_many(objects))
            case TransferDirection.DROP_FROM_STORAGE:
                await self._call(lambda: self._storage.delete_many(shard.names(keys)))
            case _:
                raise AssertionError(f"{transfer.direction} is the engine's")
        return [None] * len(keys)

    async def _call(self, function: Callable[[], T]) -> T:
        """Call the back end; raises _CallFailedError if that fails, takes too long or is not to be tried now."""
        if not self._breaker.allows(self._clock()):
            raise _CallFailedError(Miss.UNAVAILABLE)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._in_thread(function)
        except TimeoutError:
            # The thread continues; its result is dropped.
            self._note_failure(f"no answer within {self._timeout_s:g} s")
            raise _CallFailedError(Miss.SLOW) from None
        except StorageError as error:
            self._note_failure(str(error))
            raise _CallFailedError(Miss.UNAVAILABLE) from error
        if self._breaker.is_open:
            self._log.info("storage.back")
        self._breaker.succeed()
        metrics.STORAGE_AVAILABLE.set(1)
        return answer

    def _note_failure(self, reason: str) -> None:
        was_open = self._breaker.is_open
        self._breaker.fail(self._clock())
        if self._breaker.is_open and not was_open:
            self._log.warning("storage.unavailable", reason=reason)
            metrics.STORAGE_AVAILABLE.set(0)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _count(transfer: Transfer, outcomes: Sequence[Miss | None], seconds: float) -> None:
    direction = transfer.direction.value
    for outcome in outcomes:
        metrics.STORAGE_PAGES_TOTAL.labels(direction, "done" if outcome is None else outcome.value).inc()
    metrics.STORAGE_SECONDS.labels(direction).observe(seconds)
