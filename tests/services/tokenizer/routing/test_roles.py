"""Which groups change their roles by the load: the side that is short gets some that the other can spare, no others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import GroupRole, RoleSignals
from services.tokenizer.routing.roles import ObservedGroup, RoleController

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PREFILL, DECODE, BOTH = GroupRole.PREFILL, GroupRole.DECODE, GroupRole.BOTH
SETTLE_S = 15.0


def prefill(name: str, *, waited_s: float = 0.0, is_busy: bool = False, may_change: bool = True) -> ObservedGroup:
    return ObservedGroup(name, PREFILL, is_busy, RoleSignals(may_change, False, waited_s, 0.1, own_role=PREFILL))


def decode(name: str, fullness: float = 0.1, *, waited_s: float = 0.0, may_change: bool = True) -> ObservedGroup:
    return ObservedGroup(name, DECODE, True, RoleSignals(may_change, False, waited_s, fullness))


# Prefill groups with long queues, and ones that have nothing to do.
LONG_QUEUES = [prefill(name, waited_s=2.0, is_busy=True) for name in "wxyz"]
IDLE = [prefill(name) for name in "wxyz"]
FULL, EMPTY = [decode(name, 0.95) for name in "abcd"], [decode(name, 0.2) for name in "abcd"]


def wished(groups: Sequence[ObservedGroup], seconds: float = 60.0) -> list[tuple[str, GroupRole]]:
    """Return the first changes that a lasting load leads to."""
    controller, now = RoleController(SETTLE_S), 0.0
    while now < seconds:
        if changes := controller.decide(groups, now):
            return [(change.name, change.wish.role) for change in changes]
        now += 1.0
    return []


def test_a_generating_group_computes_prompts_once_these_wait() -> None:
    assert wished([*LONG_QUEUES, *EMPTY]) == [("d", PREFILL)]


def test_a_prefill_group_generates_once_the_others_are_full() -> None:
    assert wished([*IDLE, *FULL]) == [("w", DECODE)]
    waiting = [replace(decode(name, 0.8), signals=RoleSignals(True, False, 2.0, 0.8)) for name in "abcd"]
    assert wished([*IDLE, *waiting]) == [("w", DECODE)]


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([*IDLE, *EMPTY], id="neither side is short"),
        pytest.param([*LONG_QUEUES, *FULL], id="both sides are short"),
        pytest.param([*LONG_QUEUES, *[decode(name, 0.6) for name in "abcd"]], id="none can be spared"),
        pytest.param([*[prefill(name, is_busy=True) for name in "wxyz"], *FULL], id="prefill groups are busy"),
        pytest.param([*[prefill(name, is_busy=True) for name in "wxyz"], *EMPTY], id="busy, but nothing waits"),
        pytest.param([*LONG_QUEUES, decode("a", 0.0)], id="the last one that generates"),
        pytest.param([prefill("z"), *FULL], id="the last prefill group"),
        # Another tokenizer may see one more, take this one, and leave the first.
        pytest.param([*LONG_QUEUES, EMPTY[0], decode("b", may_change=False)], id="the first that generates"),
        pytest.param(
            [prefill("y", may_change=False), prefill("z"), *FULL], id="the last in the order of prefill groups"
        ),
        pytest.param(FULL, id="no prefill groups"),
        pytest.param(LONG_QUEUES, id="the groups that generate have not started"),
        pytest.param([replace(LONG_QUEUES[0], signals=RoleSignals(True, False, 0.0, 0.0))], id="a prefill group alone"),
        pytest.param(
            [*LONG_QUEUES, *[replace(each, signals=None) for each in EMPTY]], id="roles of the others are fixed"
        ),
        pytest.param([*LONG_QUEUES, *[decode(name, may_change=False) for name in "abcd"]], id="none may change now"),
        pytest.param(
            [*LONG_QUEUES, *EMPTY, ObservedGroup("e", DECODE, True, RoleSignals(False, True, 0.0, 0.5))],
            id="one is changing",
        ),
    ],
)
def test_nothing_changes_without_need_or_without_a_group_to_spare(groups: list[ObservedGroup]) -> None:
    assert wished(groups) == []


def own_role(group: ObservedGroup, role: GroupRole) -> ObservedGroup:
    assert group.signals is not None
    return replace(group, signals=replace(group.signals, own_role=role))


def test_restarts_that_leave_no_group_to_generate_are_undone() -> None:
    """Roles of settings: the first two prefill, the last generates; the load had exchanged the first and the last."""
    assert wished(
        [own_role(prefill(name), role) for name, role in zip("abc", (PREFILL, PREFILL, DECODE), strict=True)]
    ) == [("a", DECODE)]


def test_restarts_that_leave_no_prefill_group_are_undone_where_the_settings_have_one() -> None:
    assert wished([own_role(decode(name), DECODE) for name in "abc"]) == []
    assert wished([own_role(decode("a"), PREFILL), *[own_role(decode(name), DECODE) for name in "bc"]]) == [
        ("c", PREFILL)
    ]
    assert wished([own_role(decode("a"), PREFILL)]) == []


def test_nothing_is_decided_before_the_averages_are_those_of_the_present_groups() -> None:
    groups = [*LONG_QUEUES, *EMPTY]
    assert wished(groups, SETTLE_S) == []
    assert wished(groups, SETTLE_S + 1) == [("d", PREFILL)]


def test_after_a_change_by_another_tokenizer_nothing_is_decided_for_as_long() -> None:
    controller = RoleController(SETTLE_S)
    before, after = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, prefill("d", waited_s=2.0, is_busy=True), *EMPTY[:-1]]
    at = [second for second in range(40) if controller.decide(before if second < 10 else after, float(second))]
    assert at == [25]


def test_a_short_peak_changes_nothing() -> None:
    controller = RoleController(SETTLE_S)
    for second in range(100):
        groups = LONG_QUEUES if second in (40, 41) else IDLE
        assert controller.decide([*groups, *EMPTY], float(second)) == []


def decided_at(seen: Callable[[int], Sequence[ObservedGroup]], seconds: int) -> list[int]:
    """Return the seconds at which changes are decided, by the groups that are seen in each."""
    controller = RoleController(SETTLE_S)
    return [second for second in range(seconds) if controller.decide(seen(second), float(second))]


@pytest.mark.parametrize("missing", [LONG_QUEUES[0], EMPTY[0]], ids=["prefill", "decode"])
def test_a_group_that_is_missing_for_a_moment_again_and_again_postpones_no_change(missing: ObservedGroup) -> None:
    groups = [*LONG_QUEUES, *EMPTY]
    others = [each for each in groups if each is not missing]
    assert decided_at(lambda second: others if second % 2 else groups, 60) == [16, 32, 48]
    # Away for four seconds of five.
    assert decided_at(lambda second: others if second % 5 else groups, 60) == [15, 30, 45]


def test_nothing_is_decided_while_a_group_is_missing_and_once_it_is_gone_only_after_as_long_as_always() -> None:
    groups, others = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, *EMPTY[1:]]
    assert decided_at(lambda second: others if 12 <= second < 16 else groups, 30) == [16]
    assert decided_at(lambda second: others if second >= 12 else groups, 40) == [27]
    # It is another one when it is back.
    assert decided_at(lambda second: others if 12 <= second < 18 else groups, 40) == [33]


@pytest.mark.parametrize("unsteady", [LONG_QUEUES[0], EMPTY[-1]], ids=["prefill", "decode"])
def test_a_group_that_comes_and_goes_again_and_again_counts_as_gone_from_its_third_return_on(
    unsteady: ObservedGroup,
) -> None:
    """It is there for two seconds of ten, as a scheduler that fails whenever it has started."""
    groups = [*LONG_QUEUES, *EMPTY]
    others = [each for each in groups if each is not unsteady]
    at = decided_at(lambda second: groups if second % 10 < 2 else others, 100)
    # The second return ends at 22.
    assert at[:2] == [37, 52]


def test_a_group_that_came_and_went_counts_again_once_it_has_stayed() -> None:
    others, last = [*LONG_QUEUES, *EMPTY[:-1]], EMPTY[-1]
    controller, changed = RoleController(SETTLE_S), []
    for second in range(120):
        groups = [*others, last] if second % 10 < 2 or second >= 50 else others
        changed += [(second, change.name) for change in controller.decide(groups, float(second))]
    # It is there from 50 on, counts after 15 s, and loads are averaged with it for as long.
    assert changed == [(37, "c"), (52, "c"), (80, "d"), (95, "d"), (110, "d")]


def test_a_group_that_is_seldom_restarted_postpones_changes_each_time() -> None:
    groups, others = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, *EMPTY[:-1]]
    # Away for six seconds of thirty.
    assert decided_at(lambda second: others if 0 <= second % 30 - 20 < 6 else groups, 140) == [15, 41, 71, 101, 131]


def test_returns_of_a_group_are_forgotten_if_it_is_gone_for_long() -> None:
    others, last = [*LONG_QUEUES, *EMPTY[:-1]], EMPTY[-1]
    controller, changed = RoleController(SETTLE_S), []
    for second in range(130):
        groups = [*others, last] if (second < 40 and second % 10 < 2) or second >= 110 else others
        changed += [(second, change.name) for change in controller.decide(groups, float(second))]
    assert changed[-2:] == [(97, "c"), (125, "d")]


def test_groups_may_come_and_go_between_looks_that_are_far_apart() -> None:
    controller, changed = RoleController(1.0), []
    for look in range(40):
        groups = [*LONG_QUEUES, *EMPTY[: 4 - look % 3 % 2]]
        changed += controller.decide(groups, 100.0 * look)
    assert len(changed) > 10
    assert {change.name for change in changed} <= {"c", "d"}


def test_a_group_may_be_missing_in_several_looks_that_are_far_apart() -> None:
    """The second of these finds that it is gone, and that this is long ago."""
    groups, others = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, *EMPTY[:-1]]
    controller = RoleController(1.0)
    seen = [groups, groups, others, others, others]
    changed = [controller.decide(each, 100.0 * look) for look, each in enumerate(seen)]
    assert [[change.name for change in changes] for changes in changed] == [[], ["d"], [], ["c"], ["c"]]


def test_nothing_is_decided_by_what_a_group_did_before_it_was_missing() -> None:
    before, after = [*LONG_QUEUES, *EMPTY[:2]], [*LONG_QUEUES, *FULL[:2]]

    def seen(second: int) -> Sequence[ObservedGroup]:
        return before if second < 12 else LONG_QUEUES if second < 16 else after

    assert decided_at(lambda second: before if second < 12 or second >= 16 else LONG_QUEUES, 30) == [16]
    assert decided_at(seen, 60) == []


def test_averages_go_on_after_groups_were_missing_for_a_moment() -> None:
    groups, peak = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, *FULL]
    # The averages stay below what the peak alone would be: groups can be spared.
    assert decided_at(lambda second: {15: LONG_QUEUES, 16: peak}.get(second, groups), 20) == [16]


def test_a_group_that_is_missing_has_another_role_when_it_is_back() -> None:
    groups, others = [*LONG_QUEUES, *EMPTY], [*LONG_QUEUES, *EMPTY[1:]]
    changed = [prefill("a", waited_s=2.0, is_busy=True), *others]
    assert decided_at(lambda second: groups if second < 10 else others if second < 12 else changed, 40) == [27]


def test_after_a_change_the_next_one_waits_and_a_lost_wish_is_repeated() -> None:
    controller = RoleController(SETTLE_S)
    at = [second for second in range(60) if controller.decide([*LONG_QUEUES, *EMPTY], float(second))]
    assert at == [15, 30, 45]


def test_a_large_fleet_changes_a_quarter_at_a_time_and_no_more_than_it_can_spare() -> None:
    idle = [prefill(f"p{number:02}") for number in range(12)]
    full = [decode(f"d{number}", 0.95) for number in range(4)]
    assert wished([*idle, *full]) == [("p00", DECODE), ("p01", DECODE), ("p02", DECODE)]
    # Three seconds of five: eleven of them would be at 65 % and ten at 72 %.
    controller = RoleController(300.0)
    for second in range(400):
        busy = [replace(each, is_busy=second % 5 < 3) for each in idle]
        if changes := controller.decide([*busy, *full], float(second)):
            break
    assert [change.name for change in changes] == ["p00"]


def test_a_group_that_does_both_generates_for_this_purpose() -> None:
    groups = [replace(each, role=BOTH) for each in EMPTY]
    assert wished([*LONG_QUEUES, *groups]) == [("d", PREFILL)]


@dataclass
class Fleet:
    """Groups that change as they are asked to, after some looks, if they may: some never do."""

    roles: dict[str, GroupRole]
    held: frozenset[str] = frozenset()
    changing: dict[str, tuple[GroupRole, int]] = field(default_factory=dict)
    switches: int = 0

    def observe(self, names: Iterable[str], waited_s: float, fullness: float) -> list[ObservedGroup]:
        return [
            ObservedGroup(name, self.roles[name], waited_s > 0, self._signals(name, waited_s, fullness))
            for name in names
        ]

    def _signals(self, name: str, waited_s: float, fullness: float) -> RoleSignals:
        is_changing = name in self.changing
        return RoleSignals(not is_changing and name not in self.held, is_changing, waited_s, fullness)

    def wish(self, name: str, role: GroupRole, delay: int) -> None:
        if name not in self.changing and name not in self.held and self.roles[name] is not role:
            self.changing[name] = role, delay
            self.switches += 1

    def pass_by(self) -> None:
        for name, (role, left) in list(self.changing.items()):
            if left:
                self.changing[name] = role, left - 1
            else:
                self.roles[name] = role
                del self.changing[name]


# Queues are long, outputs fill their groups, or neither.
LOADS = ((3.0, 0.05), (0.0, 0.98), (0.0, 0.3))
LOOKS_IN_A_LOAD = 8


@settings(max_examples=100)
@given(st.data())
def test_however_many_decide_on_whatever_they_see_the_last_of_neither_side_changes(data: st.DataObject) -> None:
    names = [f"g{number}" for number in range(data.draw(st.integers(2, 6)))]
    order = data.draw(st.permutations(names))
    split = data.draw(st.integers(1, len(names) - 1))
    held = data.draw(st.frozensets(st.sampled_from(names), max_size=2))
    fleet = Fleet({name: PREFILL if order.index(name) < split else DECODE for name in names}, held)
    controllers = [RoleController(2.0) for _ in range(data.draw(st.integers(1, 3)))]
    lags = [data.draw(st.integers(0, 2)) for _ in controllers]
    reports: list[dict[str, ObservedGroup]] = []
    now = 0
    for waited_s, fullness in data.draw(st.lists(st.sampled_from(LOADS), min_size=4, max_size=10)):
        sights = [data.draw(st.sets(st.sampled_from(names), min_size=2)) for _ in controllers]
        delay = data.draw(st.integers(0, 4))
        for _ in range(LOOKS_IN_A_LOAD):
            reports.append({group.name: group for group in fleet.observe(names, waited_s, fullness)})
            for controller, lag, sight in zip(controllers, lags, sights, strict=True):
                report = reports[max(0, len(reports) - 1 - lag)]
                for change in controller.decide([report[name] for name in sight], float(now)):
                    fleet.wish(change.name, change.wish.role, delay)
            fleet.pass_by()
            now += 1
            staying = {role for name, role in fleet.roles.items() if name not in fleet.changing}
            assert {PREFILL, DECODE} <= staying


def test_tokenizers_that_see_the_same_change_a_group_once() -> None:
    fleet = Fleet(dict.fromkeys("abcd", DECODE) | dict.fromkeys("wxyz", PREFILL))
    controllers = [RoleController(SETTLE_S) for _ in range(3)]
    for second in range(int(SETTLE_S) + 2):
        # All look before any of them asks.
        decided = [each.decide(fleet.observe(fleet.roles, 3.0, 0.1), float(second)) for each in controllers]
        for changes in decided:
            for change in changes:
                fleet.wish(change.name, change.wish.role, 3)
    assert fleet.switches == 1
    assert list(fleet.changing) == ["d"]


def test_a_load_between_the_bounds_does_not_make_roles_swing() -> None:
    """A group that was given away is not asked back: what is left has room for the same load."""
    fleet = Fleet(dict.fromkeys("abcd", DECODE) | dict.fromkeys("wxyz", PREFILL))
    controller = RoleController(SETTLE_S)
    for second in range(600):
        generating = sum(role is DECODE for role in fleet.roles.values())
        computing = len(fleet.roles) - generating
        # Prompts that keep 4.3 groups busy, and outputs that fill 1.5.
        waited_s = 2.0 if computing < 4.3 else 0.0
        is_busy = second % 100 < 100 * min(1.0, 4.3 / computing)
        observed = [replace(each, is_busy=is_busy) for each in fleet.observe(fleet.roles, waited_s, 1.5 / generating)]
        for change in controller.decide(observed, float(second)):
            fleet.wish(change.name, change.wish.role, 2)
        fleet.pass_by()
    assert fleet.switches == 1
    assert [name for name, role in fleet.roles.items() if role is PREFILL] == list("dwxyz")
