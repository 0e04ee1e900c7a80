"""Equal prompts at the same time: computed once within a view, and without a trace across views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.types import CacheMode
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName
    from services.scheduler.policy.policies import PolicyName

PROMPT = [(13 * position) % 800 + 10 for position in range(40)]


def prefilled_tokens(harness: Harness) -> int:
    return sum(chunk.length for plan in harness.plans for chunk in plan.prefills)


def two_at_once(users: tuple[str, str], cache: CacheName = "isolated", mode: CacheMode = CacheMode.DEFAULT) -> Harness:
    harness = Harness(cache=cache, max_step_tokens=64)
    for number, user in enumerate(users):
        prompt = [*PROMPT, 900 + number, 901]
        harness.core.submit(make_request(f"r{number}", prompt, user=user, cache_mode=mode), 0.0)
    harness.run()
    for number in range(2):
        prompt = [*PROMPT, 900 + number, 901]
        assert harness.outputs[f"r{number}", 0] == expected_output(prompt, len(prompt) + 8, (STOP_ID,))
    return harness


@pytest.mark.parametrize("cache", ["isolated", "user_aware", "isolated_pinned"])
def test_a_user_s_equal_prompts_are_computed_once(cache: CacheName) -> None:
    harness = two_at_once(("alice", "alice"), cache)
    assert prefilled_tokens(harness) == 42 + 2
    assert harness.cached == {("r0", 0): 0, ("r1", 0): 40}


@pytest.mark.parametrize("cache", ["isolated", "user_aware", "isolated_pinned"])
def test_another_user_s_prompt_is_neither_waited_for_nor_found(cache: CacheName) -> None:
    harness = two_at_once(("alice", "bob"), cache)
    assert [len(plan.opens) for plan in harness.plans][:1] == [2]
    assert prefilled_tokens(harness) == 2 * 42
    assert set(harness.cached.values()) == {0}


def test_where_all_share_one_view_all_wait_for_each_other() -> None:
    assert prefilled_tokens(two_at_once(("alice", "bob"), "shared")) == 42 + 2


def test_a_twin_that_will_not_be_cached_is_not_waited_for() -> None:
    assert prefilled_tokens(two_at_once(("alice", "alice"), "chunk")) == 2 * 42
    assert prefilled_tokens(two_at_once(("alice", "alice"), "isolated", CacheMode.NONE)) == 2 * 42


def test_the_wait_ends_as_soon_as_the_common_part_is_computed() -> None:
    harness = Harness(max_step_tokens=32, max_rows=4, depth=1)
    long = [*PROMPT[:8], *range(500, 532)]
    harness.core.submit(make_request("long", long), 0.0)
    harness.core.submit(make_request("short", [*PROMPT[:8], 7, 8, 9]), 0.0)
    harness.run()
    opened = [index for index, plan in enumerate(harness.plans) for _ in plan.opens]
    # The first chunk of 32 tokens holds the 8 common ones; the second step computes the rest of the long prompt.
    assert opened == [0, 1]
    assert [chunk.length for chunk in harness.plans[1].prefills] == [8, 3]
    assert harness.cached["short", 0] == 8


def test_a_request_computes_its_prompt_itself_if_its_twin_is_aborted() -> None:
    harness = Harness(max_step_tokens=16)
    harness.core.submit(make_request("first", PROMPT), 0.0)
    harness.core.submit(make_request("second", PROMPT), 0.0)
    harness.plan()
    harness.core.abort(make_request("first", PROMPT).request_id)
    harness.run()
    assert harness.outputs["second", 0] == expected_output(PROMPT, 48, (STOP_ID,))


def test_others_start_while_one_waits_for_its_twin() -> None:
    harness = Harness(max_step_tokens=64)
    harness.core.submit(make_request("first", PROMPT), 0.0)
    harness.core.submit(make_request("twin", PROMPT), 0.0)
    harness.core.submit(make_request("stranger", PROMPT[:12], user="bob"), 0.0)
    harness.plan()
    assert [opened.request_id for opened in harness.plans[0].opens] == ["first", "stranger"]


POLICIES: list[PolicyName] = ["fcfs", "lpm", "priority", "fair"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cache", ["isolated", "user_aware"])
def test_serving_order_and_figures_of_others_do_not_depend_on_a_victim_s_prompts(
    policy: PolicyName, cache: CacheName
) -> None:
    """The serving-order probe: a victim's secret against candidates that an attacker submits in one batch."""

    def observed(secret: list[int]) -> list[tuple[list[str], dict[tuple[str, int], int]]]:
        harness = Harness(policy=policy, cache=cache, max_rows=2, max_step_tokens=16, slack_tokens=1000, pages=128)
        harness.core.submit(make_request("victim", secret, user="victim"), 0.0)
        harness.run()
        plans = len(harness.plans)
        # The victim asks again at the same time: its own twin in the making must not be seen either.
        harness.core.submit(make_request("victim again", [*secret[:16], *range(300, 324)], user="victim"), 0.0)
        for number, candidate in enumerate(candidates):
            harness.core.submit(make_request(f"probe {number}", candidate, user="eve"), 0.0)
        harness.run()
        opened = [opened.request_id for plan in harness.plans[plans:] for opened in plan.opens]
        return [([name for name in opened if name.startswith("probe")], harness.cached)]

    candidates = [[base + position for position in range(40)] for base in (10, 110, 210, 310)]
    seen = [observed(candidates[2]), observed(candidates[0]), observed([999 - token for token in range(40)])]
    probes = [
        (order, {name: cached for name, cached in figures.items() if name[0].startswith("probe")})
        for ((order, figures),) in seen
    ]
    assert probes[0] == probes[1] == probes[2]
    assert set(probes[0][1].values()) == {0}


def test_in_a_shared_cache_the_serving_order_reveals_the_cached_prompt() -> None:
    """The probe above does find something where there is something to find."""
    harness = Harness(policy="lpm", cache="shared", max_rows=1, max_step_tokens=16, pages=128)
    candidates = [[base + position for position in range(40)] for base in (10, 110, 210, 310)]
    harness.core.submit(make_request("victim", candidates[2], user="victim"), 0.0)
    harness.run()
    plans = len(harness.plans)
    for number, candidate in enumerate(candidates):
        harness.core.submit(make_request(f"probe {number}", candidate, user="eve"), 0.0)
    harness.run()
    opened = [opened.request_id for plan in harness.plans[plans:] for opened in plan.opens]
    assert opened[0] == "probe 2"
