"""What grammars force on rows is what these would sample, token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.grammars import Grammar, GrammarKind
from common.steps import JumpLimit, RowOpen, StepPlan
from common.types import RowSlot, StepId
from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.execution.synchronous_executor import with_jump_forward
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.grammars.matcher import only_token
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.plans.drafts import following_of
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.table import SamplingTable
from tests.examples import one_in
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import (
    EOS,
    PROMPT,
    VOCABULARY_SIZE,
    bound_row,
    library,
    logits_of,
    schema_grammar,
    text_of,
    vocabulary,
)
from tests.services.worker.engine.scenario import chunk, ids

if TYPE_CHECKING:
    from common.steps import StepResult
    from services.worker.engine.execution.interface import Checkpoint
    from services.worker.engine.grammars.matcher import Matcher
    from services.worker.engine.plans.passes import ForwardPass

PAGES = 26
LENGTH = 300
KEYS: dict[str, object] = {
    "type": "object",
    "properties": {
        "first_name": {"const": "Ada"},
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_sunny": {"type": "boolean"},
    },
    "required": ["first_name", "temperature_celsius", "is_sunny"],
    "additionalProperties": False,
}


class MadeUpModel:
    """Samples from logits that depend on a row's seed and on the position alone."""

    def __init__(self, max_rows: int) -> None:
        self.table = SamplingTable(max_rows, VOCABULARY_SIZE, RowMasks(library(), VOCABULARY_SIZE))
        self.passes = 0

    def open(self, opened: RowOpen) -> None:
        self.table.open(opened)

    def step(self, rows: RowStates, forward: ForwardPass, checkpoint: Checkpoint | None = None) -> PassOutput:
        self.passes += 1
        slots = forward.sampled_rows
        logits = [logits_of(int(self.table.seeds[slot]), int(rows.lengths[slot])) for slot in slots]
        made = sample(torch.from_numpy(np.stack(logits)), slots, rows, self.table)
        told = with_jump_forward(made.token_ids[:, None], slots, rows, self.table, rows.jump_room(slots))
        token_ids = told.numpy().astype(np.int32)
        return PassOutput(token_ids[:, 0], forced=following_of(token_ids[:, 1:], slots))


def outputs(opens: list[RowOpen], jump: int, *, steps: int = 1) -> tuple[list[list[int]], int]:
    """Run rows to their ends, which may get `jump` tokens ahead; return their outputs, and the passes that took."""
    model = MadeUpModel(8)
    rows = RowStates(8, 512, page_size=16)
    runner = SynchronousRunner(rows, PlanLimits(VOCABULARY_SIZE, 8 * PAGES, 256), model)
    granted = tuple(
        replace(opened, pages=ids(range(index * PAGES, (index + 1) * PAGES))) for index, opened in enumerate(opens)
    )
    results: list[StepResult] = []
    prefills = tuple(chunk(opened.row, 0, opened.token_ids.size) for opened in opens)
    plan = StepPlan(StepId(1), opens=granted, prefills=prefills, steps=1)
    while True:
        runner.run(plan, results.append)
        if not rows.decoding().size:
            break
        limits = {
            opened.row: min(int(rows.lengths[opened.row]) + jump + steps, opened.max_total_tokens) for opened in opens
        }
        jumps = tuple(JumpLimit(RowSlot(row), most) for row, most in limits.items()) if jump else ()
        plan = StepPlan(StepId(len(results) + 1), steps=steps, jumps=jumps)
    told: dict[int, list[int]] = {opened.row: [] for opened in opens}
    for result in results:
        for row, token in (
            *zip(result.rows, result.token_ids, strict=True),
            *zip(result.forced_rows, result.forced_token_ids, strict=True),
        ):
            told[int(row)].append(int(token))
    for opened in opens:
        assert told[opened.row] == rows.token_ids[opened.row, opened.token_ids.size : rows.lengths[opened.row]].tolist()
    return [told[opened.row] for opened in opens], model.passes


@pytest.mark.parametrize("name", one_in(4, CORPUS))
def test_outputs_are_the_same_with_jumps_as_without(name: str) -> None:
    grammar = schema_grammar(CORPUS[name])
    opens = [bound_row(0, grammar, seed=5, length=LENGTH), bound_row(3, grammar, seed=6, length=LENGTH)]
    without, most = outputs(opens, 0)
    jumping, fewer = outputs(opens, 16, steps=3)
    assert jumping == without
    assert fewer <= most


def test_a_schema_of_many_keys_takes_few_passes() -> None:
    opens = [bound_row(0, schema_grammar(KEYS), seed=1)]
    [without], most = outputs(opens, 0)
    [jumping], fewer = outputs(opens, 16)
    assert jumping == without
    assert json.loads(text_of(without[:-1]))["first_name"] == "Ada"
    assert fewer <= 6 < most / 3


@pytest.mark.parametrize("kept", [1, 2, 5, 9])
def test_a_row_restarted_within_a_jump_gives_the_same_continuation(kept: int) -> None:
    grammar = schema_grammar(KEYS)
    [[*whole]], _ = outputs([bound_row(0, grammar, seed=1)], 16)
    [rest], _ = outputs([bound_row(2, grammar, seed=1, more=whole[:kept])], 4)
    assert rest == whole[kept:]


def matcher_of(grammar: Grammar) -> Matcher:
    matcher = library().matcher(grammar)
    assert matcher is not None
    return matcher


def piece(token_id: int | None) -> bytes | None:
    return None if token_id is None else vocabulary().all_pieces.data[token_id]


def test_certain_text_is_written_in_its_longest_tokens() -> None:
    matcher = matcher_of(Grammar(GrammarKind.REGEX, "temperature: [0-9]", "regex"))
    written = []
    while (token_id := matcher.spelling(matcher.mask())) is not None:
        assert matcher.accept(token_id)
        written.append(piece(token_id))
    assert written[0] == b"temperature"
    assert b"".join(part for part in written if part) == b"temperature: "
    assert only_token(matcher.mask()) is None


def test_nothing_is_forced_if_a_token_may_extend_beyond_the_certain_text() -> None:
    # "the" may become "then" or "there": whoever wants one of those has tokens that say so.
    matcher = matcher_of(Grammar(GrammarKind.REGEX, "the(n|re)", "regex"))
    assert matcher.spelling(matcher.mask()) is None
    assert only_token(matcher.mask()) is None


def test_nothing_is_forced_where_the_output_may_end() -> None:
    matcher = matcher_of(Grammar(GrammarKind.REGEX, "q(abcdef)?", "regex"))
    assert matcher.accept(vocabulary().plain_pieces.data.index(b"q"))
    assert only_token(matcher.mask()) is None
    assert matcher.spelling(matcher.mask()) is None


def test_after_a_complete_output_only_eos_is_allowed() -> None:
    matcher = matcher_of(Grammar(GrammarKind.REGEX, "5", "regex"))
    five = only_token(matcher.mask())
    assert piece(five) == b"5"
    assert matcher.accept(five or 0)
    assert only_token(matcher.mask()) == EOS


def test_jumps_handle_characters_of_several_tokens() -> None:
    [[*output]], _ = outputs([bound_row(0, Grammar(GrammarKind.REGEX, "(🙂){3}🦜🦜", "regex"), seed=1)], 16)
    assert text_of(output[:-1]) == "🙂🙂🙂🦜🦜"
    assert len(PROMPT) == 3


def test_a_banned_forced_token_is_replaced_by_another_tokenization() -> None:
    grammar = Grammar(GrammarKind.REGEX, "temperature[0-9]", "regex")
    opened = bound_row(0, grammar, seed=1)
    [[first, *_]], _ = outputs([opened], 16)
    assert piece(first) == b"temperature"
    banning = replace(opened, sampling=replace(opened.sampling, banned_sequences=((first,),)))
    [[*output]], _ = outputs([banning], 16)
    assert first not in output
    assert text_of(output[:-1])[:-1] == "temperature"


def test_a_tokenization_that_would_end_the_row_is_not_used() -> None:
    grammar = Grammar(GrammarKind.REGEX, "temperature[0-9]", "regex")
    opened = bound_row(0, grammar, seed=1)
    [[first, *_]], _ = outputs([opened], 16)
    [[*output]], _ = outputs([replace(opened, stop_token_ids=(EOS, first), min_new_tokens=20)], 16)
    assert first not in output
    assert text_of(output[:-1])[:-1] == "temperature"
