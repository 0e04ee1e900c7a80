"""A prefill group and a decode group over real gRPC; simulated workers check each page that they read."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from prometheus_client import REGISTRY

from common.wire.requests import schedule_request_to_wire
from deploy.supervisor.layout import free_port
from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from services.scheduler.core import load_back
from services.scheduler.core.costs import LoadCosts
from tests.fakes.certificates import Authority
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, make_request
from tests.services.scheduler.pipeline import ADMIN, Pipeline, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.transfers import PeerPages
    from tests.fakes.simulated_worker import Content

LONG = [(13 * position) % 900 + 10 for position in range(62)]
WHOLE_PAGES = 15


def output(prompt: list[int] = LONG, max_tokens: int = 8) -> list[int]:
    return expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))


class Groups:
    """Both groups' pipelines; each has its own detokenizer, and the decode group's workers read the other's pages."""

    def __init__(
        self,
        folder: Path,
        decode_pages: int = 64,
        host_pages: int = 64,
        rpc: dict[str, Any] | None = None,
        prefill_address: str | None = None,
        min_tokens: int | None = 16,
    ) -> None:
        """The workers of the decode group have so many pages on the device and on the host."""
        for name in ("prefill", "decode"):
            (folder / name).mkdir()
        common: dict[str, Any] = {"prefill_min_tokens": min_tokens, "host_tier": {"pages": 64}, "rpc": rpc}
        listening: dict[str, Any] = {"address": prefill_address} if prefill_address else {}
        self.prefill = Pipeline(folder / "prefill", role="prefill", **common, **listening)
        self.decode = Pipeline(folder / "decode", role="decode", **common | {"host_tier": {"pages": host_pages}})
        # Ranks whose workers of the prefill group do not answer.
        self.silent: set[int] = set()
        self.reads: list[PeerPages] = []
        self._violations = _violations()
        for rank, worker in enumerate(self.decode.workers):
            worker.read_peer = partial(self._lend, rank)
            worker.pages = decode_pages
        for worker in self.decode.workers:
            worker.transfer_passes = 2

    def _lend(self, rank: int, peer: PeerPages) -> list[Content]:
        assert peer.workers[rank] == self.prefill.address(f"worker{rank}")
        self.reads.append(peer)
        return [] if rank in self.silent else self.prefill.workers[rank].lend(peer)

    async def start(self) -> None:
        for pipeline in (self.prefill, self.decode):
            await pipeline.start()
            await pipeline.ready()

    async def stop(self) -> None:
        for pipeline in (self.decode, self.prefill):
            await pipeline.stop()

    async def run(self, name: str, prompt: list[int] | None = None, user: str = "alice", max_tokens: int = 8) -> None:
        await self.submit(name, prompt, user, max_tokens)
        await self.decode.finished(name)
        assert self.decode.detokenizer.output_of(name) == output(prompt or LONG, max_tokens)

    async def submit(
        self, name: str, prompt: list[int] | None = None, user: str = "alice", max_tokens: int = 8
    ) -> None:
        group = self.prefill.address("scheduler")
        admission = await self.decode.submit(
            name, prompt or LONG, prefill_group=group, user=user, max_tokens=max_tokens
        )
        assert not admission.HasField("rejected")

    def prefilled(self, pipeline: Pipeline) -> int:
        """Return the prompt tokens that a group has computed."""
        return sum(chunk.length for plan in pipeline.workers[0].plans for chunk in plan.prefills)

    async def released(self) -> None:
        """Wait until the prefill group keeps nothing for others; all pages are accounted for in both groups."""
        await until_state(self.prefill, lambda state: state.disaggregation.open_leases == 0)
        await until(lambda: not any(worker.leases for worker in self.prefill.workers))
        for pipeline in (self.prefill, self.decode):
            await until_state(pipeline, lambda state: not state.requests and not state.host_tier.open_transfers)
            state = await pipeline.state()
            assert all(tier.protected_pages == 0 for tier in state.tiers)
            assert state.leaked_pages == 0
        assert _violations() == self._violations, "of the tree, or of pages that were lent"


def _violations() -> float | None:
    return REGISTRY.get_sample_value("pando_scheduler_cache_violations_total")


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[Groups]:
    groups = Groups(tmp_path)
    await groups.start()
    yield groups
    await groups.stop()


async def test_a_long_prompt_is_computed_in_the_prefill_group_and_read_from_its_workers(groups: Groups) -> None:
    await groups.run("one")
    assert groups.prefilled(groups.prefill) == len(LONG)
    assert groups.prefilled(groups.decode) == len(LONG) - 4 * WHOLE_PAGES
    assert groups.decode.detokenizer.cached["one"] == 0
    state = await groups.decode.state()
    assert (state.disaggregation.remote_prefills, state.disaggregation.failed_prefills) == (1, 0)
    assert state.disaggregation.fetched_pages == WHOLE_PAGES
    # Chunks are read while later ones are computed.
    assert len({peer.lease for peer in groups.reads}) == 1
    assert sum(len(peer.device_pages) for peer in groups.reads) == 2 * WHOLE_PAGES
    await groups.released()


async def test_short_and_cached_prompts_stay_where_they_are_decoded(groups: Groups) -> None:
    await groups.run("short", LONG[15:30])
    await groups.run("long")
    before = groups.prefilled(groups.prefill)
    await groups.run("again")
    await groups.run("longer", LONG + LONG[:8])
    assert groups.prefilled(groups.prefill) == before == len(LONG)
    assert groups.decode.detokenizer.cached["again"] == 4 * WHOLE_PAGES
    await groups.released()


async def test_pages_are_found_by_the_view_only_that_asked_for_them(groups: Groups) -> None:
    await groups.run("alice")
    await groups.run("bob", user="bob")
    # Neither group shows one user what the other has sent: the prompt is computed for each of them.
    assert groups.prefilled(groups.prefill) == 2 * len(LONG)
    assert groups.decode.detokenizer.cached["bob"] == 0
    # The prefill group's cache counts as cached for those who may see it.
    await groups.run("more", LONG + [7 * position % 900 + 11 for position in range(30)])
    assert groups.decode.detokenizer.cached["more"] >= 4 * WHOLE_PAGES
    await groups.released()


async def test_a_forgotten_session_leaves_nothing_in_either_group(groups: Groups) -> None:
    request = schedule_request_to_wire(make_request("one", LONG))
    request.session, request.prefill_group = "talk", groups.prefill.address("scheduler")
    assert not (await groups.decode.submit_wire(request)).HasField("rejected")
    await groups.decode.finished("one")
    assert (await groups.decode.state()).disaggregation.fetched_pages == WHOLE_PAGES
    await groups.released()
    subject = common_pb2.Subject(tenant="tenant", name="alice")
    for pipeline in (groups.prefill, groups.decode):
        assert (await pipeline.state()).cache_accounting.private_pages >= WHOLE_PAGES
        await pipeline.stub.Forget(scheduler_pb2.ForgetRequest(subject=subject, session="talk"), metadata=ADMIN)
        assert (await pipeline.state()).cache_accounting.private_pages == 0
    await groups.released()


async def test_many_requests_at_once_give_the_tokens_of_one_group(groups: Groups) -> None:
    prompts = {f"r{number}": [number + 10, *LONG[: 20 + 2 * number]] for number in range(12)}
    for number, (name, prompt) in enumerate(prompts.items()):
        await groups.submit(name, prompt, f"user-{number % 3}")
    await groups.decode.finished(*prompts)
    for name, prompt in prompts.items():
        assert groups.decode.detokenizer.output_of(name) == output(prompt)
    assert groups.prefilled(groups.prefill) > 0
    await groups.released()


async def test_a_prefill_group_that_is_away_costs_nothing_but_time(groups: Groups) -> None:
    await groups.prefill.stop_workers()
    await until_state(groups.prefill, lambda state: state.worker_group != "READY")
    await groups.run("one")
    state = await groups.decode.state()
    assert state.disaggregation.failed_prefills == 1
    assert groups.prefilled(groups.decode) == len(LONG)


async def test_a_prefill_group_that_cannot_be_called_at_all_keeps_no_request_waiting(groups: Groups) -> None:
    """Without TLS, an address over TCP is refused before there is a call."""
    admission = await groups.decode.submit("one", LONG, prefill_group="127.0.0.1:9", max_tokens=8)
    assert not admission.HasField("rejected")
    await groups.decode.finished("one")
    assert groups.decode.detokenizer.output_of("one") == output()
    state = await groups.decode.state()
    assert (state.disaggregation.remote_prefills, state.disaggregation.failed_prefills) == (1, 1)


async def test_a_defect_of_a_call_keeps_no_request_waiting(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    def offer(*_arguments: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("services.scheduler.cache.tiers.peer_reads.PeerFetch.offer", offer)
    await groups.run("one")
    assert (await groups.decode.state()).disaggregation.failed_prefills == 1
    await groups.released()


async def test_workers_of_the_prefill_group_that_die_in_the_middle(groups: Groups) -> None:
    for worker in groups.prefill.workers:
        worker.step_s = 0.05
    await groups.submit("one")
    await until(lambda: groups.reads)
    await groups.prefill.stop_workers()
    await groups.decode.finished("one")
    assert groups.decode.detokenizer.output_of("one") == output()
    await groups.prefill.start_workers()
    await groups.prefill.ready()
    await groups.run("two", [token + 5 for token in LONG])
    await groups.released()


async def test_a_rank_that_cannot_read_its_part_makes_the_rest_be_computed(groups: Groups) -> None:
    groups.silent = {1}
    await groups.run("one")
    assert groups.prefilled(groups.decode) == len(LONG)
    await groups.released()


async def test_workers_of_the_decode_group_that_die_while_pages_arrive(groups: Groups) -> None:
    for worker in groups.prefill.workers:
        worker.step_s = 0.05
    await groups.submit("one")
    await until(lambda: groups.reads)
    await groups.decode.stop_workers()
    await until_state(groups.decode, lambda state: state.worker_group != "READY")
    await groups.decode.start_workers()
    await groups.decode.finished("one")
    assert groups.decode.detokenizer.output_of("one") == output()
    await groups.released()


async def test_an_abort_ends_the_prefill_and_its_lease(groups: Groups) -> None:
    for worker in groups.prefill.workers:
        worker.step_s = 0.2
    await groups.submit("one")
    await until(lambda: groups.prefill.workers[0].plans)
    await groups.decode.abort("one")
    await groups.released()
    state = await groups.prefill.state()
    assert state.waiting_requests == state.running_rows == 0


async def test_a_scheduler_that_vanishes_gives_its_pages_back(groups: Groups) -> None:
    request = schedule_request_to_wire(make_request("direct", LONG))
    call = groups.prefill.stub.Prefill(scheduler_pb2.PrefillRequest(request=request))
    pages: list[int] = []
    last = scheduler_pb2.PrefillResponse()
    while not last.is_last:
        message = await call.read()
        assert isinstance(message, scheduler_pb2.PrefillResponse)
        last = message
        pages += last.device_pages
    assert len(pages) == WHOLE_PAGES
    assert last.fingerprint
    state = await groups.prefill.state()
    assert (state.disaggregation.open_leases, state.role) == (1, scheduler_pb2.SCHEDULER_ROLE_PREFILL)
    assert state.tiers[0].protected_pages == WHOLE_PAGES
    call.cancel()
    await groups.released()


async def test_a_group_that_ends_keeps_pages_until_they_have_been_read(tmp_path: Path) -> None:
    prefill = Pipeline(tmp_path, role="prefill", drain_s=60)
    await prefill.start()
    try:
        await prefill.ready()
        request = schedule_request_to_wire(make_request("direct", LONG))
        call = prefill.stub.Prefill(scheduler_pb2.PrefillRequest(request=request))
        last = scheduler_pb2.PrefillResponse()
        while not last.is_last:
            message = await call.read()
            assert isinstance(message, scheduler_pb2.PrefillResponse)
            last = message
        prefill.end()
        await prefill.ready(serving=False)
        # Far longer than a group takes to end that has nothing left to do.
        done, _ = await asyncio.wait({prefill.running}, timeout=1)
        assert not done
        assert (await prefill.state()).disaggregation.open_leases == 1
        assert all(worker.leases for worker in prefill.workers)
        call.cancel()
        async with asyncio.timeout(30):
            await prefill.running
    finally:
        await prefill.stop()


@pytest.mark.parametrize("name", ["schedulers", ""])
async def test_a_prefill_group_found_by_a_name_is_called_by_that_name(tmp_path: Path, name: str) -> None:
    """As on Kubernetes: certificates name the Service of all schedulers, and no address of a pod."""
    authority = Authority(tmp_path)
    identity = authority.issue("scheduler", hosts=["schedulers"], roles=["scheduler", "tokenizer"])
    rpc = {"certificate": identity.certificate, "key": identity.key, "authority": authority.path}
    groups = Groups(tmp_path, rpc=rpc, prefill_address=f"127.0.0.1:{free_port('127.0.0.1')}")
    groups.prefill.certified_as = "schedulers"
    await groups.start()
    try:
        address = groups.prefill.settings.scheduler.address
        await groups.decode.submit("one", LONG, prefill_group=address, prefill_group_name=name, max_tokens=8)
        await groups.decode.finished("one")
        assert groups.decode.detokenizer.output_of("one") == output()
        state = (await groups.decode.state()).disaggregation
        # An address that its certificate does not name is not trusted.
        assert (state.remote_prefills, state.failed_prefills) == (1, int(not name))
        assert state.fetched_pages == (WHOLE_PAGES if name else 0)
    finally:
        await groups.stop()


async def test_a_refused_prompt_is_an_error_of_the_call(groups: Groups) -> None:
    request = schedule_request_to_wire(make_request("direct", [1] * 200))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await groups.prefill.stub.Prefill(scheduler_pb2.PrefillRequest(request=request)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_role_can_change_while_requests_run(groups: Groups) -> None:
    admin = (("authorization", "Bearer let me in"),)
    change = scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_BOTH)
    with pytest.raises(grpc.aio.AioRpcError):
        await groups.prefill.stub.SetRole(change)
    await groups.prefill.stub.SetRole(change, metadata=admin)
    await until(lambda: groups.prefill.loads and groups.prefill.loads[-1].role == scheduler_pb2.SCHEDULER_ROLE_BOTH)
    await groups.prefill.submit("own")
    await groups.prefill.finished("own")


# With 70 tokens a request takes 18 pages, and with 102 it takes 26.
@pytest.mark.parametrize(
    ("decode_pages", "host_pages", "max_tokens"),
    [
        pytest.param(20, 64, 8, id="one prompt fits on the device"),
        pytest.param(40, 64, 40, id="rows outgrow the device and are retracted", marks=pytest.mark.extended),
        pytest.param(64, 6, 8, id="no prompt fits on the host"),
        pytest.param(20, 6, 8, id="one prompt fits on the device, and none on the host"),
        pytest.param(64, 20, 8, id="one prompt fits on the host", marks=pytest.mark.extended),
        pytest.param(20, 20, 8, id="one prompt fits on both", marks=pytest.mark.extended),
    ],
)
async def test_while_the_decode_groups_memory_is_full_requests_wait_and_get_the_same_tokens(
    tmp_path: Path, decode_pages: int, host_pages: int, max_tokens: int
) -> None:
    groups = Groups(tmp_path, decode_pages, host_pages)
    await groups.start()
    try:
        prompts = {f"r{number}": [number + 10, *LONG[1:]] for number in range(6)}
        for number, (name, prompt) in enumerate(prompts.items()):
            await groups.submit(name, prompt, f"user-{number}", max_tokens)
        await groups.decode.finished(*prompts)
        for name, prompt in prompts.items():
            assert groups.decode.detokenizer.output_of(name) == output(prompt, max_tokens)
        # A prompt for whose pages neither tier has room is computed again where it is answered.
        computed, whole = groups.prefilled(groups.decode), 4 * WHOLE_PAGES
        assert computed < 6 * whole, "what has room arrives"
        assert computed >= (whole if max(host_pages, decode_pages // 2) < WHOLE_PAGES else 0)
        assert groups.prefilled(groups.prefill) > 0
        assert (await groups.decode.state()).disaggregation.remote_prefills == 6
        await groups.released()
    finally:
        await groups.stop()


async def test_tokens_are_the_same_while_what_is_left_to_the_prefill_group_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured anew with each prompt: from the shortest prompts on, from none, and in between."""
    random, numbers = Random(0), list[int]()

    def least_peer_tokens(_costs: LoadCosts) -> int:
        numbers.append(random.choice([16, 30, 45, 4096]))
        return numbers[-1]

    monkeypatch.setattr(load_back, "LEAST_PEER_TOKENS", 16)
    monkeypatch.setattr(LoadCosts, "least_peer_tokens", least_peer_tokens)
    groups = Groups(tmp_path, min_tokens=None)
    await groups.start()
    try:
        prompts = {f"r{number}": [number + 10, *LONG[: 20 + random.randrange(40)]] for number in range(24)}
        for number, (name, prompt) in enumerate(prompts.items()):
            await groups.submit(name, prompt, f"user-{number}")
        await groups.decode.finished(*prompts)
        for name, prompt in prompts.items():
            assert groups.decode.detokenizer.output_of(name) == output(prompt)
        asked = (await groups.decode.state()).disaggregation.remote_prefills
        assert 4 < asked < 20, "both groups compute some"
        assert REGISTRY.get_sample_value("pando_scheduler_remote_prefill_min_tokens") == numbers[-1]
        await groups.released()
    finally:
        await groups.stop()


async def test_what_leaving_prompts_takes_is_learned_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(LoadCosts, "saw_peer_start", lambda _costs, seconds: seen.append(seconds))
    groups = Groups(tmp_path)
    await groups.start()
    try:
        for worker in groups.prefill.workers:
            worker.step_s = 0.05
        started = time.monotonic()
        await groups.run("one")
        passed_s = time.monotonic() - started
        await until(lambda: seen)
        # Its passes take 0.2 s, which do not count.
        assert 0 < seen[0] < passed_s - 0.15
        await groups.run("short", LONG[15:30])
        assert len(seen) == 1
        assert REGISTRY.get_sample_value("pando_scheduler_remote_prefill_min_tokens") == 16
        await groups.released()
    finally:
        await groups.stop()
