from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.steps import EngineCapacity, EngineSpec, RecurrentStates, SleepLevel, SleepPart, StepPlan, StepResult
from common.transfers import PeerPages, Transfer, TransferAck, TransferDirection, TransferId
from common.types import StepId
from protos.gen.pando.v1 import worker_pb2_grpc
from services.worker.engine.execution.interface import InvalidPlanError, never_overtaken
from services.worker.engine.host_tier.page_form import PageForm
from services.worker.engine.parallel.shards import Span
from services.worker.peers.leases import PageLeases
from services.worker.peers.reading import PeerReader
from services.worker.service import WorkerService
from services.worker.storage.tier import WorkerStorageTier
from services.worker.tiered_engine import TieredEngine
from tests.fakes.storage import FakeHostPages, FakeHostStates, FakeStorage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence
    from pathlib import Path

    from services.worker.engine.execution.interface import AfterPasses, Emit, IsOvertaken, ProgressReport
    from services.worker.grammars.desk import GrammarDesk
    from services.worker.rank import Rank

SPEC = EngineSpec(model="m")
CAPACITY = EngineCapacity(4, 16, 64, 100, (2,), 1, "layout", "fake", 1, host_pages=4)
CIPHER_KEY = b"k" * 32
KEYS = tuple(bytes([number]) * 32 for number in range(4))
STORE, FETCH = TransferDirection.HOST_TO_STORAGE, TransferDirection.STORAGE_TO_HOST


@dataclass
class InnerEngine:
    """Answers every plan with one result, and acknowledges transfers between device and host."""

    host_pages: FakeHostPages | None = field(default_factory=lambda: FakeHostPages(4, [b"p%03d" % i for i in range(4)]))
    open_rows: int = 0
    ends_with_group: bool = False
    pass_calls: None = None
    adapters: None = None
    device_pages: DevicePages | None = None
    has_states: bool = False
    peer_copies: None = None
    images: None = None
    encoder: None = None
    calls: list[str] = field(default_factory=list)

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        return replace(CAPACITY, recurrent_states=RecurrentStates(3, 8) if self.has_states else None)

    def read_expert_load(self) -> None:
        self.calls.append("read_expert_load")

    def join_pass(self, number: int) -> bool:
        self.calls.append(f"join_pass {number}")
        return False

    def execute(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        assert not any(transfer.direction.uses_storage for transfer in plan.transfers)
        acks = tuple(TransferAck(transfer.transfer_id, transfer.pages) for transfer in plan.transfers)
        emit(StepResult(plan.step_id, 0, last=True, acks=acks))

    def prepare(self, spec: EngineSpec) -> bool:
        self.calls.append("prepare")
        return True

    def drop_prepared(self) -> None:
        self.calls.append("drop_prepared")

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        self.calls.append("sleep")
        return 7

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        self.calls.append("wake")
        return True

    def keep_warm(self) -> None:
        self.calls.append("keep_warm")

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        self.calls.append("settle")

    def reset(self) -> None:
        self.calls.append("reset")

    def close(self) -> None:
        self.calls.append("close")


class Bench:
    def __init__(self, inner: InnerEngine) -> None:
        self.inner = inner
        self.storage = FakeStorage()
        self.tier = WorkerStorageTier(self.storage, 60.0, threads=2)
        self.engine = TieredEngine(inner, self.tier, PeerReader(open_channel), asyncio.get_running_loop())
        self.step = 0

    def give_states(self) -> FakeHostStates:
        """Let the engine have three snapshots on the host; configure it."""
        assert self.inner.host_pages is not None
        states = self.inner.host_pages.states = FakeHostStates(5, [b"s%04d" % slot for slot in range(3)])
        self.engine.configure(SPEC, lambda *_: None)
        return states

    def run(self, *transfers: Transfer) -> tuple[TransferAck, ...]:
        self.step += 1
        results: list[StepResult] = []
        self.engine.execute(StepPlan(StepId(self.step), transfers=transfers), results.append)
        return results[0].acks

    async def ack(self) -> TransferAck:
        async with asyncio.timeout(30):
            while not (acks := self.run()):  # noqa: ASYNC110  (an engine cannot notify)
                await asyncio.sleep(0.005)
        return acks[0]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(InnerEngine())
    yield bench
    await bench.tier.close()


def transfer(number: int, direction: TransferDirection, pages: list[int], keys: tuple[bytes, ...]) -> Transfer:
    return Transfer(
        TransferId(number), direction, host_pages=np.array(pages, np.int32), object_keys=keys, cipher_key=CIPHER_KEY
    )


def of_states(number: int, direction: TransferDirection, slots: list[int], keys: tuple[bytes, ...]) -> Transfer:
    return replace(transfer(number, direction, [], keys), host_snapshots=np.array(slots, np.int32))


async def test_a_later_result_acknowledges_storage_transfers(bench: Bench) -> None:
    assert bench.engine.configure(SPEC, lambda *_: None).has_storage
    bench.run(transfer(1, STORE, [0, 1], KEYS[:2]))
    assert replace(await bench.ack(), duration_us=0) == TransferAck(TransferId(1), 2)
    bench.run(transfer(2, FETCH, [2, 3], KEYS[:2]))
    assert replace(await bench.ack(), duration_us=0) == TransferAck(TransferId(2), 2)
    assert bench.inner.host_pages is not None
    assert bench.inner.host_pages.pages == [b"p000", b"p001", b"p000", b"p001"]


async def test_transfers_within_the_engine_remain_its_own(bench: Bench) -> None:
    bench.engine.configure(SPEC, lambda *_: None)
    page = np.array([1], np.int32)
    own = Transfer(TransferId(5), TransferDirection.DEVICE_TO_HOST, device_pages=page, host_pages=page)
    assert bench.run(own) == (TransferAck(TransferId(5), 1),)


async def test_transfers_of_an_earlier_stream_are_void(bench: Bench) -> None:
    bench.engine.configure(SPEC, lambda *_: None)
    bench.run(transfer(1, STORE, [0, 1], KEYS[:2]))
    bench.engine.reset()
    await asyncio.sleep(0.05)
    assert bench.run() == ()
    assert bench.storage.objects == {}
    bench.run(transfer(1, STORE, [0], KEYS[:1]))
    assert (await bench.ack()).done_pages == 1


async def test_the_inner_engine_is_kept_warm(bench: Bench) -> None:
    bench.engine.keep_warm()
    assert "keep_warm" in bench.inner.calls


async def test_without_a_host_tier_there_is_no_storage() -> None:
    bench = Bench(InnerEngine(host_pages=None))
    assert not bench.engine.configure(SPEC, lambda *_: None).has_storage
    await bench.tier.close()


async def test_snapshots_are_stored_and_loaded_again_under_names_of_their_own(bench: Bench) -> None:
    states = bench.give_states()
    bench.run(of_states(1, STORE, [0, 1], KEYS[:2]))
    assert (await bench.ack()).done_pages == 2
    bench.run(of_states(2, FETCH, [2], KEYS[1:2]))
    assert (await bench.ack()).done_pages == 1
    assert states.contents == [b"s0000", b"s0001", b"s0001"]
    bench.run(transfer(3, FETCH, [2], KEYS[:1]))
    assert (await bench.ack()).done_pages == 0


async def test_the_last_snapshot_that_exists_is_found(bench: Bench) -> None:
    bench.give_states()
    bench.run(of_states(1, STORE, [1], KEYS[1:2]))
    await bench.ack()
    bench.run(replace(transfer(2, TransferDirection.FIND_IN_STORAGE, [], KEYS), cipher_key=b""))
    assert (await bench.ack()).done_pages == 2


@pytest.mark.parametrize("slots", [[3], [-1], [0, 1], []])
async def test_slots_that_do_not_exist_or_do_not_match_the_keys_are_refused(bench: Bench, slots: list[int]) -> None:
    bench.give_states()
    with pytest.raises(InvalidPlanError):
        bench.run(of_states(1, FETCH, slots, KEYS[:1]))


async def test_a_transfer_has_pages_or_snapshots(bench: Bench) -> None:
    bench.give_states()
    with pytest.raises(InvalidPlanError):
        bench.run(replace(of_states(1, FETCH, [0], KEYS[:1]), host_pages=np.array([0], np.int32)))


@pytest.mark.parametrize(
    "wrong",
    [
        of_states(1, FETCH, [0], KEYS[:1]),
        transfer(1, TransferDirection.FIND_IN_STORAGE, [0], KEYS[:1]),
        transfer(1, FETCH, [4], KEYS[:1]),
        transfer(1, FETCH, [-1], KEYS[:1]),
        transfer(1, FETCH, [0, 1], KEYS[:1]),
        transfer(1, FETCH, [0], (b"short",)),
        transfer(1, TransferDirection.DROP_FROM_STORAGE, [0], KEYS[:1]),
        replace(transfer(1, FETCH, [0], KEYS[:1]), cipher_key=b""),
        replace(transfer(1, STORE, [0], KEYS[:1]), cipher_key=b"short"),
    ],
)
async def test_a_transfer_that_makes_no_sense_is_refused(bench: Bench, wrong: Transfer) -> None:
    bench.engine.configure(SPEC, lambda *_: None)
    with pytest.raises(InvalidPlanError):
        bench.run(wrong)


class Snapshots:
    """Snapshots that are named by their numbers; `slots` were written."""

    form = PageForm(((1, 8),), Span(0, 1), 1)

    def __init__(self) -> None:
        self.slots: dict[int, bytes] = {}

    def read(self, snapshot: int, heads: Span) -> bytes:
        return b"state%03d" % snapshot

    def write(self, snapshot: int, content: memoryview) -> None:
        self.slots[snapshot] = bytes(content)


class DevicePages:
    """Device pages that are named by their numbers; `pages` were written."""

    form = PageForm(((1, 4),), Span(0, 1), 1)
    shared_name = None

    def __init__(self, snapshots: Snapshots | None = None) -> None:
        self.pages: dict[int, bytes] = {}
        self.snapshots = snapshots
        if snapshots is not None:
            self.form = replace(self.form, snapshot=snapshots.form)

    def after_passes(self) -> AfterPasses:
        return lambda: None

    def read_pages(self, pages: Sequence[int], heads: Span) -> bytes:
        return b"".join(b"d%03d" % page for page in pages)

    def write_pages(self, pages: Sequence[int], content: memoryview) -> None:
        self.pages |= {page: bytes(content[at * 4 : at * 4 + 4]) for at, page in enumerate(pages)}

    def lend(self, recall: Callable[[], None], *, is_here: bool = True, reads_over_nixl: bool = False) -> None:
        """Share nothing."""

    def take_back(self, recall: Callable[[], None]) -> None:
        """Do nothing."""


LEASE = b"l" * 16


def arrival(pages: list[int], into: list[int], address: str = "unix:nobody") -> Transfer:
    peer = PeerPages((address,), LEASE, np.array(pages, np.int32))
    return Transfer(TransferId(1), TransferDirection.PEER_TO_DEVICE, np.array(into, np.int32), peer=peer)


async def test_pages_of_another_group_arrive_on_the_device(tmp_path: Path) -> None:
    device, address = DevicePages(), f"unix:{tmp_path}/worker.sock"
    bench = Bench(InnerEngine(device_pages=device))
    leases = PageLeases(DevicePages)
    leases.grant(LEASE, range(8))
    lender = WorkerService(
        cast("Rank", SimpleNamespace(leases=leases)), cast("GrammarDesk", None), cast("PeerReader", None)
    )
    server = RpcServer("pando.v1.Worker", address)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, lender)
    await server.start()
    bench.engine.configure(SPEC, lambda *_: None)
    bench.run(arrival([5, 2], [1, 3], address))
    assert (await bench.ack()).done_pages == 2
    assert device.pages == {1: b"d005", 3: b"d002"}
    for wrong in (arrival([5], [CAPACITY.device_pages]), arrival([5], [-1]), arrival([5, 6], [1]), arrival([], [1])):
        with pytest.raises(InvalidPlanError):
            bench.run(wrong)
    await server.stop(0)
    await bench.tier.close()


async def test_a_snapshot_of_another_group_arrives_on_the_device_and_nowhere_else(tmp_path: Path) -> None:
    device, address = DevicePages(Snapshots()), f"unix:{tmp_path}/worker.sock"
    bench = Bench(InnerEngine(device_pages=device, has_states=True))
    leases = PageLeases(lambda: DevicePages(Snapshots()))
    leases.grant(LEASE, range(8), [6])
    lender = WorkerService(
        cast("Rank", SimpleNamespace(leases=leases)), cast("GrammarDesk", None), cast("PeerReader", None)
    )
    server = RpcServer("pando.v1.Worker", address)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, lender)
    await server.start()
    bench.engine.configure(SPEC, lambda *_: None)

    def snapshots(slots: list[int], into: list[int], to: Transfer | None = None) -> Transfer:
        pages = to or arrival([5], [1], address)
        assert pages.peer is not None
        peer = replace(pages.peer, device_snapshots=np.array(slots, np.int32))
        return replace(pages, peer=peer, device_snapshots=np.array(into, np.int32))

    bench.run(snapshots([6], [2]))
    ack = await bench.ack()
    assert (ack.done_pages, ack.done_snapshots) == (1, 1)
    assert device.snapshots is not None
    assert device.snapshots.slots == {2: b"state006"}
    peer = PeerPages((address,), LEASE, np.array([5], np.int32))
    to_host = Transfer(TransferId(2), TransferDirection.PEER_TO_HOST, host_pages=np.array([1], np.int32), peer=peer)
    for wrong in (
        snapshots([6], [3]), snapshots([6], [-1]), snapshots([6], []), snapshots([], [1]), snapshots([6], [1], to_host)
    ):  # fmt: skip
        with pytest.raises(InvalidPlanError):
            bench.run(wrong)
    await server.stop(0)
    await bench.tier.close()


async def test_reset_and_close_reach_the_inner_engine(bench: Bench) -> None:
    bench.engine.configure(SPEC, lambda *_: None)
    bench.engine.reset()
    bench.engine.close()
    assert bench.inner.calls == ["reset", "close"]
