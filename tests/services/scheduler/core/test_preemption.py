from __future__ import annotations

from common.types import FinishReason, RequestId
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

LONG = list(range(100, 140))
URGENT = list(range(300, 340))


def running(harness: Harness) -> set[str]:
    return {sequence.request.request_id for sequence in harness.core.rows.occupants()}


def work(harness: Harness, passes: int) -> None:
    for _ in range(passes):
        harness.plan()
        harness.result()


def assert_all_right(harness: Harness, prompts: dict[str, list[int]], max_tokens: int) -> None:
    for name, prompt in prompts.items():
        assert harness.finishes[name, 0].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert harness.outputs[name, 0] == expected_output(prompt, len(prompt) + max_tokens, (STOP_ID,))
    harness.audit()


def crowded(*, pages: int = 64, max_rows: int = 2, max_preemptions: int = 2) -> Harness:
    """Two rows of priority 0 run, and nobody else has room."""
    harness = Harness(policy="priority", pages=pages, max_rows=max_rows, max_preemptions=max_preemptions)
    for name, shift in (("a", 0), ("b", 200)):
        harness.core.submit(make_request(name, [token + shift for token in LONG], user=name, max_tokens=20), 0.0)
    work(harness, 8)
    assert running(harness) == {"a", "b"}
    return harness


def test_a_higher_priority_takes_a_row_and_the_others_go_on_with_the_same_tokens() -> None:
    harness = crowded()
    harness.core.submit(make_request("urgent", URGENT, priority=1, max_tokens=20), 0.0)
    harness.plan()
    harness.result()
    harness.plan()
    # The youngest of the lower class makes way.
    assert running(harness) == {"a", "urgent"}
    assert harness.core.preemptions == 1
    harness.run()
    assert_all_right(harness, {"a": LONG, "b": [token + 200 for token in LONG], "urgent": URGENT}, 20)


def test_a_higher_priority_takes_pages_when_rows_are_left() -> None:
    harness = crowded(pages=30, max_rows=4)
    harness.core.submit(make_request("urgent", URGENT, priority=1, max_tokens=20), 0.0)
    work(harness, 2)
    assert "urgent" in running(harness)
    assert harness.core.preemptions == 1
    harness.run()
    assert_all_right(harness, {"a": LONG, "b": [token + 200 for token in LONG], "urgent": URGENT}, 20)


def test_requests_of_equal_or_lower_priority_wait() -> None:
    harness = crowded()
    harness.core.submit(make_request("equal", URGENT, priority=0), 0.0)
    harness.core.submit(make_request("lower", URGENT, user="lower", priority=-1), 0.0)
    work(harness, 6)
    assert running(harness) == {"a", "b"}
    assert harness.core.preemptions == 0
    harness.run()


def test_a_row_is_preempted_a_limited_number_of_times() -> None:
    harness = Harness(policy="priority", max_rows=1, max_preemptions=2)
    harness.core.submit(make_request("patient", LONG, user="patient", max_tokens=20), 0.0)
    work(harness, 5)
    for number in range(4):
        harness.core.submit(make_request(f"u{number}", URGENT, user=f"u{number}", priority=1, max_tokens=3), 0.0)
        while (f"u{number}", 0) not in harness.finishes:
            harness.plan()
            assert harness.result()
            if number >= 2 and "patient" in running(harness):
                break
        if number >= 2:
            break
        while running(harness) != {"patient"}:
            harness.plan()
            assert harness.result()
    # Twice it has made way; the third one waits for its end.
    assert harness.core.preemptions == 2
    work(harness, 3)
    assert running(harness) == {"patient"}
    harness.run()
    assert_all_right(harness, {"patient": LONG}, 20)


def test_no_row_is_preempted_if_the_urgent_request_would_still_not_fit() -> None:
    """The urgent one needs more than the lower class could give: another of its own class holds the rest."""
    harness = Harness(policy="priority", pages=24, max_rows=4, max_preemptions=2)
    harness.core.submit(make_request("equal", LONG, user="equal", priority=1, max_tokens=12), 0.0)
    harness.core.submit(make_request("lower", [5] * 12, user="lower", max_tokens=12), 0.0)
    work(harness, 6)
    assert running(harness) == {"equal", "lower"}
    harness.core.submit(make_request("urgent", URGENT + URGENT, user="urgent", priority=1, max_tokens=2), 0.0)
    work(harness, 2)
    assert running(harness) == {"equal", "lower"}
    assert harness.core.preemptions == 0
    harness.run()
    assert harness.finishes["urgent", 0].reason is not FinishReason.ERROR


def test_without_preemptions_the_policy_only_orders() -> None:
    harness = crowded(max_preemptions=0)
    harness.core.submit(make_request("late", LONG, user="late", priority=0), 0.0)
    harness.core.submit(make_request("urgent", URGENT, priority=1), 0.0)
    work(harness, 4)
    assert running(harness) == {"a", "b"}
    harness.run()
    ends = list(harness.finishes)
    assert harness.core.preemptions == 0
    assert ends.index(("urgent", 0)) < ends.index(("late", 0))


def test_a_preempted_row_returns_at_once_when_the_urgent_request_is_aborted() -> None:
    harness = crowded()
    harness.core.submit(make_request("urgent", URGENT, priority=1, max_tokens=20), 0.0)
    work(harness, 2)
    assert running(harness) == {"a", "urgent"}
    assert harness.core.abort(RequestId("urgent"))
    harness.collect()
    work(harness, 2)
    assert running(harness) == {"a", "b"}
    harness.run()


def test_a_preempted_sequence_is_found_in_the_cache() -> None:
    harness = crowded()
    harness.core.submit(make_request("urgent", URGENT, priority=1, max_tokens=4), 0.0)
    work(harness, 2)
    waiting = next(iter(harness.core.queue))
    assert waiting.request.request_id == "b"
    assert harness.core.memory.match(waiting) >= len(LONG) - 4
    harness.run()
