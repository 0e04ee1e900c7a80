"""Finds the request that makes the engine fail, and keeps it from running again."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import RequestId, ScheduleRequest
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import Sequence

# Failures of the engine after which a request runs in isolation, and after which it is quarantined.
ISOLATED_AFTER = 2
QUARANTINED_AFTER = 3
# Failures in a row without a single completed pass: the engine itself is broken, and requests end without isolation.
BROKEN_AFTER = 8
# Tokens that a request may have had in flight at another scheduler group, beyond those that it was handed back with.
UNDELIVERED_TOKENS = 16
# For this time the same prompt of the same subject is refused at once: many clients repeat a request that got a 500.
QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024


@dataclass(slots=True)
class _Suspect:
    failures: int = 0
    # By handle of its choices: tokens whose KV has to be computed to clear it.
    goals: dict[int, int] = field(default_factory=dict)


class Suspects:
    """The open requests that were part of a plan in flight when the engine failed.

    A suspect is cleared, and its failures are forgotten, once the passes that failed have succeeded after a restart of
    the engine. So after a single failure, as by an operator's kill, all requests continue together. Requests in flight
    at a second failure are isolated: they run one after another, beside those that have been cleared since; requests
    that have not run yet wait until no isolated one is left. A failure is then due to the isolated request that runs:
    its third one, so it is quarantined.

    One request at a time rather than half of them: a request that is cleared costs a prefill, which has to be repeated
    in any case, whereas each failure costs a restart of the engine, during which all requests wait. So three failures
    find the request, however many run.
    """

    def __init__(self, rows: RowSlots) -> None:
        """Read the progress of requests from `rows`, which the core owns."""
        self._rows = rows
        self._suspects: dict[RequestId, _Suspect] = {}
        self._isolated: set[RequestId] = set()
        # Requests cleared since the first of the isolated ones.
        self._cleared: set[RequestId] = set()
        # The isolated request that may have rows.
        self._on_trial: RequestId | None = None
        # Requests in flight when the workers were lost, with their goals, until it is known whether the engine failed.
        self._in_flight: dict[RequestId, dict[int, int]] = {}
        self._fruitless_failures = 0

    @property
    def is_isolating(self) -> bool:
        """Whether some requests may run only one after another."""
        return bool(self._isolated)

    def failures_of(self, request_id: RequestId) -> int:
        """Return the failures that the request is suspected of, one that has not been judged included."""
        suspect = self._suspects.get(request_id)
        return (suspect.failures if suspect is not None else 0) + (request_id in self._in_flight)

    def enter(self, request: ScheduleRequest) -> None:
        """Suspect a new request of failures in another scheduler group, which handed it back."""
        failures = request.options.engine_failures
        if failures:
            # Its choices have no handles yet; at its first start, `start` sets the goal.
            self._suspects[request.request_id] = _Suspect(failures)
            self._update_isolation()

    def may_start(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may have a row now."""
        request_id = sequence.request.request_id
        if not self._isolated or request_id in self._cleared:
            return True
        return request_id in self._isolated and self._on_trial in (None, request_id)

    def start(self, sequence: Sequence) -> None:
        """Record that a sequence got a row."""
        request_id = sequence.request.request_id
        suspect = self._suspects.get(request_id)
        if suspect is None:
            return
        suspect.goals.setdefault(sequence.handle, len(sequence.token_ids) + UNDELIVERED_TOKENS)
        if request_id in self._isolated:
            self._on_trial = request_id

    def note_pass(self) -> None:
        """Clear suspects whose failed passes have succeeded; call this after each completed pass."""
        self._fruitless_failures = 0
        if not self._suspects:
            return
        for sequence in self._rows.occupants():
            suspect = self._suspects.get(sequence.request.request_id)
            if suspect is None or sequence.row is None:
                continue
            goal = suspect.goals.get(sequence.handle)
            if goal is not None and self._rows.computed[sequence.row] >= goal:
                self._reach(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        request_id = sequence.request.request_id
        self._in_flight.get(request_id, {}).pop(sequence.handle, None)
        if not self._in_flight.get(request_id, True):
            del self._in_flight[request_id]
        if request_id in self._suspects:
            self._reach(sequence)

    def lose(self, running: Iterable[Sequence]) -> None:
        """Record which requests are in flight as the workers are lost; call this before their rows are closed."""
        self._in_flight = {}
        for sequence in running:
            row = sequence.row
            assert row is not None, "running sequences have a row"
            planned = int(self._rows.planned[row])
            if self._rows.may_jump[row]:
                planned = max(planned, int(self._rows.reach[row]))
            if planned > self._rows.computed[row]:
                self._in_flight.setdefault(sequence.request.request_id, {})[sequence.handle] = planned
        if self._on_trial in self._in_flight:
            self._in_flight = {self._on_trial: self._in_flight[self._on_trial]}
        self._on_trial = None

    def judge(self, *, engine_failed: bool) -> list[RequestId]:
        """Count a failure for each request that was in flight, if the engine failed; return those to quarantine."""
        in_flight, self._in_flight = self._in_flight, {}
        if not engine_failed or not in_flight:
            return []
        self._fruitless_failures += 1
        for request_id, goals in in_flight.items():
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.failures += 1
            suspect.goals = goals
        self._update_isolation()
        if self._fruitless_failures >= BROKEN_AFTER:
            return sorted(self._isolated)
        return [request_id for request_id in in_flight if self._suspects[request_id].failures >= QUARANTINED_AFTER]

    def _reach(self, sequence: Sequence) -> None:
        """Record that a sequence has reached its goal, which clears its request if it is the last of its choices."""
        request_id = sequence.request.request_id
        suspect = self._suspects[request_id]
        suspect.goals.pop(sequence.handle, None)
        if suspect.goals:
            return
        del self._suspects[request_id]
        if self._on_trial == request_id:
            self._on_trial = None
        if self._isolated:
            self._cleared.add(request_id)
        self._update_isolation()

    def _update_isolation(self) -> None:
        self._isolated = {
            request_id for request_id, suspect in self._suspects.items() if suspect.failures >= ISOLATED_AFTER
        }
        self._cleared -= self._isolated
        if not self._isolated:
            self._cleared.clear()


class PromptQuarantine:
    """Prompts of requests that were quarantined, as keyed digests with their subjects."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        # The times at which they are released, oldest first.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: ScheduleRequest, now: float) -> None:
        """Quarantine a request's prompt for its subject."""
        digest = self._digest(request)
        self._until[digest] = now + QUARANTINE_S
        self._until.move_to_end(digest)
        if len(self._until) > MAX_QUARANTINED:
            self._until.popitem(last=False)

    def holds(self, request: ScheduleRequest, now: float) -> bool:
        """Return whether the request's prompt is in quarantine for its subject."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return bool(self._until) and self._digest(request) in self._until

    def _digest(self, request: ScheduleRequest) -> bytes:
        subject = request.view.subject
        digest = hashlib.blake2b(request.token_ids.tobytes(), key=self._key)
        digest.update(f"{len(subject.tenant)} {subject.tenant}{subject.name}".encode())
        return digest.digest()
