"""Rows with drafts, right and wrong, and every sampling parameter: tokens and log probabilities of single passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import Draft, StepPlan, StepResult
from common.types import RowSlot, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.synchronous_executor import SynchronousExecutor
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.plans.drafts import NO_TOKEN, join_tokens, split_tokens
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.table import SamplingTable
from tests.examples import one_in
from tests.services.worker.engine.execution.asked import EveryThird, random_sampling
from tests.services.worker.engine.execution.markov import PAGE_SIZE, PAGES, VOCABULARY, MarkovRunner
from tests.services.worker.engine.scenario import chunk, open_row

if TYPE_CHECKING:
    from common.steps import RowOpen, RowStop
    from common.types import TokenLogprob
    from services.worker.engine.execution.engine import PlanRunner

ROWS = 6
CONTEXT = 64
ROW_PAGES = CONTEXT // PAGE_SIZE


@dataclass
class Heard:
    """What was reported of each row, in order, and the number of passes."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    stops: dict[int, RowStop] = field(default_factory=dict)
    passes: int = 0

    def take(self, results: list[StepResult]) -> None:
        for result in results:
            self.passes += 1
            for rows, ids in ((result.rows, result.token_ids), (result.accepted_rows, result.accepted_token_ids)):
                for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                    assert row not in self.stops, "a token after the end"
                    self.tokens.setdefault(row, []).append(token)
            for slot, told in result.logprobs:
                self.logprobs.setdefault(slot, []).append(told)
            self.stops |= {int(stop.row): stop for stop in result.stops}


def random_rows(random: Random) -> list[RowOpen]:
    opens = []
    for row in range(random.randint(1, ROWS)):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 20))]
        opens.append(
            open_row(
                row,
                prompt,
                range(row * ROW_PAGES, (row + 1) * ROW_PAGES),
                total=random.randint(len(prompt) + 1, CONTEXT),
                stop=tuple(random.sample(range(VOCABULARY), random.choice([0, 3, 20]))),
                min_new=random.choice([0, 0, 5]),
                sampling=random_sampling(random, VOCABULARY),
            )
        )
    return opens


def synchronous() -> SynchronousRunner:
    table = SamplingTable(ROWS, VOCABULARY)
    table.grammars = EveryThird(VOCABULARY)  # type: ignore[assignment]  # stands in for `RowMasks`
    executor = SynchronousExecutor(MarkovRunner(torch.device("cpu")), table, 0)
    return SynchronousRunner(RowStates(ROWS, CONTEXT, PAGE_SIZE), PlanLimits(VOCABULARY, PAGES, 256), executor)


class Rows:
    """Runs rows to their end, with drafts that are taken from what they are expected to generate."""

    def __init__(self, opens: list[RowOpen], plans: PlanRunner | None = None) -> None:
        self._plans = plans or synchronous()
        self.states = self._plans.rows
        self.opens = opens
        self.heard = Heard()
        self.plans: list[StepPlan] = []

    def start(self) -> None:
        chunks = tuple(chunk(opened.row, 0, opened.prompt_tokens) for opened in self.opens)
        self.run(opens=tuple(self.opens), prefills=chunks)

    def run(self, **changes: object) -> None:
        self.repeat(StepPlan(StepId(len(self.plans) + 1), **changes))  # type: ignore[arg-type]  # a plan's

    def repeat(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        results: list[StepResult] = []
        self._plans.run(plan, results.append)
        self._plans.settle(lambda: False)
        self.heard.take(results)

    def finish(self, expected: Heard | None = None, random: Random | None = None) -> Heard:
        self.start()
        while len(self.heard.stops) < len(self.opens):
            drafts = [] if expected is None or random is None else list(self._drafts(expected, random))
            self.run(drafts=tuple(drafts))
        return self.heard

    def _drafts(self, expected: Heard, random: Random) -> list[Draft]:
        drafts = []
        for opened in self.opens:
            row = int(opened.row)
            known = len(self.heard.tokens[row])
            room = opened.max_total_tokens - opened.prompt_tokens - known - 1
            length = min(room, random.choice([0, 1, 2, 5, 9, 30]))
            if row in self.heard.stops or length <= 0:
                continue
            guess = expected.tokens[row][known : known + length]
            guess += [random.randrange(VOCABULARY) for _ in range(length - len(guess))]
            if random.random() < 0.4:
                guess[random.randrange(length)] = random.randrange(VOCABULARY)
            drafts.append(Draft(RowSlot(row), np.array(guess, np.int32)))
        return drafts


@pytest.mark.parametrize("seed", one_in(3, range(60)))
def test_drafts_change_passes_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    opens = random_rows(random)
    alone = Rows(opens).finish()
    rows = Rows(opens)
    with_drafts = rows.finish(alone, random)
    assert with_drafts.tokens == alone.tokens
    assert with_drafts.stops == alone.stops
    assert with_drafts.logprobs == alone.logprobs
    assert with_drafts.passes <= alone.passes
    for row, tokens in alone.tokens.items():
        assert rows.states.computed[row] == rows.states.lengths[row] - 1 == opens[row].prompt_tokens + len(tokens) - 1


def test_right_drafts_save_passes() -> None:
    prompt = [1, 2, 3]
    opens = [open_row(0, prompt, range(ROW_PAGES), total=44)]
    alone = Rows(opens).finish()
    rows = Rows(opens)
    rows.start()
    rows.run(drafts=(Draft(RowSlot(0), np.array(alone.tokens[0][1:40], np.int32)),))
    assert rows.heard.tokens == alone.tokens
    assert rows.heard.passes == 2
    rows = Rows(opens)
    rows.start()
    wrong = (alone.tokens[0][4] + 1) % VOCABULARY
    rows.run(drafts=(Draft(RowSlot(0), np.array([*alone.tokens[0][1:4], wrong, 5], np.int32)),))
    assert rows.heard.tokens[0] == alone.tokens[0][:5]


@pytest.mark.parametrize(
    ("draft", "steps", "message"),
    [
        ([1] * 40, 1, "no room for a token after it"),
        ([VOCABULARY], 1, "outside the vocabulary"),
        ([-1], 1, "outside the vocabulary"),
        ([], 1, "no tokens"),
        ([1] * 15, 1, "pages do not hold"),
        ([1], 2, "several steps"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(draft: list[int], steps: int, message: str) -> None:
    rows = Rows([open_row(0, [1, 2, 3], range(4), total=30)])
    rows.start()
    with pytest.raises(InvalidPlanError, match=message):
        rows.run(drafts=(Draft(RowSlot(0), np.array(draft, np.int32)),), steps=steps)


def test_a_row_that_does_not_decode_has_no_draft() -> None:
    rows = Rows([open_row(0, [1, 2, 3], range(4), total=12)])
    with pytest.raises(InvalidPlanError, match="not open"):
        rows.run(drafts=(Draft(RowSlot(0), np.array([1], np.int32)),))
    with pytest.raises(InvalidPlanError, match="cannot verify"):
        rows.run(opens=tuple(rows.opens), drafts=(Draft(RowSlot(0), np.array([1], np.int32)),))


def test_tokens_that_were_split_are_joined_again() -> None:
    slots = np.array([7, 2, 5])
    tokens = np.array([[4, 8, 9, NO_TOKEN], [6, NO_TOKEN, NO_TOKEN, NO_TOKEN], [1, 2, NO_TOKEN, NO_TOKEN]], np.int32)
    first, accepted = split_tokens(tokens, slots)
    assert join_tokens(first, accepted, slots, (3, 4)).tolist() == tokens.tolist()
    # A pass without tokens is a number, as a sign.
    nothing = np.empty(0, np.int32)
    assert join_tokens(nothing, accepted.of(slots[:0]), slots[:0], (1, 1)).tolist() == [[NO_TOKEN]]
