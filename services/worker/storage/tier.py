"""Carries out storage orders beside the engine: in threads of their own, with deadlines, whatever the back end does."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, assert_never

from common.logs import get_logger
from common.storage import StorageAck, StorageOperation
from services.worker import metrics
from services.worker.storage.breaker import CircuitBreaker
from services.worker.storage.interface import StorageError
from services.worker.storage.objects import Miss
from services.worker.storage.shard import ShardClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.storage import StorageOrder
    from services.worker.storage.interface import Storage
    from services.worker.storage.shard import Shard

T = TypeVar("T")

# One call to the back end: enough to hide a round trip, and few megabytes at a time where pages are moved.
_BATCH_PAGES = 8
_BATCH_NAMES = 256
_MOVES_PAGES = (StorageOperation.FETCH, StorageOperation.STORE)


class _CallFailedError(Exception):
    """The back end did not answer, or not in time."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


class StorageTier:
    """Owns the back end and its threads. Methods belong to the event loop.

    Every order is acknowledged, in bounded time: a call that takes longer than `timeout_s` counts as failed, and after
    some failures the back end is left alone for a while, so that orders fail at once.
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
        # Reads have somebody waiting for them.
        self._writers = asyncio.Semaphore(max(1, threads // 2))
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("storage")

    def begin(self, order: StorageOrder, shard: Shard, deliver: Callable[[StorageAck], None]) -> None:
        """Start on an order about pages of `shard`; `deliver` gets its acknowledgement, unless the shard is closed."""
        task = asyncio.create_task(self._run(order, shard, deliver))
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

    async def _run(self, order: StorageOrder, shard: Shard, deliver: Callable[[StorageAck], None]) -> None:
        outcomes: list[Miss | None] = []
        started = self._clock()
        try:
            if order.operation is StorageOperation.STORE:
                async with self._writers:
                    await self._carry_out(order, shard, outcomes)
            else:
                await self._carry_out(order, shard, outcomes)
        except _CallFailedError as error:
            outcomes.append(error.miss)
        except ShardClosedError:
            return
        except Exception:  # noqa: BLE001  (whatever it is, the order is acknowledged)
            self._log.exception("storage.order_failed", operation=order.operation.value)
        _count(order, outcomes, self._clock() - started)
        untried = len(order.keys) - len(outcomes)
        deliver(StorageAck(order.order_id, (*(outcome is None for outcome in outcomes), *(False,) * untried)))

    async def _carry_out(self, order: StorageOrder, shard: Shard, outcomes: list[Miss | None]) -> None:
        """Append each key's outcome, None for success; a FETCH ends with the first miss, as what follows is useless."""
        size = _BATCH_PAGES if order.operation in _MOVES_PAGES else _BATCH_NAMES
        pages = order.host_pages.tolist()
        for first in range(0, len(order.keys), size):
            keys = order.keys[first : first + size]
            outcomes += await self._do(order.operation, shard, keys, pages[first : first + size])
            if len(outcomes) < first + len(keys):
                return

    async def _do(
        self, operation: StorageOperation, shard: Shard, keys: Sequence[bytes], pages: Sequence[int]
    ) -> list[Miss | None]:
        match operation:
            case StorageOperation.FIND:
                found = await self._call(lambda: self._storage.exists_many(shard.names(keys)))
                return [None if is_there else Miss.MISSING for is_there in found]
            case StorageOperation.FETCH:
                blobs = await self._call(lambda: self._storage.get_many(shard.names(keys)))
                return await self._in_thread(lambda: shard.load(keys, blobs, pages))
            case StorageOperation.STORE:
                objects = await self._in_thread(lambda: shard.dump(keys, pages))
                await self._call(lambda: self._storage.put_many(objects))
                return [None] * len(keys)
            case StorageOperation.DELETE:
                await self._call(lambda: self._storage.delete_many(shard.names(keys)))
                return [None] * len(keys)
            case _:
                assert_never(operation)

    async def _call(self, function: Callable[[], T]) -> T:
        """Call the back end; raises _CallFailedError if that fails, takes too long or is not to be tried now."""
        if not self._breaker.allows(self._clock()):
            raise _CallFailedError(Miss.UNAVAILABLE)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._in_thread(function)
        except TimeoutError:
            # The thread goes on; whatever it brings is dropped.
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


def _count(order: StorageOrder, outcomes: Sequence[Miss | None], seconds: float) -> None:
    for outcome in outcomes:
        name = "done" if outcome is None else outcome.value
        metrics.STORAGE_PAGES_TOTAL.labels(order.operation.value, name).inc()
    metrics.STORAGE_SECONDS.labels(order.operation.value).observe(seconds)
