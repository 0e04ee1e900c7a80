"""An engine whose host pages also go to storage and come back."""

from __future__ import annotations

import contextlib
import queue
from dataclasses import replace
from typing import TYPE_CHECKING

from common.transfers import TransferAck, TransferDirection
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.storage.objects import KEY_BYTES, ObjectFormat
from services.worker.storage.tier import Shard

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart, StepPlan, StepResult
    from common.transfers import Transfer
    from services.worker.engine.execution.interface import AdapterStore, Emit, Engine, HostPageBytes, ProgressReport
    from services.worker.storage.tier import WorkerStorageTier

# How long an engine without work keeps a plan open for acknowledgements of storage; the next plan waits meanwhile.
IDLE_WAIT_S = 0.005


class StoringEngine:
    """Passes plans on to `inner`, but for transfers with storage, which `tier` carries out beside it; see `Engine`.

    Lives in the engine's thread, as `inner` does; `tier` lives on `loop`.
    """

    def __init__(self, inner: Engine, tier: WorkerStorageTier, loop: asyncio.AbstractEventLoop) -> None:
        """Take over `inner`; `tier` remains the caller's to close."""
        self._inner = inner
        self._tier = tier
        self._loop = loop
        self._stream: _Stream | None = None
        self._form: ObjectFormat | None = None
        self._host_pages = 0

    @property
    def host_pages(self) -> HostPageBytes | None:
        """The inner engine's host pages."""
        return self._inner.host_pages

    @property
    def adapters(self) -> AdapterStore | None:
        """The inner engine's adapters."""
        return self._inner.adapters

    @property
    def open_rows(self) -> int:
        """How many row slots are taken."""
        return self._inner.open_rows

    @property
    def ends_with_group(self) -> bool:
        """The inner engine's answer."""
        return self._inner.ends_with_group

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Configure the inner engine; see `Engine.configure`."""
        self._end_stream()
        capacity = self._inner.configure(spec, report)
        pages = self._inner.host_pages
        self._form = None if pages is None else ObjectFormat(capacity.fingerprint, pages.page_bytes)
        self._host_pages = capacity.host_pages
        self._begin_stream()
        return replace(capacity, has_storage=self._stream is not None)

    def execute(self, plan: StepPlan, emit: Emit) -> None:
        """Run a plan; results carry the acknowledgements that have come meanwhile. See `Engine.execute`."""
        stream = self._stream
        if stream is None:
            self._inner.execute(plan, emit)
            return
        own = tuple(transfer for transfer in plan.transfers if transfer.direction.uses_storage)
        if own:
            for transfer in own:
                _check(transfer, self._host_pages)
            plan = replace(
                plan, transfers=tuple(transfer for transfer in plan.transfers if not transfer.direction.uses_storage)
            )
            stream.begin(self._tier, self._loop, own)

        def emit_with_acks(result: StepResult) -> None:
            is_idle = not (result.acks or plan.prefills or self._inner.open_rows)
            emit(replace(result, acks=(*result.acks, *stream.take_acks(IDLE_WAIT_S if is_idle else 0.0))))

        self._inner.execute(plan, emit_with_acks)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit the inner engine's outstanding results."""
        self._inner.settle(is_wanted)

    def prepare(self, spec: EngineSpec) -> bool:
        """Have the inner engine read other weights ahead."""
        return self._inner.prepare(spec)

    def drop_prepared(self) -> None:
        """Have the inner engine forget them."""
        self._inner.drop_prepared()

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Put the inner engine to sleep; open transfers are void."""
        self._end_stream()
        return self._inner.sleep(level, keeps_host_pages=keeps_host_pages)

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """Wake the inner engine."""
        is_awake = self._inner.wake(parts, report)
        if is_awake and self._stream is None:
            self._begin_stream()
        return is_awake

    def keep_warm(self) -> None:
        """Keep an idle device's clocks high."""
        self._inner.keep_warm()

    def reset(self) -> None:
        """Free all rows; open transfers are void."""
        self._end_stream()
        self._inner.reset()
        self._begin_stream()

    def close(self) -> None:
        """Close the inner engine; open transfers are void."""
        self._end_stream()
        self._inner.close()

    def _begin_stream(self) -> None:
        pages = self._inner.host_pages
        if pages is not None and self._form is not None:
            self._stream = _Stream(Shard(pages, self._form))

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class _Stream:
    """Transfers of one stream of plans, as the engine's thread sees them."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._open = 0
        self._acks: queue.SimpleQueue[TransferAck] = queue.SimpleQueue()

    def begin(self, tier: WorkerStorageTier, loop: asyncio.AbstractEventLoop, transfers: tuple[Transfer, ...]) -> None:
        """Have transfers begun."""
        self._open += len(transfers)
        for transfer in transfers:
            loop.call_soon_threadsafe(tier.begin, transfer, self._shard, self._acks.put)

    def take_acks(self, wait_s: float) -> list[TransferAck]:
        """Return the acknowledgements that have come; wait up to `wait_s` if there is none and one is due."""
        acks = []
        with contextlib.suppress(queue.Empty):
            if self._open and wait_s and self._acks.empty():
                acks.append(self._acks.get(timeout=wait_s))
            while self._open:
                acks.append(self._acks.get_nowait())
        self._open -= len(acks)
        return acks

    def close(self) -> None:
        self._shard.close()


def _check(transfer: Transfer, host_pages: int) -> None:
    """Refuse a transfer that would touch memory of others."""
    is_drop = transfer.direction is TransferDirection.DROP_FROM_STORAGE
    pages = transfer.host_pages
    if len(pages) != (0 if is_drop else len(transfer.object_keys)) or len(transfer.device_pages):
        raise InvalidPlanError(f"transfer {transfer.transfer_id} has {len(pages)} pages for its keys")
    if len(pages) and (pages.min() < 0 or pages.max() >= host_pages):
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: a page outside [0, {host_pages})")
    if any(len(key) != KEY_BYTES for key in transfer.object_keys):
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: keys have {KEY_BYTES} bytes")
    if not is_drop and len(transfer.cipher_key) != KEY_BYTES:
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: the cipher key has not {KEY_BYTES} bytes")
