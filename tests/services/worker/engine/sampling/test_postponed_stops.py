"""Minimum lengths and ignored ends beside a grammar, with the real matcher and the real sampler."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.grammars import Grammar, GrammarKind
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.table import PostponedStops
from tests.services.worker.engine.grammars.outputs import EOS, Rows, bound_row, finished, schema_grammar, text_of

if TYPE_CHECKING:
    from common.steps import RowOpen

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+", "regex")
THREE_DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{3}", "regex")
LIST = schema_grammar({"type": "array", "items": {"type": "integer"}})
SEEDS = range(8)


def row(grammar: Grammar, seed: int, *, minimum: int = 0, length: int = 60, ignores_end: bool = False) -> RowOpen:
    postponed = (EOS,) if ignores_end else ()
    opened = bound_row(0, grammar, seed=seed, length=length)
    return replace(opened, min_new_tokens=minimum, postponed_token_ids=postponed)


@pytest.mark.parametrize("minimum", [1, 5, 20])
def test_an_output_that_its_grammar_can_extend_reaches_its_minimum(minimum: int) -> None:
    lengths = []
    for seed in SEEDS:
        [output] = finished([row(DIGITS, seed, minimum=minimum)])
        assert text_of(output).isdecimal()
        lengths.append(len(output))
    assert min(lengths) == minimum
    assert max(lengths) < 60


def test_a_complete_output_ends_even_below_the_minimum() -> None:
    for seed in SEEDS:
        [output] = finished([row(THREE_DIGITS, seed, minimum=40, ignores_end=True)])
        assert len(text_of(output)) == 3


def test_eos_is_postponed_only_until_the_document_is_complete() -> None:
    for seed in SEEDS:
        [output] = finished([row(LIST, seed, minimum=30, length=400)])
        assert isinstance(json.loads(text_of(output)), list)


def test_an_ignored_end_leaves_the_length() -> None:
    for seed in SEEDS:
        [output] = finished([row(DIGITS, seed, ignores_end=True)])
        assert len(output) == 60


def test_stop_ids_apply_even_if_eos_is_ignored() -> None:
    [whole] = finished([row(DIGITS, 1, ignores_end=True)])
    opened = replace(row(DIGITS, 1, ignores_end=True), stop_token_ids=(whole[7], EOS))
    [output] = finished([opened])
    assert output == whole[: whole.index(whole[7]) + 1]


def test_stop_ids_count_from_the_minimum_on() -> None:
    nine = finished([row(Grammar(GrammarKind.REGEX, "9", "regex"), 1)])[0][0]
    only_nines = Grammar(GrammarKind.REGEX, "9{30}", "regex")
    # Nothing else may come, so the first one ends it.
    [output] = finished([replace(row(only_nines, 1, minimum=10), stop_token_ids=(nine, EOS))])
    assert output == [nine]
    for seed in SEEDS:
        [output] = finished([replace(row(DIGITS, seed, minimum=10), stop_token_ids=(nine, EOS))])
        assert nine not in output[:10]


def test_equal_after_a_retraction() -> None:
    opened = row(DIGITS, 3, minimum=20)
    [whole] = finished([opened])
    rows = Rows([replace(opened, token_ids=np.append(opened.token_ids, np.array(whole[:9], np.int32)))])
    again = rows.running[0]
    while rows.running:
        rows.step()
    assert rows.output(again) == whole


def test_a_slot_forgets_its_last_tenant() -> None:
    table, rows = PostponedStops(64), RowStates(1, 512, 16)
    opened = replace(row(DIGITS, 1, minimum=5), stop_token_ids=(1, 33, 34, 900))
    mask = np.full((1, 2), -1, np.int32)
    table.open(opened)
    rows.open(opened)
    table.mask(mask, np.array([0]), rows)
    assert mask.view(np.uint32).tolist() == [[0xFFFFFFFD, 0xFFFFFFF9]]
    table.open(row(DIGITS, 1))
    mask.fill(-1)
    table.mask(mask, np.array([0]), rows)
    assert mask.tolist() == [[-1, -1]]
