"""What answers to heartbeats say about a rank and its connection."""

from __future__ import annotations

from services.scheduler.heartbeats import IDLE_BEATS, IDLE_BEATS_AFTER_SILENCE, SILENT_BEATS, PulseRecord
from services.scheduler.rank import Pulse

IDLE, BUSY = Pulse(0.0, 0), Pulse(0.0, 2)
SIGN = 7.0


def beats(record: PulseRecord, pulse: Pulse | None, count: int, sign: float = SIGN, *, is_busy: bool = True) -> None:
    """Let so many heartbeats be answered with `pulse`, or not at all."""
    for _ in range(count):
        record.beat([] if pulse is None else [(pulse, sign)], sign, is_busy=is_busy)


def test_heartbeats_without_an_answer_are_counted_until_one_arrives_however_late() -> None:
    record = PulseRecord()
    beats(record, None, 4)
    assert record.silent == 4
    record.beat([(BUSY, SIGN - 1)], SIGN, is_busy=True)
    assert record.silent == 0


def test_a_rank_without_plans_while_some_are_in_flight_has_lost_them() -> None:
    record = PulseRecord()
    beats(record, IDLE, IDLE_BEATS - 1)
    assert not record.has_lost_plans
    beats(record, IDLE, 1)
    assert record.has_lost_plans


def test_after_silence_less_is_enough() -> None:
    record = PulseRecord()
    beats(record, None, SILENT_BEATS)
    beats(record, IDLE, IDLE_BEATS_AFTER_SILENCE - 1)
    assert not record.has_lost_plans
    beats(record, IDLE, 1)
    assert record.has_lost_plans


def test_a_result_a_plan_under_way_or_no_work_says_that_nothing_is_lost() -> None:
    record = PulseRecord()
    for number in range(3 * IDLE_BEATS):
        beats(record, IDLE, IDLE_BEATS_AFTER_SILENCE, SIGN + number)
        assert not record.has_lost_plans
    # The answer may have overtaken a result, or a plan.
    for _ in range(2 * IDLE_BEATS):
        record.beat([(IDLE, SIGN - 1)], SIGN, is_busy=True)
    beats(record, BUSY, 2 * IDLE_BEATS)
    beats(record, IDLE, 2 * IDLE_BEATS, is_busy=False)
    assert not record.has_lost_plans


def test_silence_before_a_result_does_not_count_against_the_connection() -> None:
    record = PulseRecord()
    beats(record, None, SILENT_BEATS)
    beats(record, BUSY, 1, SIGN + 1)
    beats(record, IDLE, IDLE_BEATS - 1, SIGN + 1)
    assert not record.has_lost_plans


def test_a_worker_of_a_version_that_does_not_count_its_plans_has_lost_none() -> None:
    record = PulseRecord()
    beats(record, Pulse(0.0, None), 2 * IDLE_BEATS)
    assert not record.has_lost_plans
