"""A prefill group and a decode group with recurrent layers: states move with the pages, and only whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from protos.gen.pando.v1 import common_pb2, scheduler_pb2
from tests.services.scheduler.disaggregation.test_random_lives import Lives
from tests.services.scheduler.disaggregation.test_two_groups import LONG, WHOLE_PAGES, Groups, output
from tests.services.scheduler.pipeline import ADMIN, until_state
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from common.transfers import PeerPages

SNAPSHOTS = 24


class HybridGroups(Groups):
    """Groups whose model has recurrent layers; the decode group's workers have `snapshots` snapshots."""

    def __init__(self, folder: Path, snapshots: int = SNAPSHOTS, decode_pages: int = 64) -> None:
        super().__init__(folder, decode_pages)
        # Ranks whose workers of the prefill group lend pages only.
        self.stateless: set[int] = set()
        self.state_reads: list[PeerPages] = []
        for pipeline, count in ((self.prefill, SNAPSHOTS), (self.decode, snapshots)):
            for worker in pipeline.workers:
                worker.snapshots, worker.host_snapshots = count, SNAPSHOTS
        for rank, worker in enumerate(self.decode.workers):
            worker.read_peer_states = partial(self._lend_states, rank)

    def _lend_states(self, rank: int, peer: PeerPages) -> list[list[int]]:
        self.state_reads.append(peer)
        return [] if rank in self.stateless else self.prefill.workers[rank].lend_states(peer)

    async def released(self) -> None:
        await super().released()
        assert not any(worker.lent_snapshots for worker in self.prefill.workers)


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[HybridGroups]:
    groups = HybridGroups(tmp_path)
    await groups.start()
    yield groups
    await groups.stop()


async def test_the_states_at_the_end_of_a_prompt_are_read_after_its_pages(groups: HybridGroups) -> None:
    await groups.run("one")
    assert groups.prefilled(groups.prefill) == len(LONG)
    assert groups.prefilled(groups.decode) == len(LONG) - 4 * WHOLE_PAGES
    assert groups.decode.detokenizer.cached["one"] == 0
    state = await groups.decode.state()
    assert (state.disaggregation.remote_prefills, state.disaggregation.failed_prefills) == (1, 0)
    assert state.disaggregation.fetched_pages == WHOLE_PAGES
    # One snapshot for each of two ranks, under the lease of the pages.
    assert [len(peer.device_snapshots) for peer in groups.state_reads] == [1, 1]
    assert {peer.lease for peer in groups.state_reads} == {peer.lease for peer in groups.reads}
    await groups.released()


async def test_later_turns_continue_from_the_states_of_earlier_ones(groups: HybridGroups) -> None:
    await groups.run("one", max_tokens=20)
    turn = [*LONG, *groups.decode.detokenizer.output_of("one"), *range(600, 640)]
    await groups.run("two", turn, max_tokens=6)
    assert groups.decode.detokenizer.cached["two"] >= 4 * WHOLE_PAGES
    asked = (await groups.decode.state()).disaggregation.remote_prefills
    await groups.run("again", turn, max_tokens=6)
    assert (await groups.decode.state()).disaggregation.remote_prefills == asked
    await groups.released()


async def test_states_are_found_by_the_view_only_that_asked_for_them(groups: HybridGroups) -> None:
    await groups.run("alice")
    await groups.run("bob", user="bob")
    # Neither group shows one user what the other has sent: the prompt is computed for each of them.
    assert groups.prefilled(groups.prefill) == 2 * len(LONG)
    assert groups.decode.detokenizer.cached["bob"] == 0
    await groups.run("again")
    assert groups.decode.detokenizer.cached["again"] == 4 * WHOLE_PAGES
    await groups.released()


async def test_forgetting_a_subject_leaves_no_states_in_either_group(groups: HybridGroups) -> None:
    await groups.run("one")
    await groups.released()
    subject = common_pb2.Subject(tenant="tenant", name="alice")
    for pipeline in (groups.prefill, groups.decode):
        assert _tier(await pipeline.state(), "device_snapshots").evictable_pages > 0
        await pipeline.stub.Forget(scheduler_pb2.ForgetRequest(subject=subject), metadata=ADMIN)
        assert _tier(await pipeline.state(), "device_snapshots").evictable_pages == 0


async def test_many_requests_at_once_give_the_tokens_of_one_group(groups: HybridGroups) -> None:
    prompts = {f"r{number}": [number + 10, *LONG[: 20 + 2 * number]] for number in range(12)}
    for number, (name, prompt) in enumerate(prompts.items()):
        await groups.submit(name, prompt, f"user-{number % 3}")
    await groups.decode.finished(*prompts)
    for name, prompt in prompts.items():
        assert groups.decode.detokenizer.output_of(name) == output(prompt)
    assert groups.state_reads
    await groups.released()


@pytest.mark.parametrize("is_page", [True, False])
async def test_a_rank_that_cannot_read_its_part_makes_the_prompt_be_computed_here(
    groups: HybridGroups, is_page: bool
) -> None:
    groups.silent, groups.stateless = ({1}, set()) if is_page else (set(), {1})
    await groups.run("one")
    # Pages without states are of no use.
    assert groups.prefilled(groups.decode) == len(LONG)
    await groups.released()


# What arrives fills at most half of the slots.
@pytest.mark.parametrize("snapshots", [1, 2, 4])
async def test_a_decode_group_without_slots_for_states_computes_prompts_itself(tmp_path: Path, snapshots: int) -> None:
    groups = HybridGroups(tmp_path, snapshots)
    await groups.start()
    try:
        prompts = {f"r{number}": [number + 10, *LONG[1:]] for number in range(6)}
        for number, (name, prompt) in enumerate(prompts.items()):
            await groups.submit(name, prompt, f"user-{number}")
        await groups.decode.finished(*prompts)
        for name, prompt in prompts.items():
            assert groups.decode.detokenizer.output_of(name) == output(prompt)
        assert groups.prefilled(groups.decode) > 6 * (len(LONG) - 4 * WHOLE_PAGES)
        await groups.released()
    finally:
        await groups.stop()


async def test_while_the_device_is_full_requests_compute_their_prompts_and_get_the_same_tokens(tmp_path: Path) -> None:
    groups = HybridGroups(tmp_path, decode_pages=20)
    await groups.start()
    try:
        prompts = {f"r{number}": [number + 10, *LONG[1:]] for number in range(6)}
        for number, (name, prompt) in enumerate(prompts.items()):
            await groups.submit(name, prompt, f"user-{number}")
        await groups.decode.finished(*prompts)
        for name, prompt in prompts.items():
            assert groups.decode.detokenizer.output_of(name) == output(prompt)
        await groups.released()
    finally:
        await groups.stop()


async def test_workers_of_the_prefill_group_that_die_in_the_middle(groups: HybridGroups) -> None:
    for worker in groups.prefill.workers:
        worker.step_s = 0.05
    await groups.submit("one")
    await until(lambda: groups.reads)
    await groups.prefill.stop_workers()
    await groups.decode.finished("one")
    assert groups.decode.detokenizer.output_of("one") == output()
    assert groups.prefilled(groups.decode) == len(LONG)
    await groups.prefill.start_workers()
    await groups.prefill.ready()
    await groups.run("two", [token + 5 for token in LONG])
    await groups.released()


@pytest.mark.parametrize("has_states", [False, True])
async def test_workers_of_the_decode_group_that_die_while_pages_or_states_arrive(
    groups: HybridGroups, has_states: bool
) -> None:
    for worker in groups.prefill.workers:
        worker.step_s = 0.05
    for worker in groups.decode.workers:
        # So that a transfer is under way for a while.
        worker.step_s = 0.2
    await groups.submit("one")
    await until(lambda: _has_asked_for_states(groups) if has_states else groups.reads)
    await groups.decode.stop_workers()
    await until_state(groups.decode, lambda state: state.worker_group != "READY")
    await groups.decode.start_workers()
    await groups.decode.finished("one")
    assert groups.decode.detokenizer.output_of("one") == output()
    await groups.released()


def _has_asked_for_states(groups: HybridGroups) -> bool:
    plans = groups.decode.workers[0].plans
    return any(len(transfer.device_snapshots) for plan in plans for transfer in plan.transfers if transfer.peer)


def _tier(state: scheduler_pb2.GetStateResponse, name: str) -> scheduler_pb2.TierAccounting:
    return next(tier for tier in state.tiers if tier.tier == name)


@pytest.mark.parametrize(
    ("seed", "waves"), [(1, 3), *(pytest.param(seed, 42, marks=pytest.mark.extended) for seed in range(2, 8))]
)
async def test_random_lives_give_the_tokens_of_one_group_and_leak_nothing(
    tmp_path: Path, seed: int, waves: int
) -> None:
    groups = HybridGroups(tmp_path)
    await groups.start()
    lives = Lives(groups, seed)
    try:
        for _ in range(waves):
            await lives.wave()
        await groups.released()
        assert groups.state_reads
    finally:
        await groups.stop()
