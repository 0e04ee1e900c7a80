"""An engine whose host memory also goes to storage and back, and whose pages come from workers of other groups."""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from common.transfers import TransferAck, TransferDirection
from services.worker.engine.execution.interface import InvalidPlanError, never_overtaken
from services.worker.peers.targets import DeviceTarget, HostTarget, PeerTarget
from services.worker.storage.objects import KEY_BYTES, ObjectFormat
from services.worker.storage.tier import Shard
from services.worker.stream_pages import StreamDevicePages, StreamPages

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    from common.steps import EngineCapacity, EngineSpec, ExpertLoad, SleepLevel, SleepPart, StepPlan, StepResult
    from common.transfers import Transfer
    from services.worker.engine.execution.interface import (
        AdapterStore,
        DevicePageBytes,
        Emit,
        Engine,
        HostPageBytes,
        ImageEncoder,
        ImageStore,
        IsOvertaken,
        PassCalls,
        PeerPageCopies,
        ProgressReport,
    )
    from services.worker.peers.reading import PeerReader
    from services.worker.peers.targets import TargetPages
    from services.worker.storage.tier import WorkerStorageTier

# How long an engine without work keeps a plan open for acknowledgements of storage or peers; the next plan waits
# meanwhile.
IDLE_WAIT_S = 0.005


class TieredEngine:
    """Passes plans on to `inner`, but for transfers with storage and peers, which are carried out beside it.

    Lives in the engine's thread, as `inner` does; storage and peers live on `loop`. See `Engine`.
    """

    def __init__(
        self, inner: Engine, storage: WorkerStorageTier | None, peers: PeerReader, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Take over `inner`; `storage`, if there is one, and `peers` remain the caller's to close."""
        self._inner = inner
        self._storage = storage
        self._peers = peers
        self._loop = loop
        self._stream: _Stream | None = None
        self._form: ObjectFormat | None = None
        self._limits = TransferLimits()
        self._snapshots = 0
        self._rank = 0
        self._ranks = 1

    @property
    def host_pages(self) -> HostPageBytes | None:
        """The inner engine's host pages."""
        return self._inner.host_pages

    @property
    def device_pages(self) -> DevicePageBytes | None:
        """The inner engine's device pages."""
        return self._inner.device_pages

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        """The inner engine's copies from memory of other processes."""
        return self._inner.peer_copies

    @property
    def adapters(self) -> AdapterStore | None:
        """The inner engine's adapters."""
        return self._inner.adapters

    @property
    def images(self) -> ImageStore | None:
        """The inner engine's images."""
        return self._inner.images

    @property
    def encoder(self) -> ImageEncoder | None:
        """The inner engine's encoder."""
        return self._inner.encoder

    def read_expert_load(self) -> ExpertLoad | None:
        """Return the inner engine's answer."""
        return self._inner.read_expert_load()

    @property
    def pass_calls(self) -> PassCalls | None:
        """The inner engine's calls."""
        return self._inner.pass_calls

    def join_pass(self, number: int) -> bool:
        """Return the inner engine's answer."""
        return self._inner.join_pass(number)

    @property
    def open_rows(self) -> int:
        """Number of row slots that are taken."""
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
        states, device = capacity.recurrent_states, self._inner.device_pages
        self._snapshots = states.snapshots if states and device is not None and device.snapshots is not None else 0
        self._rank, self._ranks = spec.rank, spec.world_size
        self._begin_stream()
        has_storage = self._stream is not None and self._storage is not None
        snapshots = 0 if pages is None or pages.states is None else pages.states.slots
        self._limits = TransferLimits(capacity.device_pages, capacity.host_pages, snapshots, has_storage)
        return replace(capacity, has_storage=has_storage)

    def execute(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Run a plan; results carry the acknowledgements that have come meanwhile. See `Engine.execute`."""
        stream = self._stream
        if stream is None:
            self._inner.execute(plan, emit, is_overtaken)
            return
        own = tuple(transfer for transfer in plan.transfers if not transfer.direction.is_between_tiers)
        if own:
            for transfer in own:
                _check(transfer, self._limits)
                if transfer.peer is not None and self._inner.device_pages is None:
                    raise InvalidPlanError("this model's pages cannot come from other groups")
                if transfer.peer is not None:
                    _check_snapshots(transfer, self._snapshots)
            plan = replace(
                plan, transfers=tuple(transfer for transfer in plan.transfers if transfer.direction.is_between_tiers)
            )
            for transfer in own:
                self._loop.call_soon_threadsafe(self._start(stream, transfer))
            stream.open += len(own)

        def emit_with_acks(result: StepResult) -> None:
            is_idle = not (result.acks or plan.prefills or self._inner.open_rows)
            emit(replace(result, acks=(*result.acks, *stream.take_acks(IDLE_WAIT_S if is_idle else 0.0))))

        self._inner.execute(plan, emit_with_acks, is_overtaken)

    def _start(self, stream: _Stream, transfer: Transfer) -> Callable[[], None]:
        if transfer.peer is not None:
            device = self._inner.device_pages
            assert device is not None, "checked before"
            pages: TargetPages = HostTarget(stream.pages)
            if transfer.direction is TransferDirection.PEER_TO_DEVICE:
                assert stream.device_pages is not None, "there are pages on the device"
                pages = DeviceTarget(stream.device_pages, device.after_passes())
            target = PeerTarget(pages, self._rank, self._ranks, device.form, self._inner.peer_copies)
            return partial(self._peers.begin, transfer, target, stream.acks.put)
        assert self._storage is not None, "checked before"
        shard = stream.states if len(transfer.host_snapshots) else stream.shard
        return partial(self._storage.begin, transfer, shard, stream.acks.put)

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
            of_host, device = StreamPages(pages), self._inner.device_pages
            of_device = None if device is None else StreamDevicePages(device)
            states = replace(self._form, state_bytes=of_host.state_bytes)
            self._stream = _Stream(of_host, of_device, Shard(of_host, self._form), Shard(of_host, states))

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.pages.close()
            if self._stream.device_pages is not None:
                self._stream.device_pages.close()
            self._stream = None


class _Stream:
    """Transfers of one stream of plans, as the engine's thread sees them."""

    def __init__(self, pages: StreamPages, device_pages: StreamDevicePages | None, shard: Shard, states: Shard) -> None:
        self.pages = pages
        self.device_pages = device_pages
        # Of pages, and of snapshots of recurrent states.
        self.shard = shard
        self.states = states
        # Transfers that have begun and are not acknowledged.
        self.open = 0
        self.acks: queue.SimpleQueue[TransferAck] = queue.SimpleQueue()

    def take_acks(self, wait_s: float) -> list[TransferAck]:
        """Return the acknowledgements that have come; wait up to `wait_s` if there is none and one is due."""
        acks = []
        with contextlib.suppress(queue.Empty):
            if self.open and wait_s and self.acks.empty():
                acks.append(self.acks.get(timeout=wait_s))
            while self.open:
                acks.append(self.acks.get_nowait())
        self.open -= len(acks)
        return acks


def _check_snapshots(transfer: Transfer, snapshots: int) -> None:
    """Refuse a transfer from a peer to other snapshots than those of this rank, or to more than the peer has named."""
    assert transfer.peer is not None, "it is from a peer"
    slots = transfer.device_snapshots
    if len(slots) != len(transfer.peer.device_snapshots) or len(transfer.host_snapshots):
        raise InvalidPlanError(f"transfer {transfer.transfer_id} names {len(slots)} places for the peer's snapshots")
    is_device = transfer.direction is TransferDirection.PEER_TO_DEVICE
    if len(slots) and (not is_device or slots.min() < 0 or slots.max() >= snapshots):
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: a snapshot outside [0, {snapshots})")


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Pages and slots that transfers may name, and whether there is a storage."""

    device_pages: int = 0
    host_pages: int = 0
    host_snapshots: int = 0
    has_storage: bool = False


def _check(transfer: Transfer, limits: TransferLimits) -> None:
    """Refuse a transfer that would touch memory of others."""
    pages, snapshots = transfer.host_pages, transfer.host_snapshots
    places = (
        (pages, limits.host_pages),
        (snapshots, limits.host_snapshots),
        (transfer.device_pages, limits.device_pages),
    )
    for ids, count in places:
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            raise InvalidPlanError(f"transfer {transfer.transfer_id}: a page or slot outside [0, {count})")
    peer = transfer.peer
    if transfer.direction.is_from_peer:
        if peer is None or not len(peer.device_pages) == len(transfer.arriving) == transfer.pages or not peer.workers:
            raise InvalidPlanError(f"transfer {transfer.transfer_id} names no pages of a peer")
        return
    if not limits.has_storage:
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: there is no storage tier")
    copies = transfer.direction in (TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST)
    wanted = len(transfer.object_keys) if copies else 0
    if sorted((len(pages), len(snapshots))) != [0, wanted] or len(transfer.device_pages):
        raise InvalidPlanError(f"transfer {transfer.transfer_id} has {len(pages)} pages for its keys")
    if any(len(key) != KEY_BYTES for key in transfer.object_keys):
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: keys have {KEY_BYTES} bytes")
    if copies and len(transfer.cipher_key) != KEY_BYTES:
        raise InvalidPlanError(f"transfer {transfer.transfer_id}: the cipher key has not {KEY_BYTES} bytes")
