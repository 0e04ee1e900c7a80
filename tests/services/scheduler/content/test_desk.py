from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from common.errors import ConfigurationError
from services.scheduler.cache.types import CandidateId, PromotionCandidate
from services.scheduler.content.desk import MAX_WAITING, CheckAnswer, ContentDesk
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, PLAIN, Driver, with_rules
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from common.types import TokenIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.content.desk import ContentChecker

PROMPT = list(range(100, 116))


class ScriptedChecker:
    """Answers what it is told to."""

    def __init__(self, answer: CheckAnswer) -> None:
        self.answer = answer
        self.asked: list[TokenIds] = []
        self.closed = False

    async def examine(self, token_ids: TokenIds) -> CheckAnswer:
        self.asked.append(token_ids)
        return self.answer

    async def look(self) -> CheckAnswer:
        return CheckAnswer(rules=self.answer.rules, complaint=self.answer.complaint)

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def working(checker: ScriptedChecker, driver: Driver) -> AsyncIterator[ContentDesk]:
    desk = ContentDesk(cast("ContentChecker", checker), lambda: driver.cache)
    task = asyncio.create_task(desk.run())
    try:
        yield desk
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def driver_with_candidate() -> Driver:
    config = with_rules(PLAIN, content_check=True, verdict_epochs=2)
    driver = Driver("user_aware", config=config, capacity=200)
    for number, user in enumerate((ANN, BOB, CID)):
        driver.serve(user, [*PROMPT, 50 + number, 0])
    driver.next_epoch()
    return driver


@pytest.mark.parametrize(
    ("allowed", "outcome", "shared"), [(16, "allowed", [PROMPT]), (9, "cut", [PROMPT[:8]]), (0, "refused", [])]
)
async def test_a_verdict_decides_how_much_is_shared(allowed: int, outcome: str, shared: list[list[int]]) -> None:
    driver = driver_with_candidate()
    checker = ScriptedChecker(CheckAnswer(allowed, rules="1"))
    async with working(checker, driver) as desk:
        await until(lambda: desk.verdicts == {outcome: 1})
    assert [ids.tolist() for ids in checker.asked] == [PROMPT]
    assert driver.tenants == []
    driver.next_epoch()
    assert driver.tenants == shared
    assert checker.closed


@pytest.mark.parametrize("answer", [CheckAnswer(failure="no answer within 5 s"), CheckAnswer()])
async def test_a_failure_publishes_nothing_and_is_asked_about_again(answer: CheckAnswer) -> None:
    driver = driver_with_candidate()
    checker = ScriptedChecker(answer)
    async with working(checker, driver) as desk:
        await until(lambda: desk.verdicts == {"failed": 1})
        driver.next_epoch()
        assert driver.tenants == []
        # As soon as the cache has waited for long enough, without anybody asking for the prompt anew.
        driver.next_epoch(3)
        driver.next_epoch()
        checker.answer = CheckAnswer(len(PROMPT))
        await until(lambda: desk.verdicts == {"failed": 1, "allowed": 1})
    driver.next_epoch()
    assert driver.tenants == [PROMPT]


async def test_verdicts_of_old_rules_do_not_count_under_new_ones() -> None:
    driver = driver_with_candidate()
    checker = ScriptedChecker(CheckAnswer(0, rules="strict"))
    async with working(checker, driver) as desk:
        await until(lambda: desk.verdicts == {"refused": 1})
        checker.answer = CheckAnswer(len(PROMPT), rules="lax")
        # Found out by looking, as nothing is asked.
        await until(lambda: desk._rules == "lax")
        driver.serve(DAN, PROMPT)
        driver.next_epoch()
        await until(lambda: desk.verdicts == {"refused": 1, "allowed": 1})
    driver.next_epoch()
    assert driver.tenants == [PROMPT]


class Candidates:
    """A cache of which only the candidates matter."""

    def __init__(self, *tenants: str) -> None:
        ids = np.zeros(16, np.int32)
        self.new = tuple(PromotionCandidate(CandidateId(n), ids, tenant) for n, tenant in enumerate(tenants))
        self.resolved: list[str] = []
        self._tenants = tenants

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        new, self.new = self.new, ()
        return new

    def resolve(self, candidate_id: CandidateId, _allowed_tokens: int) -> None:
        self.resolved.append(self._tenants[candidate_id])


async def examined(cache: Candidates, most: int) -> list[str]:
    """Return the tenants of the candidates that got a verdict, in order."""
    desk = ContentDesk(
        cast("ContentChecker", ScriptedChecker(CheckAnswer(16, rules="1"))), lambda: cast("PrefixCache", cache)
    )
    task = asyncio.create_task(desk.run())
    await until(lambda: sum(desk.verdicts.values()) == most)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert desk.verdicts["allowed"] == len(cache.resolved)
    return cache.resolved


async def test_a_flood_of_one_tenant_s_candidates_drops_its_own_only() -> None:
    """One tenant's candidates pushed another's out of a queue that all shared."""
    early, late = ["victim"] * 3, ["victim"] * 3
    asked = [*early, *["flood"] * (2 * MAX_WAITING), *late]
    order = await examined(Candidates(*asked), len(asked))
    assert order.count("victim") == 6
    assert order.count("flood") == MAX_WAITING - 6


async def test_tenants_have_their_candidates_examined_in_turn() -> None:
    asked = ["flood"] * 20 + ["victim"] * 3 + ["other"] * 2
    order = await examined(Candidates(*asked), len(asked))
    assert order[:8] == ["flood", "victim", "other", "flood", "victim", "other", "flood", "victim"]
    assert order[8:] == ["flood"] * 17


async def test_a_candidate_says_which_tenant_is_to_share_it() -> None:
    candidates = driver_with_candidate().cache.take_candidates()
    assert [candidate.tenant for candidate in candidates] == ["tenant"]


@pytest.mark.parametrize(
    "answer", [CheckAnswer(failure="no content detector is named"), CheckAnswer(complaint="no rules")]
)
async def test_detectors_that_cannot_start_end_the_service(answer: CheckAnswer) -> None:
    class Refusing(ScriptedChecker):
        async def look(self) -> CheckAnswer:
            return answer

    checker = Refusing(CheckAnswer())
    desk = ContentDesk(cast("ContentChecker", checker), lambda: None)
    with pytest.raises(ConfigurationError, match="no "):
        await desk.run()
    assert checker.closed


async def test_without_workers_nothing_is_checked() -> None:
    checker = ScriptedChecker(CheckAnswer(rules="1"))
    desk = ContentDesk(cast("ContentChecker", checker), lambda: None)
    task = asyncio.create_task(desk.run())
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert checker.asked == []
