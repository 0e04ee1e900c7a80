"""Roles that follow the load serve what fixed ones do not; a load that does not turn changes none."""

from __future__ import annotations

from deploy.evaluation.experiments.disaggregation import fixed
from deploy.evaluation.experiments.role_switching import Phase, RoleFleet, share_in_time

PROMPTS = Phase("prompts", fixed(8192, 256), 2.9, 60.0)
OUTPUTS = Phase("outputs", fixed(1024, 1024), 4.5, 90.0)


def test_a_load_that_turns_to_long_outputs_makes_prefill_groups_generate() -> None:
    phases = (PROMPTS, OUTPUTS)
    left = RoleFleet(11, follows=False, phases=phases)
    followed = RoleFleet(11, follows=True, phases=phases)
    shares = [share_in_time(fleet.run()) for fleet in (left, followed)]
    assert shares[0] < 0.7
    assert shares[1] > 0.99
    assert [change.split(":")[0] for _, change in followed.changes] == [f"000{number} to decode" for number in (5, 6)]
    assert all(PROMPTS.seconds < at for at, _ in followed.changes)


def test_a_load_that_turns_to_long_prompts_makes_generating_groups_compute_them() -> None:
    phases = (OUTPUTS, PROMPTS)
    left = RoleFleet(9, follows=False, phases=phases)
    followed = RoleFleet(9, follows=True, phases=phases)
    shares = [share_in_time(fleet.run()) for fleet in (left, followed)]
    assert shares[1] > shares[0]
    assert {change.split(": ")[0] for _, change in followed.changes} >= {"0006 to prefill"}


def test_a_load_that_does_not_turn_changes_nothing() -> None:
    fleet = RoleFleet(12, follows=True, phases=(Phase("prompts", fixed(8192, 256), 2.5, 120.0),))
    assert share_in_time(fleet.run()) == 1.0
    assert fleet.changes == []
