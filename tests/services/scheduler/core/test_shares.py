from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import RequestOptions, Subject, View
from services.scheduler.core.shares import ShareConfig, VirtualCounters


def user(name: str, tenant: str = "tenant") -> View:
    return View(Subject(tenant, name))


def counter(counters: VirtualCounters, view: View) -> float:
    """Return what the view's subject has had, beside others of its tenant."""
    return counters.of_subject(view.subject)


def make(**config: object) -> VirtualCounters:
    return VirtualCounters(ShareConfig(**config))  # type: ignore[arg-type]  # named by the test


def limits_of(**tenants: TenantLimits) -> Limits:
    return Limits(tenants=tenants)


def test_output_weighs_more_than_prompt_and_weights_divide_both_on_each_level() -> None:
    counters = make(output_weight=2.0)
    counters.adopt(limits_of(gold=TenantLimits(weight=4.0, subjects={"ann": SubjectLimits(weight=2.0)})))
    views = (user("ann"), user("ann", "gold"), user("bob", "gold"))
    for view in views:
        counters.enter(view.subject)
    for view in views:
        counters.charge(view.subject, prompt_tokens=100)
        counters.charge(view.subject, output_tokens=50)
    assert [counter(counters, view) for view in views] == [200, 100, 200]
    assert [counters.of_tenant(tenant) for tenant in ("tenant", "gold")] == [200, 100]


def test_other_weights_count_from_the_next_charge_on() -> None:
    counters = make()
    counters.enter(user("ann").subject)
    counters.charge(user("ann").subject, prompt_tokens=100)
    counters.adopt(Limits(default=TenantLimits(weight=10.0, each_subject=SubjectLimits(weight=5.0))))
    counters.charge(user("ann").subject, prompt_tokens=100)
    assert (counters.of_tenant("tenant"), counter(counters, user("ann"))) == (110, 120)


def test_throttled_weights_count_while_the_newest_request_asks_for_them() -> None:
    counters = make(remembered=2)
    rules = SubjectLimits(throttled_weight=0.5)
    counters.adopt(limits_of(tenant=TenantLimits(weight=2.0, throttled_weight=0.25, each_subject=rules)))
    ann, bob = user("ann").subject, user("bob").subject

    def weights() -> tuple[float, float, float]:
        return counters.weight_of_tenant("tenant"), counters.weight_of_subject(ann), counters.weight_of_subject(bob)

    assert weights() == (2.0, 1.0, 1.0)
    counters.note_throttled(ann, RequestOptions(tenant_is_throttled=True))
    assert weights() == (0.25, 1.0, 1.0)
    counters.note_throttled(ann, RequestOptions(tenant_is_throttled=True, subject_is_throttled=True))
    assert weights() == (0.25, 0.5, 1.0)
    counters.note_throttled(bob, RequestOptions())
    assert weights() == (2.0, 0.5, 1.0)
    # A tenant without a throttled weight keeps its own, and a higher one raises nothing.
    counters.adopt(limits_of(tenant=TenantLimits(weight=2.0, throttled_weight=9.0)))
    counters.note_throttled(ann, RequestOptions(tenant_is_throttled=True, subject_is_throttled=True))
    assert weights() == (2.0, 1.0, 1.0)


def test_throttled_parties_are_remembered_in_bounded_memory() -> None:
    counters = make(remembered=10)
    counters.adopt(Limits(default=TenantLimits(each_subject=SubjectLimits(throttled_weight=0.5))))
    subjects = [user(f"user{number}").subject for number in range(1000)]
    for subject in subjects:
        counters.note_throttled(subject, RequestOptions(subject_is_throttled=True))
    assert len(counters._throttled) == 10
    assert [counters.weight_of_subject(subject) for subject in (subjects[0], subjects[-1])] == [1.0, 0.5]


def test_a_tenant_pays_for_all_of_its_subjects_and_no_other_does() -> None:
    counters = make()
    for view in (user("ann"), user("bob"), user("ann", "other")):
        counters.enter(view.subject)
    counters.charge(user("ann").subject, prompt_tokens=10)
    counters.charge(user("an invented one").subject, prompt_tokens=5)
    assert (counters.of_tenant("tenant"), counters.of_tenant("other")) == (15, 0)
    assert (counter(counters, user("ann")), counter(counters, user("bob"))) == (10, 0)
    assert counter(counters, user("ann", "other")) == 0


def test_a_returning_subject_is_lifted_to_the_lowest_waiting_counter() -> None:
    counters = make()
    for name in ("ann", "bob"):
        counters.enter(user(name).subject)
    counters.charge(user("ann").subject, prompt_tokens=500)
    counters.charge(user("bob").subject, prompt_tokens=300)
    counters.enter(user("late").subject)
    assert counter(counters, user("late")) == 300


def test_a_second_waiting_request_does_not_lift_the_counter() -> None:
    counters = make()
    counters.enter(user("ann").subject)
    counters.enter(user("bob").subject)
    counters.charge(user("bob").subject, prompt_tokens=900)
    counters.enter(user("ann").subject)
    assert counter(counters, user("ann")) == 0


def test_a_pause_does_not_reset_a_counter_above_the_others() -> None:
    counters = make()
    for name in ("ann", "greedy"):
        counters.enter(user(name).subject)
    counters.charge(user("greedy").subject, prompt_tokens=1000)
    counters.exit(user("greedy").subject)
    counters.enter(user("greedy").subject)
    assert counter(counters, user("greedy")) == 1000


def test_a_subject_that_enters_an_empty_queue_starts_at_the_last_counter() -> None:
    counters = make()
    counters.enter(user("ann").subject)
    counters.charge(user("ann").subject, prompt_tokens=1000)
    counters.exit(user("ann").subject)
    counters.enter(user("bob").subject)
    assert counter(counters, user("bob")) == counter(counters, user("ann"))


def test_counters_of_idle_subjects_are_removed_once_others_have_caught_up() -> None:
    counters = make()
    counters.enter(user("steady").subject)
    for number in range(50):
        counters.enter(user(f"guest {number}").subject)
        counters.charge(user(f"guest {number}").subject, prompt_tokens=10)
        counters.exit(user(f"guest {number}").subject)
    assert len(counters) == 51
    counters.charge(user("steady").subject, prompt_tokens=600)
    counters.enter(user("another").subject)
    counters.exit(user("another").subject)
    assert len(counters) == 1


def test_a_hundred_thousand_subjects_are_counted_in_bounded_memory() -> None:
    counters = make(remembered=1000)
    counters.enter(user("steady").subject)
    for number in range(100_000):
        guest = user(f"guest {number}")
        counters.enter(guest.subject)
        counters.charge(guest.subject, prompt_tokens=number % 977 + 1)
        counters.exit(guest.subject)
    assert len(counters) <= 1001
    level = counters._subjects["tenant"]
    assert max(len(level._idle), len(level._waiting)) <= 2 * 1002 + 32


def test_counters_of_transient_tenants_are_bounded() -> None:
    counters = make(remembered=100)
    counters.enter(user("steady", "steady").subject)
    for number in range(5_000):
        guest = user("guest", f"tenant {number}")
        counters.enter(guest.subject)
        counters.charge(guest.subject, prompt_tokens=number % 977 + 1)
        counters.exit(guest.subject)
        # What it still generates is charged when its tenant may be forgotten already.
        counters.charge(guest.subject, output_tokens=number % 3)
    assert len(counters._tenants) <= 101
    assert len(counters._subjects) <= 202


def test_charges_for_uncomputed_tokens_are_refunded() -> None:
    counters = make()
    for name in ("ann", "bob"):
        counters.enter(user(name).subject)
    counters.charge(user("bob").subject, prompt_tokens=400)
    counters.charge(user("ann").subject, prompt_tokens=900)
    counters.charge(user("ann").subject, prompt_tokens=-700)
    counters.exit(user("bob").subject)
    counters.enter(user("late").subject)
    assert counter(counters, user("late")) == 200


class Naive:
    """The rules once more, without heaps: every look at the lowest is a scan, and nobody is forgotten."""

    def __init__(self) -> None:
        self.floor = 0.0
        self.counters: dict[View, float] = {}
        self.waiting: dict[View, int] = {}

    def lift(self) -> None:
        lowest = [self.counters[view] for view in self.waiting]
        self.floor = max([self.floor, *([min(lowest)] if lowest else [])])

    def enter(self, view: View) -> None:
        if view not in self.waiting:
            self.lift()
            self.counters[view] = max(self.value(view), self.floor)
        self.waiting[view] = self.waiting.get(view, 0) + 1

    def exit(self, view: View) -> None:
        self.waiting[view] -= 1
        if not self.waiting[view]:
            del self.waiting[view]
            if not self.waiting:
                self.floor = max(self.floor, self.counters[view])
            self.lift()

    def charge(self, view: View, tokens: int) -> None:
        # What is below the floor and does not wait may be lifted at any time without a difference to anybody.
        base = self.counters.get(view, self.floor) if view in self.waiting else self.value(view)
        self.counters[view] = base + tokens

    def value(self, view: View) -> float:
        return max(self.counters.get(view, self.floor), self.floor)


operations = st.lists(
    st.tuples(st.sampled_from(["enter", "exit", "charge"]), st.integers(0, 5), st.integers(1, 50)), max_size=120
)


@given(operations)
def test_counters_with_heaps_and_forgetting_equal_plain_scans(steps: list[tuple[str, int, int]]) -> None:
    counters, naive = make(), Naive()
    level = counters._level("tenant")
    # Another one keeps the tenant from being forgotten.
    counters._tenants.enter("tenant")
    for what, number, tokens in steps:
        view = user(str(number))
        if what == "enter":
            counters.enter(view.subject)
            naive.enter(view)
        elif what == "exit" and view in naive.waiting:
            counters.exit(view.subject)
            naive.exit(view)
        elif what == "charge" and view in naive.waiting:
            counters.charge(view.subject, prompt_tokens=tokens)
            naive.charge(view, tokens)
        for waiting in naive.waiting:
            assert counter(counters, waiting) == pytest.approx(naive.counters[waiting])
        for known in naive.counters.keys() - naive.waiting.keys():
            assert max(counter(counters, known), level._floor) == pytest.approx(naive.value(known))
