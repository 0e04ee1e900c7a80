"""Running rows under fair shares: tenants and subjects below their share get rows and memory of those above."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import FinishReason, RequestId
from services.scheduler.core.fair_rows import PLANS_BETWEEN_LOOKS, QUANTUM_TOKENS, max_min_shares
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options

LONG_OUTPUT = 200


def prompt_of(number: int, length: int = 6) -> list[int]:
    return [(number * 31 + 7 * index) % 800 + 20 for index in range(length)]


def roomy(*, rows: int = 16, pages: int = 4000, limits: Limits | None = None, policy: str = "fair") -> Harness:
    return Harness(
        policy=policy,  # type: ignore[arg-type]  # one of its names
        pages=pages,
        max_rows=rows,
        max_step_tokens=256,
        max_context=600,
        max_waiting=1000,
        cache="user_aware",
        limits=limits,
    )


class Load:
    """Requests that are known, and what they must generate."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.expected: dict[str, list[int]] = {}
        self._numbers = count()

    def submit(
        self,
        tenant: str,
        requests: int,
        *,
        user: str = "ann",
        max_tokens: int = LONG_OUTPUT,
        length: int = 6,
        priority: int = 0,
        throttled: bool = False,
    ) -> list[str]:
        names = []
        for _ in range(requests):
            name = f"{tenant}/{user}/{len(self.expected)}"
            prompt, expected = self._next_prompt(length, max_tokens)
            request = make_request(name, prompt, tenant=tenant, user=user, max_tokens=max_tokens, priority=priority)
            request = with_options(request, tenant_is_throttled=throttled)
            assert self.harness.core.submit(request, 0.0).rejected is None
            self.expected[name] = expected
            names.append(name)
        return names

    def _next_prompt(self, length: int, max_tokens: int) -> tuple[list[int], list[int]]:
        """Return a prompt whose output no stop token ends, and that output."""
        while True:
            prompt = prompt_of(next(self._numbers), length)
            output = expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
            if len(output) == max_tokens:
                return prompt, output

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.harness.plan()
            self.harness.result()

    def running(self) -> Counter[str]:
        return Counter(sequence.request.view.tenant for sequence in self.harness.core.rows.occupants())

    def running_subjects(self) -> Counter[str]:
        return Counter(sequence.request.view.subject.name for sequence in self.harness.core.rows.occupants())

    def steps_until_running(self, name: str, limit: int = 2000) -> int:
        for step in range(limit):
            if any(sequence.request.request_id == name for sequence in self.harness.core.rows.occupants()):
                return step
            self.step()
        raise AssertionError(f"{name} does not start")

    def finish(self) -> None:
        self.harness.run(200_000)
        assert self.harness.finishes.keys() == {(name, 0) for name in self.expected}
        for name, tokens in self.expected.items():
            assert self.harness.finishes[name, 0].reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert self.harness.outputs[name, 0] == tokens, name
        self.harness.audit()


@pytest.fixture
def flooded() -> Load:
    """One tenant has all 16 rows and as many requests waiting, all with long outputs."""
    load = Load(roomy())
    load.submit("flood", 32)
    load.step(4)
    assert load.running() == {"flood": 16}
    return load


def test_a_second_tenant_starts_during_long_outputs_within_a_quantum(flooded: Load) -> None:
    name = flooded.submit("victim", 1)[0]
    assert flooded.steps_until_running(name) <= QUANTUM_TOKENS + 2 * PLANS_BETWEEN_LOOKS
    assert flooded.running() == {"flood": 15, "victim": 1}
    flooded.finish()


def test_without_fair_shares_a_victim_waits_for_the_end_of_an_output() -> None:
    load = Load(roomy(policy="fcfs"))
    load.submit("flood", 32)
    load.step(4)
    name = load.submit("victim", 1, max_tokens=8)[0]
    # The rows that the flood's ended rows leave go to the rest of the flood first.
    shortest = min(len(load.expected[each]) for each in load.expected if each != name)
    assert load.steps_until_running(name) >= shortest
    assert load.harness.core.preemptions == 0


def test_a_waiting_tenant_gets_its_whole_share_and_no_more(flooded: Load) -> None:
    flooded.submit("victim", 32)
    flooded.step(3 * QUANTUM_TOKENS)
    assert flooded.running() == {"flood": 8, "victim": 8}
    before = flooded.harness.core.preemptions
    flooded.step(QUANTUM_TOKENS)
    assert flooded.harness.core.preemptions == before == 8
    flooded.finish()


def test_shares_of_rows_go_by_weight() -> None:
    limits = Limits(tenants={"large": TenantLimits(weight=3)})
    load = Load(roomy(limits=limits))
    load.submit("small", 32)
    load.step(4)
    load.submit("large", 32)
    load.step(4 * QUANTUM_TOKENS)
    assert load.running() == {"small": 4, "large": 12}
    load.finish()


def test_a_tenant_that_asks_for_little_leaves_its_share_to_others() -> None:
    load = Load(roomy())
    load.submit("modest", 2)
    load.submit("flood", 32)
    load.step(4)
    load.submit("other", 32)
    load.step(4 * QUANTUM_TOKENS)
    assert load.running() == {"modest": 2, "flood": 7, "other": 7}
    load.finish()


def test_a_tenant_whose_budget_is_nearly_used_up_gets_rows_by_its_throttled_weight() -> None:
    limits = Limits(default=TenantLimits(throttled_weight=1 / 3))
    load = Load(roomy(limits=limits))
    load.submit("frugal", 40)
    load.submit("spent", 40, throttled=True)
    load.step(3 * QUANTUM_TOKENS)
    assert load.running() == {"frugal": 12, "spent": 4}
    # The budget is renewed: its next request says so.
    load.submit("spent", 1)
    load.step(3 * QUANTUM_TOKENS)
    assert load.running() == {"frugal": 8, "spent": 8}


def test_subjects_of_a_tenant_share_its_rows_by_weight() -> None:
    limits = Limits(default=TenantLimits(subjects={"bob": SubjectLimits(weight=3)}))
    load = Load(roomy(limits=limits))
    load.submit("tenant", 32, user="ann")
    load.step(4)
    load.submit("tenant", 32, user="bob")
    load.step(4 * QUANTUM_TOKENS)
    assert load.running_subjects() == {"ann": 4, "bob": 12}
    load.finish()


def test_invented_subjects_take_rows_of_their_own_tenant_only(flooded: Load) -> None:
    flooded.submit("victim", 32)
    flooded.step(3 * QUANTUM_TOKENS)
    for number in range(40):
        flooded.submit("flood", 1, user=f"invented{number}")
    flooded.step(3 * QUANTUM_TOKENS)
    assert flooded.running()["victim"] == 8
    flooded.finish()


def test_the_youngest_row_of_the_subject_with_the_most_rows_is_preempted() -> None:
    load = Load(roomy(rows=8))
    modest = load.submit("flood", 2, user="modest")
    greedy = load.submit("flood", 6, user="greedy")
    load.step(QUANTUM_TOKENS + 8)
    name = load.submit("victim", 1)[0]
    load.steps_until_running(name)
    running = {sequence.request.request_id for sequence in load.harness.core.rows.occupants()}
    assert running == {*modest, *greedy[:-1], name}
    load.finish()


def test_a_row_runs_for_a_quantum_and_no_tenant_falls_below_its_share() -> None:
    """Short requests of one tenant keep coming beside long ones of another: rows change hands, but do not churn."""
    load = Load(roomy(rows=4))
    load.submit("long", 4)
    chance = random.Random(5)
    seen: dict[int, int] = {}
    for _ in range(1200):
        if chance.random() < 0.1:
            load.submit("short", 1, max_tokens=chance.randint(1, 12))
        before = {each.handle: each.retractions for each in load.harness.core.rows.occupants()}
        load.step()
        for each in load.harness.core.open_sequences:
            if each.retractions > before.get(each.handle, each.retractions):
                seen[each.handle] = seen.get(each.handle, 0) + 1
                assert load.running()["long"] >= 2
    core = load.harness.core
    assert seen
    load.finish()
    # `long` has four outputs; each time that one of its rows made way had cost a quantum.
    generated = sum(len(tokens) for name, tokens in load.expected.items() if name.startswith("long"))
    assert 0 < core.preemptions <= generated // QUANTUM_TOKENS
    assert core.preemptions == core.memory.retractions


def test_more_tenants_than_rows_leave_each_other_alone() -> None:
    load = Load(roomy(rows=4))
    for number in range(4):
        load.submit(f"tenant{number}", 3, max_tokens=60)
    load.step(2 * QUANTUM_TOKENS)
    assert sorted(load.running().values()) == [1, 1, 1, 1]
    before = load.harness.core.preemptions
    load.submit("late", 1)
    load.step(10)
    assert load.harness.core.preemptions == before
    load.finish()


def test_a_tenant_that_waits_for_memory_gets_its_share_of_pages() -> None:
    """Few rows that hold all the memory: there are free rows, but no pages for another tenant's prompt."""
    load = Load(roomy(rows=8, pages=150))
    load.submit("flood", 4, length=100, max_tokens=100)
    load.step(QUANTUM_TOKENS + 10)
    assert load.running() == {"flood": 4}
    name = load.submit("victim", 1, length=120, max_tokens=10)[0]
    assert load.steps_until_running(name) <= QUANTUM_TOKENS
    assert load.running()["flood"] >= 2
    load.finish()


def test_under_memory_pressure_the_tenant_above_its_share_gives_pages_back() -> None:
    load = Load(roomy(rows=8, pages=150))
    load.submit("flood", 5, length=60, max_tokens=80)
    load.step(8)
    # The youngest row of all, and of a higher number; only the flood is above its share.
    victim = load.submit("victim", 1, length=60, max_tokens=80)[0]
    retracted: Counter[str] = Counter()
    for _ in range(400):
        before = {each.handle: each.retractions for each in load.harness.core.open_sequences}
        load.step()
        for each in load.harness.core.open_sequences:
            if each.retractions > before.get(each.handle, 0):
                retracted[each.request.view.tenant] += 1
        if (victim, 0) in load.harness.finishes:
            break
    assert (victim, 0) in load.harness.finishes
    assert retracted["flood"] > 0
    assert retracted["victim"] == 0
    load.finish()


def test_a_priority_protects_only_within_its_own_subject() -> None:
    load = Load(roomy(rows=8, pages=150))
    load.submit("flood", 5, length=60, max_tokens=80, priority=100)
    load.step(8)
    victim = load.submit("victim", 1, length=60, max_tokens=80, priority=-100)[0]
    while (victim, 0) not in load.harness.finishes:
        load.step()
        sequence = next((each for each in load.harness.core.open_sequences if each.request.request_id == victim), None)
        assert sequence is None or not sequence.retractions
    load.finish()


@pytest.mark.parametrize("seed", range(6))
def test_one_subject_is_served_exactly_as_without_shares(seed: int) -> None:
    """First come, first served, with random prompts, priorities, aborts and short memory: the plans are the same."""

    def run(policy: str) -> tuple[list[str], Harness]:
        chance = random.Random(seed)
        harness = Harness(
            policy=policy,  # type: ignore[arg-type]  # one of its names
            pages=chance.randint(20, 60),
            max_rows=chance.randint(2, 6),
            max_step_tokens=chance.choice([12, 40]),
            max_context=100,
            max_waiting=10_000,
            cache=chance.choice(["user_aware", "shared", "chunk"]),
            depth=chance.randint(1, 3),
            target_plan_s=chance.choice([0.0, 0.004]),
        )
        for number in range(250):
            if chance.random() < 0.3:
                # Prompts share beginnings, so that longest-prefix order would differ.
                prompt = [*prompt_of(chance.randint(0, 3), chance.randint(1, 30)), chance.randint(10, 900)]
                request = make_request(
                    f"r{number}",
                    prompt,
                    max_tokens=chance.randint(0, 40),
                    n=chance.choice([1, 1, 1, 3]),
                    priority=chance.randint(0, 2),
                )
                assert harness.core.submit(request, 0.0).rejected is None
            if chance.random() < 0.04:
                harness.core.abort(RequestId(f"r{chance.randint(0, number)}"))
                harness.collect()
            if chance.random() < 0.01:
                harness.lose_workers()
            harness.plan()
            harness.result()
        harness.run()
        return [repr(plan) for plan in harness.plans], harness

    (plain, first), (fair, second) = run("fcfs"), run("fair")
    assert len(plain) > 200
    assert fair == plain
    assert second.outputs == first.outputs
    assert first.core.memory.retractions == second.core.memory.retractions
    assert second.core.preemptions == 0


def test_loads_of_one_subject_sometimes_run_short_of_memory() -> None:
    """What the comparison above relies on: in some of its runs rows are retracted."""
    load = Load(roomy(rows=6, pages=60))
    load.submit("tenant", 6, length=20, max_tokens=60)
    load.finish()
    assert load.harness.core.memory.retractions > 0
    assert load.harness.core.preemptions == 0


SUBJECTS = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(SUBJECTS), st.integers(1, 40), st.integers(1, 50), st.integers(0, 12), st.integers(0, 2)
        ),
        min_size=1,
        max_size=25,
    ),
    pages=st.integers(26, 90),
    rows=st.integers(1, 6),
    depth=st.integers(1, 3),
    cache=st.sampled_from(["user_aware", "isolated", "chunk"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    lock=st.sampled_from([0.0, 0.004]),
)
def test_every_sequence_ends_with_its_own_tokens_whatever_is_preempted(
    events: list[tuple[tuple[str, str], int, int, int, int]],
    pages: int,
    rows: int,
    depth: int,
    cache: str,
    weight: float,
    lock: float,
) -> None:
    harness = Harness(
        policy="fair",
        pages=pages,
        max_rows=rows,
        max_step_tokens=24,
        max_context=96,
        max_waiting=1000,
        depth=depth,
        cache=cache,  # type: ignore[arg-type]  # drawn from its names
        limits=Limits(tenants={"a": TenantLimits(weight=weight)}),
        target_plan_s=lock,
    )
    load = Load(harness)
    for (tenant, user), length, max_tokens, steps, priority in events:
        load.submit(tenant, 1, user=user, length=length, max_tokens=max_tokens, priority=priority)
        load.step(steps)
        harness.check_accounts()
    load.finish()
    assert harness.core.memory.retractions >= harness.core.preemptions


@given(
    total=st.floats(0.1, 100),
    parties=st.dictionaries(
        st.integers(0, 9), st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 30)), min_size=1
    ),
)
def test_max_min_shares_are_fair(total: float, parties: dict[int, tuple[float, int]]) -> None:
    weights = {name: weight for name, (weight, _) in parties.items()}
    demands = {name: float(demand) for name, (_, demand) in parties.items()}
    shares = max_min_shares(total, weights, demands)
    assert sum(shares.values()) == pytest.approx(min(total, sum(demands.values())))
    for name, share in shares.items():
        assert share <= demands[name] + 1e-9
        if share < demands[name] - 1e-9:
            # Who has less than it asks for has, for its weight, as much as anybody.
            assert all(share / weights[name] >= other / weights[each] - 1e-6 for each, other in shares.items())


@pytest.mark.parametrize("blockers", [("rival", "rival"), ("rival", "friend")])
def test_a_prompt_that_never_fits_takes_only_its_tenant_s_share_of_time(blockers: tuple[str, str]) -> None:
    """A tenant keeps one small row running, beside which its waiting prompt for nearly all pages cannot start."""
    small, giant = blockers

    def served(steps: int, *, is_attacked: bool) -> int:
        harness = Harness(
            policy="fair",
            pages=200,
            max_rows=16,
            max_step_tokens=256,
            max_context=800,
            max_waiting=1000,
            cache="user_aware",
        )
        rng, numbers = random.Random(1), count()
        for step in range(steps):
            of_tenant = Counter(each.request.view.tenant for each in harness.core.open_sequences)
            users = {(each.request.view.tenant, each.request.view.subject.name) for each in harness.core.open_sequences}
            for _ in range(24 - of_tenant["victim"]):
                number = next(numbers)
                prompt = [(number * 31 + 7 * index + number * index) % 800 + 20 for index in range(40)]
                request = make_request(f"v{number}", prompt, tenant="victim", max_tokens=rng.randint(20, 140))
                harness.core.submit(request, 0.0)
            if is_attacked and step >= 100:
                if (small, "small") not in users:
                    request = make_request(f"s{step}", prompt_of(step), tenant=small, user="small", max_tokens=500)
                    harness.core.submit(request, 0.0)
                if (giant, "giant") not in users:
                    request = make_request(f"g{step}", prompt_of(step, 796), tenant=giant, user="giant", max_tokens=1)
                    harness.core.submit(request, 0.0)
            harness.plan()
            harness.result()
        return sum(len(output) for (name, _), output in harness.outputs.items() if name.startswith("v"))

    share = 1 / (1 + len(set(blockers)))
    assert served(1000, is_attacked=True) >= 0.85 * share * served(1000, is_attacked=False)
