from __future__ import annotations

import pytest

from deploy.evaluation.bench.tenants.measuring import MIXES, MixSize, arriving, round_phases, system_prompts

SIZE = MixSize(users=6, apps=2, scale=0.1)


@pytest.mark.parametrize("mix", list(MIXES))
def test_phases_ask_equal_work_about_equal_apps_by_other_users(mix: str) -> None:
    cold, warm = round_phases(mix, SIZE, 0, seed=1)
    assert (cold.name, warm.name) == ("cold", "warm")
    requests = [[request for session in phase.sessions for request in session.requests] for phase in (cold, warm)]
    assert [r.input_tokens for r in requests[0]] == [r.input_tokens for r in requests[1]]
    assert {r.user for r in requests[0]}.isdisjoint(r.user for r in requests[1])
    keys = [{s.key for r in phase for s in r.segments} for phase in requests]
    common = keys[0] & keys[1]
    assert common
    assert all(key.startswith(("0/system/", "0/template/", "0/secret/")) for key in common)
    assert not any("document/" in key or "question/" in key for key in common)


@pytest.mark.parametrize("mix", list(MIXES))
def test_no_round_repeats_segments_of_an_earlier_one(mix: str) -> None:
    rounds = [round_phases(mix, SIZE, number, seed=1) for number in (0, 1)]
    keys = [
        {s.key for phase in phases for session in phase.sessions for r in session.requests for s in r.segments}
        for phases in rounds
    ]
    assert keys[0].isdisjoint(keys[1])


def test_an_operator_pins_each_apps_prompt_once() -> None:
    cold, _ = round_phases("s1", SIZE, 3, seed=1)
    assert sorted(segment.key for segment in system_prompts(cold.sessions)) == ["3/system/0", "3/system/1"]


def test_s1_keeps_its_proportions() -> None:
    cold, _ = round_phases("s1", MixSize(users=4, apps=2, scale=1 / 8), 0, seed=0)
    request = cold.sessions[0].requests[0]
    assert [segment.tokens for segment in request.segments] == [445, 28]
    assert request.output_tokens == 8
    assert len(cold.sessions) == 8


def test_every_mode_meets_the_same_arrivals() -> None:
    """Modes are measured one after another, each with phases of its own, and with whatever was drawn in between."""
    cold, warm = round_phases("s1", SIZE, 0, seed=1)
    arrivals = arriving(cold.sessions, 4.0, seed=3)
    times = [session.arrival_s for session in arrivals]
    arriving(warm.sessions, 4.0, seed=7)
    again, _ = round_phases("s1", SIZE, 0, seed=1)
    assert arriving(again.sessions, 4.0, seed=3) == arrivals
    other = [session.arrival_s for session in arriving(cold.sessions, 4.0, seed=4)]
    assert not set(other[1:]) & set(times[1:])
    assert len(times) == len(cold.sessions) > 4
    assert times == sorted(time for time in times if time is not None)
    assert times[-1] == pytest.approx(len(times) / 4.0, rel=0.8)
