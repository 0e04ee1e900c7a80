"""Reads over NIXL, with agents of this process instead of the package's: what arrives where, and how reads end."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError
from common.settings import WorkerSettings
from common.steps import EngineSpec, SleepLevel
from services.worker.__main__ import make_nixl
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.host_tier.device_pages import DevicePages, page_form_of
from services.worker.engine.host_tier.nixl_agents import NixlAgents
from services.worker.engine.host_tier.nixl_copies import NixlCopies
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.host_tier.shared_pages import BrokenReadError, SharedPages, SharingError
from services.worker.engine.kernels.interface import KvLayout
from services.worker.engine.loader import load_decoder
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from services.worker.engine.parallel.shards import Span
from services.worker.wire import shared_pages_from_wire, shared_pages_to_wire
from tests.fakes.nixl import FakeBindings
from tests.services.worker.engine.families import save_family
from tests.services.worker.engine.host_tier.test_sliced_transfers import SHAPE
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGES = 12
HEADS = Span(0, SHAPE.kv_heads)


def make_pool(seed: int) -> KvPool:
    pool = allocate_pool(
        SHAPE, layers=3, pages=PAGES, layout=KvLayout.TOKEN_MAJOR, dtype=torch.float32, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(seed)
    for layer in pool.layers:
        for tensor in layer.stored:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def pages_of(pool: KvPool, nixl: NixlAgents | None = None) -> DevicePages:
    form = page_form_of(pool, KvLayout.TOKEN_MAJOR, SHAPE, HEADS, SHAPE.kv_heads)
    assert form is not None
    return DevicePages(pool, form, nixl=nixl)


class Pair:
    """A lender and a reader with agents of one kind."""

    def __init__(self, read_s: float = 30.0) -> None:
        self.bindings = FakeBindings()
        self.lent = pages_of(make_pool(1), NixlAgents(self.bindings))
        # Another lender.
        self.other: DevicePages | None = None
        self.pool = make_pool(2)
        self.own = pages_of(self.pool)
        self.host = allocate_host_pool(self.pool, PAGES)
        self.agents = NixlAgents(self.bindings, read_s)
        self.copies = NixlCopies(self.pool, self.host, self.agents)

    def lend(self, recall: Callable[[], None] = lambda: None) -> SharedPages:
        memory = self.lent.lend(recall, is_here=False, reads_over_nixl=True)
        assert memory is not None
        return shared_pages_from_wire(shared_pages_to_wire(memory))

    @property
    def registered(self) -> int:
        return sum(len(agent.registered) for agent in self.bindings.agents.values())


@pytest.fixture
def pool_of_threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def ids(*pages: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(pages, np.int32)


FROM, TO = ids(7, 8, 9, 2, 3, 0), ids(1, 2, 5, 6, 7, 10)


def test_pages_arrive_on_the_device_and_the_others_stay() -> None:
    pair = Pair()
    before, lent = pair.own.read_pages(range(PAGES), HEADS), pair.lent.read_pages(range(PAGES), HEADS)
    source = pair.copies.map(pair.lend())
    pair.copies.copy_to_device(source, FROM, TO)
    size = pair.own.form.page_bytes
    came = dict(zip(TO.tolist(), FROM.tolist(), strict=True))
    for page in range(PAGES):
        content, first = (lent, came[page]) if page in came else (before, page)
        assert pair.own.read_pages([page], HEADS) == content[first * size : (first + 1) * size]


def test_pages_arrive_in_the_host_tier_as_it_lays_them_out() -> None:
    pair = Pair()
    source = pair.copies.map(pair.lend())
    pair.copies.copy(source, FROM, TO)
    for page, host_page in zip(FROM.tolist(), TO.tolist(), strict=True):
        assert pair.host.read_page(host_page) == pair.lent.read_pages([page], HEADS)
    others = set(range(PAGES)).difference(TO.tolist())
    assert not any(any(pair.host.read_page(page)) for page in others)


def test_pages_that_do_not_exist_and_pages_of_another_form_are_refused() -> None:
    pair = Pair()
    source = pair.copies.map(pair.lend())
    for pages in (ids(-1), ids(PAGES), ids(PAGES - 1, PAGES)):
        with pytest.raises(SharingError, match="no such pages"):
            pair.copies.copy_to_device(source, pages, ids(*range(len(pages))))
    memory = pair.lend()
    for changed in (
        SharedPages(memory.name, PAGES, memory.tensor_page_bytes * 2, memory.allocations, memory.tensors, True),
        SharedPages(memory.name, PAGES, memory.tensor_page_bytes, memory.allocations, memory.tensors[1:], True),
        SharedPages(memory.name, PAGES, memory.tensor_page_bytes, (b"x" * 64,), memory.tensors, True),
        SharedPages(memory.name, PAGES, memory.tensor_page_bytes, (b"x",), memory.tensors, True),
        SharedPages(memory.name, PAGES, memory.tensor_page_bytes, memory.allocations, memory.tensors),
    ):
        with pytest.raises(SharingError):
            pair.copies.map(changed)


def test_memory_is_lent_over_nixl_only_to_those_who_read_so() -> None:
    pair = Pair()
    assert pair.lent.lend(lambda: None) is None
    assert pair.lent.lend(lambda: None, is_here=False) is None
    assert pair.own.lend(lambda: None, is_here=False, reads_over_nixl=True) is None
    assert pair.registered == 0
    memory = pair.lend()
    assert memory.name == pair.lent.shared_name


def test_memory_is_not_registered_any_more_once_it_is_freed() -> None:
    pair = Pair()
    recalls: list[str] = []

    def recall() -> None:
        recalls.append("asked")
        assert pair.registered > 0, "readers are asked before"
        threading.Thread(target=pair.lent.take_back, args=(recall,)).start()

    source = pair.copies.map(pair.lend(recall))
    pair.lent.close()
    assert recalls == ["asked"]
    with pytest.raises(BrokenReadError):
        pair.copies.copy_to_device(source, FROM, TO)
    pair.copies.close()
    assert pair.registered == 0
    assert pair.lent.lend(lambda: None, is_here=False, reads_over_nixl=True) is None


def test_a_rank_that_wakes_up_reads_from_those_that_it_read_from_before() -> None:
    pair = Pair()
    source = pair.copies.map(pair.lend())
    pair.copies.close()
    other = make_pool(3)
    copies = NixlCopies(other, pair.host, pair.agents)
    copies.copy_to_device(source, FROM, TO)
    assert pages_of(other).read_pages(TO.tolist(), HEADS) == pair.lent.read_pages(FROM.tolist(), HEADS)


def test_agents_are_left_with_the_last_memory_of_theirs() -> None:
    pair = Pair()
    first, second = (pair.copies.map(pair.lend()) for _ in range(2))
    pair.copies.copy_to_device(first, FROM, TO)
    reader = pair.agents._reader
    assert reader is not None
    first.close()
    assert len(reader._agent.native.known) == 1, "the other's reads go on"
    second.close()
    assert not reader._agent.native.known
    with pytest.raises(BrokenReadError):
        pair.copies.copy_to_device(second, FROM, TO)


def begin_two(pair: Pair, threads: ThreadPoolExecutor) -> tuple[list[Future[None]], list[str]]:
    """Begin a read of each of two lenders; both are under way. Return them, and the names of the lenders' agents."""
    pair.other = pages_of(make_pool(4), NixlAgents(pair.bindings))
    memories = [pair.lend(), pair.other.lend(lambda: None, is_here=False, reads_over_nixl=True)]
    sources = [pair.copies.map(memory) for memory in memories if memory is not None]
    pair.bindings.gate.clear()
    reads = [threads.submit(pair.copies.copy_to_device, each, FROM, TO) for each in sources]
    wait_until(lambda: pair.bindings.running == 2)
    names = [
        name for name in pair.bindings.agents if any(name.encode() in each.memory.allocations[0] for each in sources)
    ]
    return reads, names


def test_a_read_that_is_not_answered_is_given_up_and_its_agent_ends(pool_of_threads: ThreadPoolExecutor) -> None:
    pair = Pair(read_s=0.3)
    reads, _ = begin_two(pair, pool_of_threads)
    reader = pair.agents._reader
    assert reader is not None
    for read in reads:
        with pytest.raises(BrokenReadError):
            read.result(30)
        assert reader._agent.native is None, "nothing can arrive any more"
    pair.bindings.gate.set()
    # Later reads have a new agent.
    pair.copies.copy_to_device(pair.copies.map(pair.lend()), FROM, TO)
    assert pair.own.read_pages(TO.tolist(), HEADS) == pair.lent.read_pages(FROM.tolist(), HEADS)


def test_reads_return_together_after_one_has_broken(pool_of_threads: ThreadPoolExecutor) -> None:
    pair = Pair()
    reads, names = begin_two(pair, pool_of_threads)
    pair.bindings.held.add(names[1])
    pair.bindings.broken.add(names[0])
    reader = pair.agents._reader
    assert reader is not None
    wait_until(lambda: reader.is_ending)
    done, _ = wait(reads, timeout=0.2)
    assert not done, "the agent ends after the last read, and no read returns before"
    assert reader._agent.native is not None
    pair.bindings.released.set()
    for read in reads:
        with pytest.raises(BrokenReadError):
            read.result(30)
        assert reader._agent.native is None


def test_a_peer_that_cannot_be_reached_breaks_no_read_of_others(pool_of_threads: ThreadPoolExecutor) -> None:
    pair = Pair()
    reads, _ = begin_two(pair, pool_of_threads)
    memory = pair.lend()
    unknown = replace(memory, allocations=(memory.allocations[0][:-32] + b"x" * 32,))
    with pytest.raises(SharingError):
        pair.copies.map(unknown)
    pair.bindings.gate.set()
    for read in reads:
        read.result(30)


def test_memory_that_reads_arrive_in_is_given_back_once_they_have_ended(pool_of_threads: ThreadPoolExecutor) -> None:
    pair = Pair()
    reads, _ = begin_two(pair, pool_of_threads)
    closing = pool_of_threads.submit(pair.copies.close)
    for read in reads:
        with pytest.raises(BrokenReadError):
            read.result(30)
    closing.result(30)
    assert pair.bindings.running == 0


@pytest.mark.parametrize("level", [SleepLevel.HOST, SleepLevel.DROPPED])
def test_a_rank_takes_its_memory_back_before_it_sleeps_and_registers_it_again(
    level: SleepLevel, tmp_path: Path
) -> None:
    save_family(tmp_path, "llama")
    bindings = FakeBindings()
    agents = NixlAgents(bindings)
    spec = EngineSpec(str(tmp_path), max_rows=2, device_pages=PAGES, host_pages=4, dtype="float32")
    runner = load_decoder(spec, lambda *_: None, RunnerOptions("cpu", threads=1, nixl=agents))

    def lend_and_read() -> None:
        copies, device = runner.peer_copies, runner.device_pages
        assert isinstance(copies, NixlCopies)
        assert device is not None
        memory = device.lend(lambda: None, is_here=False, reads_over_nixl=True)
        assert memory is not None
        device.take_back(device._borrowers._recalls.copy().pop())
        copies.copy_to_device(copies.map(memory), FROM, TO)
        assert len({name for name, agent in bindings.agents.items() if agent.registered}) == 2

    lend_and_read()
    runner.sleep(level, keeps_host_pages=True)
    assert not any(agent.registered for agent in bindings.agents.values())
    runner.wake_weights(lambda *_: None)
    runner.wake_cache()
    lend_and_read()
    runner.close()
    assert not any(agent.registered for agent in bindings.agents.values())


def test_nixl_is_used_only_if_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert make_nixl(WorkerSettings()) is None
    with pytest.raises(ConfigurationError, match=r"worker\.peer_transfers=nixl, but NIXL is not installed"):
        make_nixl(WorkerSettings(peer_transfers="nixl"))
