"""Plans of two micro-batches that every rank of a pipeline carries out, and the answers of the rank that samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.steps import Draft, MicroBatch, StepPlan
from common.types import RowSlot, SamplingParams, StepId
from tests.services.worker.engine.scenario import chunk, open_row
from tests.services.worker.engine.speculated_lives import CERTAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import StepResult
    from common.types import TokenLogprob
    from services.worker.engine.execution.engine import ModelEngine

PAGE_SIZE = 16
PAGES = 40
ROWS = 4
# Tokens of each row, its prompt included.
TOTAL = 34
# Greedy with log probabilities, seeded, greedy under penalties, and held to a grammar.
SAMPLING = (
    SamplingParams(temperature=0.0, top_logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5),
    SamplingParams(temperature=0.0, frequency_penalty=0.3, presence_penalty=0.2),
    SamplingParams(temperature=0.8, seed=9, grammar=CERTAIN),
)
# Right tokens of a draft, after which one is wrong.
GUESSED = 3


@dataclass
class Answers:
    """Tokens and log probabilities of each row."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=lambda: defaultdict(list))
    accepted: int = 0

    def add(self, result: StepResult) -> None:
        assert result.error is None, result.error
        for row, token in zip(result.rows.tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        for row, token in zip(result.accepted_rows.tolist(), result.accepted_token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
            self.accepted += 1
        for row, logprob in result.logprobs:
            self.logprobs[row].append(logprob)


def plans(known: dict[int, list[int]] | None) -> list[StepPlan]:
    """Return the same plans on every rank; `known` are the tokens of row 0 that a draft guesses, None: no draft.

    Prompts come in chunks beside rows that decode, micro-batches take turns, and then there are leases of three steps.
    """
    prompts = [[(7 * row + 3 * i) % 90 + 10 for i in range(9 + 4 * row)] for row in range(ROWS)]
    opens = [
        open_row(row, prompts[row], range(3 * row, 3 * row + 3), total=TOTAL, sampling=SAMPLING[row])
        for row in range(ROWS)
    ]
    first, second = MicroBatch(0, 2), MicroBatch(1, 2)
    made = [
        StepPlan(StepId(1), opens=tuple(opens[:2]), prefills=(chunk(0, 0, 9), chunk(1, 0, 13)), micro_batch=first),
        StepPlan(StepId(2), opens=(opens[2],), prefills=(chunk(2, 0, 17),), micro_batch=second),
        StepPlan(StepId(3), opens=(opens[3],), prefills=(chunk(3, 0, 8),), micro_batch=first),
        StepPlan(StepId(4), prefills=(chunk(3, 8, 13),), micro_batch=second),
    ]
    made += [StepPlan(StepId(step), micro_batch=(first, second)[step % 2]) for step in range(5, 11)]
    if known is not None:
        # Row 0 has sampled with its prompt, in plan 3, and in three of the plans after it.
        guess = [*known[0][5 : 5 + GUESSED], (known[0][5 + GUESSED] + 1) % 100]
        made.append(StepPlan(StepId(11), drafts=(Draft(RowSlot(0), np.array(guess, np.int32)),)))
    turns = range(12, 26)
    return made + [StepPlan(StepId(step), steps=3, micro_batch=(first, second)[step % 2]) for step in turns]


def answer(
    engine: ModelEngine, known: dict[int, list[int]] | None, before: Callable[[int], None] = lambda _number: None
) -> Answers:
    """Carry the plans out, as far ahead as the engine goes by itself; `before` is called before each."""
    answers = Answers()
    for number, plan in enumerate(plans(known)):
        before(number)
        engine.execute(plan, answers.add)
        engine.settle(lambda: True)
    engine.settle(lambda: False)
    return Answers(dict(answers.tokens), dict(answers.logprobs), answers.accepted)


def assert_same_answers(found: Answers, expected: Answers, tolerance: float) -> None:
    """Assert that all rows got the same to their ends, with a draft or without."""
    lengths = {row: TOTAL - 9 - 4 * row for row in range(ROWS)}
    assert {row: len(tokens) for row, tokens in expected.tokens.items()} == lengths
    assert found.tokens == expected.tokens
    assert found.accepted == GUESSED
    assert [len(each) for each in expected.logprobs.values()] == [lengths[0]]
    for got, wanted in zip(found.logprobs[0], expected.logprobs[0], strict=True):
        np.testing.assert_allclose(got.logprob, wanted.logprob, atol=tolerance)
        np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, atol=tolerance)
