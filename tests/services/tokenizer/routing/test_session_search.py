"""Turns reach the group that has their session, whichever groups come and go, and are refused only if none has it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count as count_from
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import UnavailableError
from common.types import ErrorCode, RequestId, RequestOptions, Resume, SessionTurn, SessionWish, Subject, View
from services.tokenizer.routing import fleet as routing_fleet
from services.tokenizer.routing.policies import RoundRobin, favourite, session_key
from tests.services.tokenizer.routing.requests import schedule
from tests.services.tokenizer.routing.test_fleet import Group, Listener, Tier
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from common.types import Admission, ScheduleRequest
    from services.tokenizer.routing.fleet import Fleet

TURN = SessionTurn("next", after="last")


class Answers(Listener):
    """Keeps the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.by_id: dict[str, Admission] = {}

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        for admission in admissions:
            assert admission.request_id not in self.by_id, "one answer for each"
            assert not admission.lacks_session, "it is between tokenizer and scheduler"
            self.by_id[admission.request_id] = admission

    async def code(self, name: str) -> ErrorCode | None:
        await until(lambda: name in self.by_id)
        rejected = self.by_id[name].rejected
        return None if rejected is None else rejected.code


def view_of(number: int) -> View:
    return View(Subject("acme", f"user-{number}"))


def views_of(tier: Tier, group: Group, count: int, first: int = 1000) -> list[View]:
    """Return views of whose sessions a group is the most likely one while all are there."""
    found: list[View] = []
    for number in count_from(first):
        view = view_of(number)
        if favourite(session_key(view, "chat"), [each.address for each in tier.groups]) == group.address:
            found.append(view)
        if len(found) == count:
            break
    return found


def turn_of(view: View, name: str, turn: SessionTurn = TURN, **options: Any) -> ScheduleRequest:
    request = schedule(name, user=view.subject.name)
    return replace(request, options=RequestOptions(session="chat", turn=turn, **options))


def home_of(tier: Tier, view: View) -> Group:
    (home,) = [group for group in tier.groups if (view.subject.name, "chat") in group.scheduler.sessions]
    return home


@asynccontextmanager
async def fleet_of(tier: Tier) -> AsyncIterator[tuple[Fleet, Answers]]:
    tier.listener = answers = Answers()
    for group in tier.groups:
        group.scheduler.needs_sessions = True
    async with tier.run(RoundRobin()) as fleet:
        yield fleet, answers


async def leave(tier: Tier, fleet: Fleet, group: Group) -> None:
    before = tier.serving(fleet)
    await group.stop()
    await until(lambda: tier.serving(fleet) == before - 1)


async def come_back(tier: Tier, fleet: Fleet, group: Group) -> None:
    before = tier.serving(fleet)
    await group.start()
    await until(lambda: tier.serving(fleet) == before + 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 6))])
async def test_turns_of_sessions_reach_them_whichever_groups_are_away(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    tier = Tier(tmp_path, 4)
    opened: list[View] = []
    away: Group | None = None
    turns = moved = 0
    async with fleet_of(tier) as (fleet, answers):
        await leave(tier, fleet, tier.groups[0])
        for view in views_of(tier, tier.groups[0], 2):
            await fleet.open_session(SessionWish(view, "chat"))
            opened.append(view)
        await come_back(tier, fleet, tier.groups[0])
        for step in range(5):
            if away is not None:
                await come_back(tier, fleet, away)
            # First all of them are there.
            away = random.choice([None, *tier.groups]) if step else None
            if away is not None:
                await leave(tier, fleet, away)
            for _ in range(6):
                view = view_of(len(opened))
                assert view not in opened
                await fleet.open_session(SessionWish(view, "chat"))
                opened.append(view)
            for view in opened:
                name, home = f"turn-{turns}", home_of(tier, view)
                fleet.submit([turn_of(view, name)])
                turns += 1
                if home is away:
                    assert await answers.code(name) is ErrorCode.UNAVAILABLE, step
                else:
                    assert await answers.code(name) is None, step
                    asked = [group for group in tier.groups if name in group.names]
                    assert home in asked
                    moved += len(asked) - 1
                    assert fleet._destinations.take(RequestId(name)) == home.address
        if away is not None:
            await come_back(tier, fleet, away)
        for view in opened:
            assert await fleet.close_session(view, "chat")
        assert not any(group.scheduler.sessions for group in tier.groups)
        assert not len(fleet._search)
    assert turns == sum(2 + 6 * (step + 1) for step in range(5))
    assert moved, "some sessions were not at the most likely group"


async def test_a_session_that_was_opened_again_while_its_group_was_away_is_closed_at_both(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with fleet_of(tier) as (fleet, answers):
        first = tier.groups[0]
        (view,) = views_of(tier, first, 1)
        for group in (first, tier.groups[1]):
            await fleet.open_session(SessionWish(view, "chat"))
            assert group.scheduler.sessions
            await leave(tier, fleet, first) if group is first else await come_back(tier, fleet, first)
        assert await fleet.close_session(view, "chat")
        fleet.submit([turn_of(view, "turn")])
        assert await answers.code("turn") is ErrorCode.INVALID_REQUEST
        assert not any(group.scheduler.sessions for group in tier.groups)


async def test_closing_a_session_needs_no_answer_of_groups_that_are_away(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, _):
        await leave(tier, fleet, tier.groups[0])
        await fleet.open_session(SessionWish(view_of(0), "chat"))
        assert await fleet.close_session(view_of(0), "chat")


async def test_a_turn_of_no_session_is_refused_as_such_once_every_group_says_so(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        fleet.submit([turn_of(view_of(0), "unknown")])
        assert await answers.code("unknown") is ErrorCode.INVALID_REQUEST
        assert sum(len(group.names) for group in tier.groups) == 1, "one has it in full, the others are asked"
        assert not await fleet.find_session(view_of(0), "chat")
        assert not await fleet.close_session(view_of(0), "chat")


async def test_a_turn_that_continues_none_is_refused_by_the_group_of_its_session(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        first = tier.groups[0]
        await leave(tier, fleet, first)
        (view,) = views_of(tier, first, 1)
        await fleet.open_session(SessionWish(view, "chat"))
        await come_back(tier, fleet, first)
        for group in tier.groups:
            group.scheduler.unknown_turns = {"last"}
        fleet.submit([turn_of(view, "turn")])
        assert await answers.code("turn") is ErrorCode.INVALID_REQUEST
        refusal = answers.by_id["turn"].rejected
        assert refusal is not None
        assert refusal.message == "no such turn"
        assert not len(fleet._search)


async def test_a_session_that_may_be_at_a_group_that_is_away_is_not_taken_for_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        view = view_of(0)
        await fleet.open_session(SessionWish(view, "chat"))
        home = home_of(tier, view)
        await leave(tier, fleet, home)
        fleet.submit([turn_of(view, "first")])
        assert await answers.code("first") is ErrorCode.UNAVAILABLE
        failure = answers.by_id["first"].rejected
        assert failure is not None
        assert failure.retryable
        assert "a group that may have this session does not answer" in failure.message
        with pytest.raises(UnavailableError, match="may have this session"):
            await fleet.close_session(view, "chat")
        # Who waits for it for ever could not open another one.
        monkeypatch.setattr(routing_fleet, "GONE_S", 0.0)
        fleet.submit([turn_of(view, "later")])
        assert await answers.code("later") is ErrorCode.INVALID_REQUEST
        await come_back(tier, fleet, home)
        fleet.submit([turn_of(view, "back")])
        assert await answers.code("back") is None


async def test_a_group_that_takes_no_more_messages_is_not_taken_for_one_without_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        view = view_of(0)
        await fleet.open_session(SessionWish(view, "chat"))
        home = home_of(tier, view)

        def refuse(requests: object) -> None:
            raise UnavailableError("the scheduler does not keep up")

        with monkeypatch.context() as patched:
            patched.setattr(fleet._replicas[home.address]._link, "submit", refuse)
            fleet.submit([turn_of(view, "busy")])
            assert await answers.code("busy") is ErrorCode.UNAVAILABLE
        failure = answers.by_id["busy"].rejected
        assert failure is not None
        assert failure.message == "the scheduler does not keep up"
        fleet.submit([turn_of(view, "again")])
        assert await answers.code("again") is None


async def test_a_group_that_serves_nothing_now_still_has_its_sessions(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        view = view_of(0)
        await fleet.open_session(SessionWish(view, "chat"))
        home = home_of(tier, view)
        await home.drain()
        await until(lambda: tier.serving(fleet) == 2)
        fleet.submit([turn_of(view, "turn")])
        assert await answers.code("turn") is None
        assert "turn" in home.names


@pytest.mark.parametrize(
    ("turn", "resume"),
    [
        (replace(TURN, conversation_ids=(1, 2)), None),
        (replace(TURN, conversation_ids=(1, 2)), Resume((5,), 1)),
        (SessionTurn("next"), Resume((5,), 1)),
    ],
)
async def test_a_turn_that_is_sent_again_looks_for_its_session_and_goes_on_without(
    tmp_path: Path, turn: SessionTurn, resume: Resume | None
) -> None:
    tier = Tier(tmp_path, 4)
    async with fleet_of(tier) as (fleet, answers):
        first = tier.groups[0]
        await leave(tier, fleet, first)
        views = [*views_of(tier, first, 2), *views_of(tier, tier.groups[1], 2)]
        for view in views:
            await fleet.open_session(SessionWish(view, "chat"))
        await come_back(tier, fleet, first)
        for view in views:
            fleet.submit([turn_of(view, view.subject.name, turn, resume=resume)])
            assert await answers.code(view.subject.name) is None
            assert fleet._destinations.take(RequestId(view.subject.name)) == home_of(tier, view).address
        assert any(view.subject.name in first.names for view in views), "some were most likely at the one that returned"
        lost = home_of(tier, views[0])
        await leave(tier, fleet, lost)
        fleet.submit([turn_of(views[0], "without", turn, resume=resume)])
        assert await answers.code("without") is None


async def test_an_aborted_turn_is_sent_to_no_further_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Tier(tmp_path, 3)
    async with fleet_of(tier) as (fleet, answers):
        first = tier.groups[0]
        await leave(tier, fleet, first)
        views = [*views_of(tier, first, 2), *views_of(tier, tier.groups[1], 2)]
        for view in views:
            await fleet.open_session(SessionWish(view, "chat"))
        await come_back(tier, fleet, first)
        found = fleet.find_home

        async def find(view: View, session: str, after: str | None, lacking: str | None = None) -> str | None:
            home = await found(view, session, after, lacking)
            fleet.abort([RequestId(view.subject.name)])
            return home

        monkeypatch.setattr(fleet, "find_home", find)
        for view in views:
            fleet.submit([turn_of(view, view.subject.name)])
        for view in views:
            code = await answers.code(view.subject.name)
            was_most_likely = view.subject.name in first.names
            assert (code is None) is not was_most_likely
            assert (view.subject.name in home_of(tier, view).names) is not was_most_likely
        assert first.names
        assert not len(fleet._search)


async def test_requests_that_were_lost_are_not_searched_for(tmp_path: Path) -> None:
    tier = Tier(tmp_path, 2)
    async with fleet_of(tier) as (fleet, answers):
        view = view_of(0)
        await fleet.open_session(SessionWish(view, "chat"))
        home = home_of(tier, view)
        home.scheduler.answers = False
        fleet.submit([turn_of(view, "turn")])
        await until(lambda: "turn" in home.names)
        assert len(fleet._search) == 1
        await leave(tier, fleet, home)
        assert answers.lost == {"turn"}
        assert not len(fleet._search)
