"""Turns of sessions, and the search for the group that has a turn's session where the most likely one does not.

A session is open at one group: at the favourite of those that took sessions when it was opened. So every tokenizer
knows the most likely group of a turn by the present groups and the turn alone, also after a restart. If groups have
come or gone since, the favourite may be another one, which refuses the turn. Then all other groups are asked, and the
one that has the session gets the turn. No group is remembered: others' sessions would decide for how long one is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import UnavailableError
from common.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.types import Admission, LoadReport, RequestId, ScheduleRequest, View
    from services.tokenizer.scheduler_link import SchedulerListener


class SessionGroups(Protocol):
    """The groups in which sessions are searched for."""

    async def find_home(self, view: View, session: str, after: str | None, lacking: str) -> str | None:
        """Return the group that has a session with the turn `after`; None: none has, including the group `lacking`.

        Raises:
            UnavailableError: a group that may have it does not answer.
        """

    def send_home(self, home: str, request: ScheduleRequest) -> None:
        """Send a turn to the group that has its session; raise UnavailableError if that does not take it."""

    def send_anywhere(self, request: ScheduleRequest) -> None:
        """Send a turn that needs no session; raise UnavailableError if no group takes it."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn without an answer. `is_searched`: a group has refused it, so that its session is searched for, or was."""

    request: ScheduleRequest
    is_searched: bool = False
    is_aborted: bool = False


class SessionSearch:
    """Owns the turns that no group has answered. All methods belong to the event loop."""

    def __init__(self, groups: SessionGroups) -> None:
        """Search in `groups`."""
        self._groups = groups
        self._turns: dict[RequestId, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("fleet")

    def __len__(self) -> int:
        """Return the number of turns that are not answered."""
        return len(self._turns)

    def note(self, requests: Iterable[ScheduleRequest]) -> None:
        """Record the turns among requests that were sent."""
        for request in requests:
            if request.options.turn is not None:
                self._turns[request.request_id] = _Turn(request)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Send these turns to no further group; those that are searched for now are answered with the refusal."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if turn is not None:
                turn.is_aborted = True

    def listening(self, name: str, listener: SchedulerListener) -> SchedulerListener:
        """Return the listener of the group `name`, which passes to `listener` what is no reason for a search."""
        return _GroupListener(name, self, listener)

    async def run(self) -> None:
        """Let searches go on until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks:
                task.cancel()

    def passed(self, name: str, admission: Admission, listener: SchedulerListener) -> Admission | None:
        """Return the answer of the group `name`, or None if the turn's session is searched for in others."""
        turn = self._turns.get(admission.request_id)
        answer = replace(admission, lacks_session=False)
        if turn is None:
            return answer
        if not admission.lacks_session or turn.is_searched or turn.is_aborted:
            del self._turns[admission.request_id]
            return answer
        turn.is_searched = True
        task = asyncio.create_task(self._search(turn, name, answer, listener))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return None

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Forget turns whose group was lost before it answered."""
        for request_id in request_ids:
            self._turns.pop(request_id, None)

    async def _search(self, turn: _Turn, lacking: str, refusal: Admission, listener: SchedulerListener) -> None:
        """Send a turn to the group that has its session, or answer it."""
        answer = refusal
        try:
            if await self._try_send(turn, lacking):
                return
        except UnavailableError as error:
            answer = replace(refusal, rejected=error.to_failure())
        except Exception:  # noqa: BLE001  (the edge of the task: the request must get an answer)
            self._log.exception("session.search_failed", request_id=turn.request.request_id)
        self._turns.pop(turn.request.request_id, None)
        listener.on_admissions([answer])

    async def _try_send(self, turn: _Turn, lacking: str) -> bool:
        """Send a turn on if a group has its session, or it needs none; return whether that is so.

        Raises:
            UnavailableError: the group of the session does not take it, or is not known as a group does not answer.
        """
        request, options = turn.request, turn.request.options
        assert options.session is not None, "a turn is one of a session"
        assert options.turn is not None, "only turns are searched for"
        goes_on_alone = bool(options.turn.conversation_ids) or (
            options.turn.after is None and options.resume is not None
        )
        try:
            home = await self._groups.find_home(request.view, options.session, options.turn.after, lacking)
            if home is None and options.turn.after is not None and not goes_on_alone:
                # A group with the session but not the turn says so, as the refusal so far may not.
                home = await self._groups.find_home(request.view, options.session, None, lacking)
        except UnavailableError:
            if not goes_on_alone:
                raise
            home = None
        if turn.is_aborted:
            return False
        if home is not None:
            self._groups.send_home(home, request)
        elif goes_on_alone:
            alone = replace(options, turn=replace(options.turn, only_in_session=False))
            self._groups.send_anywhere(replace(request, options=alone))
        return home is not None or goes_on_alone


class _GroupListener:
    """Implements `SchedulerListener` for one group."""

    def __init__(self, name: str, search: SessionSearch, listener: SchedulerListener) -> None:
        self._name = name
        self._search = search
        self._listener = listener

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        passed: Sequence[Admission] = [
            answer
            for admission in admissions
            if (answer := self._search.passed(self._name, admission, self._listener)) is not None
        ]
        if passed:
            self._listener.on_admissions(passed)

    def on_load(self, load: LoadReport) -> None:
        self._listener.on_load(load)

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        known = list(lost or ())
        self._search.forget(known)
        self._listener.on_scheduler_lost(known)
