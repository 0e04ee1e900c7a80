"""What the core reports of each choice's way: its start, why it waited, what the cache held, its end."""

from __future__ import annotations

from services.scheduler.core.milestones import Milestone, MilestoneKind
from services.scheduler.core.sequence import Wait
from tests.services.scheduler.core.harness import Harness, make_request

ARRIVED, STARTED, PREFILLED = MilestoneKind.ARRIVED, MilestoneKind.STARTED, MilestoneKind.PREFILLED
RETRACTED, ENDED = MilestoneKind.RETRACTED, MilestoneKind.ENDED


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(17 * position + salt) % 900 + 10 for position in range(length)]


def of(milestones: list[Milestone], name: str) -> list[Milestone]:
    return [milestone for milestone in milestones if milestone.request_id == name]


def test_a_request_arrives_starts_is_prefilled_and_ends() -> None:
    harness = Harness()
    request = make_request("r0", prompt_of(20), max_tokens=5)
    harness.core.submit(request, 0.0)
    harness.run()
    arrived, started, prefilled, ended = harness.core.milestones.take()
    assert [each.kind for each in (arrived, started, prefilled, ended)] == [ARRIVED, STARTED, PREFILLED, ENDED]
    assert {each.subject for each in (arrived, ended)} == {request.view.subject}
    assert started.wait is Wait.TURN
    assert started.found is not None
    assert started.found.tokens == 0
    assert ended.finish == harness.finishes["r0", 0]
    assert ended.output_tokens == len(harness.outputs["r0", 0])
    assert harness.core.milestones.take() == []


def test_the_second_request_says_what_the_cache_held_for_it() -> None:
    harness = Harness(cache="shared")
    for name in ("r0", "r1"):
        harness.core.submit(make_request(name, prompt_of(40)), 0.0)
        harness.run()
    [started] = [each for each in of(harness.core.milestones.take(), "r1") if each.kind is STARTED]
    assert started.found is not None
    assert started.found.tokens > 0
    assert started.found.public_tokens == started.found.tokens


def test_a_retracted_request_waits_for_memory_and_starts_again() -> None:
    harness = Harness(pages=16, max_rows=4)
    for index in range(4):
        harness.core.submit(make_request(f"r{index}", prompt_of(8, index), max_tokens=40), 0.0)
    harness.run()
    milestones = harness.core.milestones.take()
    retracted = [each for each in milestones if each.kind is RETRACTED]
    assert len(retracted) == harness.core.memory.retractions > 0
    own = of(milestones, retracted[0].request_id)
    after = own[own.index(retracted[0]) + 1]
    assert after.kind is STARTED
    assert any(each.wait is Wait.MEMORY for each in milestones if each.kind is STARTED)
    ends = [each for each in milestones if each.kind is ENDED]
    assert sorted(each.output_tokens for each in ends) == sorted(len(ids) for ids in harness.outputs.values())


def test_a_request_that_waits_for_the_same_prefix_says_so() -> None:
    harness = Harness(max_step_tokens=16, depth=1)
    for name in ("r0", "r1"):
        harness.core.submit(make_request(name, prompt_of(60)), 0.0)
    harness.run()
    [started] = [each for each in of(harness.core.milestones.take(), "r1") if each.kind is STARTED]
    assert started.wait is Wait.PREFIX


def test_requests_lost_with_the_workers_wait_again_and_an_abort_ends_them() -> None:
    harness = Harness()
    harness.core.submit(make_request("r0", prompt_of(20), max_tokens=50), 0.0)
    [sequence] = harness.core.open_sequences
    while not sequence.is_prefilled:
        harness.plan()
        harness.result()
    harness.lose_workers()
    harness.core.abort(make_request("r0", []).request_id)
    kinds = [each.kind for each in harness.core.milestones.take()]
    assert kinds == [ARRIVED, STARTED, PREFILLED, RETRACTED, ENDED]


def test_an_end_by_the_detokenizer_has_no_finish_of_the_schedulers() -> None:
    harness = Harness()
    harness.core.submit(make_request("r0", prompt_of(20), max_tokens=50), 0.0)
    [sequence] = harness.core.open_sequences
    while not sequence.is_prefilled:
        harness.plan()
        harness.result()
    harness.core.end_silently(sequence.handle)
    ended = harness.core.milestones.take()[-1]
    assert (ended.kind, ended.finish) == (ENDED, None)
    assert ended.output_tokens >= 1
