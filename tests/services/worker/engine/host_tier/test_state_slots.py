"""Snapshots of recurrent states between device and host, with pages or alone.

Without a GPU, stand-ins for CUDA's streams show what each copy waits for; the copies themselves then run at once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.transfers import Transfer, TransferDirection, TransferId
from services.worker.engine.host_tier import sliced_transfers, stream_transfers
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.host_tier.sliced_transfers import SlicedTransfers
from services.worker.engine.host_tier.stream_transfers import StreamTransfers, TorchPageMover
from services.worker.engine.kernels.interface import KvLayout
from services.worker.engine.model.recurrent import StatePool
from tests.services.worker.engine.host_tier.test_sliced_transfers import SHAPE, pool_of
from tests.services.worker.engine.scenario import ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.transfers import TransferAck
    from services.worker.engine.execution.interface import Transfers
    from services.worker.engine.host_tier.state_slots import HostStates
    from services.worker.engine.model.kv_pool import KvPool

BACKUP, LOAD = TransferDirection.DEVICE_TO_HOST, TransferDirection.HOST_TO_DEVICE
ROWS, SNAPSHOTS, HOST_SNAPSHOTS = 3, 6, 9


def pool_with_states(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> KvPool:
    """Return a pool with random pages and states of two recurrent layers, of sizes that no cache line divides."""
    pool = pool_of((SHAPE,) * 2, 10, KvLayout.TOKEN_MAJOR, torch.float32, device)
    slots = ROWS + 1 + SNAPSHOTS
    states = StatePool(
        torch.randn(2, slots, 3, 5, 7, device=device), torch.randn(2, slots, 2, 11, device=device).to(dtype), ROWS
    )
    for layer in pool.layers:
        for tensor in layer.stored:
            tensor.normal_()
    return replace(pool, states=states)


def states_of(pool: KvPool, snapshot: int) -> list[torch.Tensor]:
    assert pool.states is not None
    at = pool.states.place_of(snapshot)
    return [pool.states.matrices[:, at].clone(), pool.states.inputs[:, at].clone()]


def snapshot_transfer(number: int, direction: TransferDirection, device: list[int], host: list[int]) -> Transfer:
    return Transfer(TransferId(number), direction, device_snapshots=ids(device), host_snapshots=ids(host))


def finish(transfers: Transfers, count: int) -> list[TransferAck]:
    done: list[TransferAck] = []
    end = time.monotonic() + 20
    while len(done) < count and time.monotonic() < end:
        done += transfers.wait()
    return done


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_unchanged_after_a_backup_and_a_load(dtype: torch.dtype) -> None:
    pool = pool_with_states(torch.device("cpu"), dtype)
    host = allocate_host_pool(pool, 8, HOST_SNAPSHOTS)
    check_round_trip(pool, SlicedTransfers(pool, host))
    assert host.snapshots == HOST_SNAPSHOTS
    assert host.states is not None
    assert host.states.memory.shape == (HOST_SNAPSHOTS, -(-2 * (105 * 4 + 22 * dtype.itemsize) // 64) * 64)


@pytest.mark.gpu
def test_states_of_a_gpu_are_unchanged_after_a_backup_and_a_load() -> None:
    pool = pool_with_states(torch.device("cuda", 0))
    transfers = StreamTransfers(pool, allocate_host_pool(pool, 8, HOST_SNAPSHOTS), torch.device("cuda", 0))
    check_round_trip(pool, transfers)
    transfers.close()


@pytest.mark.gpu
def test_a_backup_of_a_state_waits_for_the_passes_before() -> None:
    pool = pool_with_states(torch.device("cuda", 0))
    host = allocate_host_pool(pool, 8, HOST_SNAPSHOTS)
    transfers = StreamTransfers(pool, host, torch.device("cuda", 0))
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(30):
        busy = busy @ busy / 64
    assert pool.states is not None
    pool.states.matrices.fill_(3.0)
    transfers.begin([snapshot_transfer(1, BACKUP, [2], [4])])
    assert len(finish(transfers, 1)) == 1
    assert host.states is not None
    assert bool((host.states.matrices[4] == 3.0).all())
    transfers.close()


def check_round_trip(pool: KvPool, transfers: Transfers) -> None:
    assert pool.states is not None
    before = [states_of(pool, each) for each in (5, 0, 3)]
    page = [tensor[4].clone() for layer in pool.layers for tensor in layer.stored]
    # With a page, and alone.
    transfers.begin(
        [
            replace(snapshot_transfer(1, BACKUP, [5, 0], [8, 2]), device_pages=ids([4]), host_pages=ids([7])),
            snapshot_transfer(2, BACKUP, [3], [0]),
        ]
    )
    assert [(ack.transfer_id, ack.done_pages) for ack in finish(transfers, 2)] == [(1, 1), (2, 0)]
    pool.states.matrices.fill_(7.0)
    pool.states.inputs.fill_(7.0)
    # Each into another slot than it came from, and the page likewise.
    transfers.begin(
        [
            replace(snapshot_transfer(3, LOAD, [3, 5], [8, 2]), device_pages=ids([9]), host_pages=ids([7])),
            snapshot_transfer(4, LOAD, [0], [0]),
        ]
    )
    assert [(ack.transfer_id, ack.done_pages) for ack in finish(transfers, 2)] == [(3, 1), (4, 0)]
    for snapshot, content in zip((3, 5, 0), before, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(states_of(pool, snapshot), content, strict=True))
    assert all(bool((each == 7.0).all()) for snapshot in (1, 2, 4) for each in states_of(pool, snapshot))
    assert bool((pool.states.matrices[:, : ROWS + 1] == 7.0).all()), "rows are no snapshots"
    after = [tensor[9] for layer in pool.layers for tensor in layer.stored]
    assert all(torch.equal(one, two) for one, two in zip(after, page, strict=True))


def test_snapshots_are_copied_one_by_one_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_with_states(torch.device("cpu"))
    now = iter(range(1000))
    transfers = SlicedTransfers(pool, allocate_host_pool(pool, 8, HOST_SNAPSHOTS), lambda: next(now) / 1000)
    monkeypatch.setattr(sliced_transfers, "BACKUP_BUDGET_S", 0.0005)
    transfers.begin([snapshot_transfer(1, BACKUP, [0, 1, 2], [0, 1, 2])])
    assert transfers.poll() == transfers.poll() == ()
    (ack,) = transfers.poll()
    assert (ack.done_pages, ack.duration_us) == (0, 3000)


# --- what copies wait for, without a GPU ---


class Stream:
    """Knows all that has to be over before what is launched on it next: numbers of operations by stream."""

    def __init__(self, _device: object = None) -> None:
        self.after: Counter[Stream] = Counter()

    def launch(self) -> Counter[Stream]:
        self.after[self] += 1
        return self.after.copy()

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after

    def wait_event(self, event: Event) -> None:
        self.after |= event.after


class Event:
    def __init__(self, **_options: object) -> None:
        self.after: Counter[Stream] = Counter()

    def record(self, stream: Stream) -> None:
        self.after = stream.after.copy()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Event) -> float:
        return 0.0


class Locked:
    pages_at_once, error, ready_pages = 1 << 20, None, 1 << 20

    def __init__(self, *_arguments: object) -> None:
        pass


class Cuda:
    """Stands in for `torch.cuda`, and notes what each copy of a snapshot waits for."""

    def __init__(self) -> None:
        self.passes = Stream()
        self._current = self.passes
        self.copies: list[Counter[Stream]] = []
        self.Stream, self.Event = Stream, Event

    def current_stream(self, _device: object) -> Stream:
        return self.passes

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def note(self, *_arguments: object) -> None:
        self.copies.append(self._current.launch())


@pytest.mark.parametrize("direction", [BACKUP, LOAD])
def test_copies_of_states_wait_for_the_passes_before_and_are_done_before_they_are_reported(
    direction: TransferDirection, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_with_states(torch.device("cpu"))
    host = allocate_host_pool(pool, 8, HOST_SNAPSHOTS)
    cuda, ends = Cuda(), []

    class Ends(Event):
        def record(self, stream: Stream) -> None:
            super().record(stream)
            ends.append(self)

    cuda.Event = Ends
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(stream_transfers, "PinnedRange", Locked)
    monkeypatch.setattr(stream_transfers, "make_mover", TorchPageMover)
    states: Any = host.states
    monkeypatch.setattr(type(states), "back_up" if direction is BACKUP else "load", cuda.note)
    transfers = StreamTransfers(pool, host, torch.device("cpu"))
    written = cuda.passes.launch()
    transfers.begin([snapshot_transfer(1, direction, [0, 4], [2, 3])])
    assert len(cuda.copies) == 2
    assert all(written <= copy for copy in cuda.copies)
    assert cuda.copies[-1] <= ends[-1].after, "the acknowledgement comes after the last copy"
    assert cuda.passes.after == written, "passes wait for nothing"
    (ack,) = transfers.poll()
    assert ack.transfer_id == 1


def test_transfers_wait_until_their_slots_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_with_states(torch.device("cpu"))
    host = allocate_host_pool(pool, 8, HOST_SNAPSHOTS)
    locked: list[Locked] = []

    class Growing(Locked):
        ready_pages = 3

        def __init__(self, memory: Any, _device: object) -> None:
            assert memory.pages in (8, HOST_SNAPSHOTS)
            locked.append(self)

    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(stream_transfers, "PinnedRange", Growing)
    monkeypatch.setattr(stream_transfers, "make_mover", TorchPageMover)
    states: HostStates | None = host.states
    monkeypatch.setattr(type(states), "back_up", cuda.note)
    transfers = StreamTransfers(pool, host, torch.device("cpu"))
    transfers.begin([snapshot_transfer(1, BACKUP, [0], [3])])
    assert transfers.poll() == ()
    _, slots = locked
    slots.ready_pages = 4
    assert [ack.transfer_id for ack in transfers.poll()] == [1]
