"""Turns on a device: one holder at a time, in the order of waiting, whoever dies."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.file_locks import FileLock, is_locked
from services.scheduler.turn_queue import TICKETS, TurnQueue

MEMBERS = st.integers(0, 3)


def die(queue: TurnQueue) -> None:
    """Let go of the locks as the kernel does when a process is killed: its ticket's file stays."""
    queue.release()
    if queue._ticket_lock is not None:
        queue._ticket_lock.release()


class Turns(RuleBasedStateMachine):
    """Members that ask, take, give up and die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="pando-turns-")
        self._ticks = itertools.count(1)
        self._queues = [self._join() for _ in range(4)]
        # Members that wait, those that have waited longest first.
        self._line: list[int] = []

    def _join(self) -> TurnQueue:
        return TurnQueue(Path(self._folder.name, "turns"), lambda: next(self._ticks))

    @property
    def _holders(self) -> list[int]:
        return [number for number, queue in enumerate(self._queues) if queue.has_turn]

    @rule(member=MEMBERS)
    def ask(self, member: int) -> None:
        if self._queues[member].has_turn:
            return
        self._queues[member].ask()
        if member not in self._line:
            self._line.append(member)

    @rule(member=MEMBERS)
    def try_take(self, member: int) -> None:
        free, had = not self._holders, self._queues[member].has_turn
        expected = had or (free and self._line[:1] == [member])
        assert self._queues[member].try_take() == expected
        if expected and not had:
            self._line.pop(0)

    @rule(member=MEMBERS)
    def release(self, member: int) -> None:
        self._queues[member].release()

    @rule(member=MEMBERS)
    def leave(self, member: int) -> None:
        self._queues[member].leave()
        self._line = [each for each in self._line if each != member]

    @rule(member=MEMBERS)
    def is_killed(self, member: int) -> None:
        die(self._queues[member])
        self._line = [each for each in self._line if each != member]
        self._queues[member] = self._join()

    @precondition(lambda self: self._line)
    @rule()
    def all_who_wait_get_turns_in_order(self) -> None:
        for holder in self._holders:
            self._queues[holder].release()
        for member in list(self._line):
            taken = [number for number, queue in enumerate(self._queues) if queue.try_take()]
            assert taken == [member]
            self._queues[member].release()
        self._line = []

    @invariant()
    def at_most_one_has_the_turn(self) -> None:
        assert len(self._holders) <= 1

    @invariant()
    def each_knows_whether_others_wait(self) -> None:
        for number, queue in enumerate(self._queues):
            assert queue.others_wait == any(member != number for member in self._line)

    def teardown(self) -> None:
        for queue in self._queues:
            die(queue)
        self._folder.cleanup()


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTurns = Turns.TestCase


def test_tickets_of_the_dead_are_deleted(tmp_path: Path) -> None:
    dead, alive = TurnQueue(tmp_path), TurnQueue(tmp_path)
    dead.ask()
    alive.ask()
    die(dead)
    assert alive.try_take()
    assert list((tmp_path / TICKETS).iterdir()) == []


def test_a_lock_is_seen_by_all_and_has_one_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "folder" / "lock"), FileLock(tmp_path / "folder" / "lock")
    assert not is_locked(tmp_path / "folder" / "lock")
    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    assert is_locked(tmp_path / "folder" / "lock")
    first.release()
    assert not is_locked(tmp_path / "folder" / "lock")
    assert second.try_acquire()
    second.release()
