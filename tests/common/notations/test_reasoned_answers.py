"""Grammars of reasoned answers, and budgets that end the reasoning."""

from __future__ import annotations

import json
import re

import pytest

from common.grammars import Grammar, GrammarKind
from common.models import resolve_model
from common.notations.formats import ANY_TOKENS, regex
from common.notations.harmony import HarmonyParser
from common.notations.pieces import Reasoning
from common.notations.reasoning import MARKS, ReasoningParser, answered, reasoned
from common.tokenization import load_text_model
from common.types import ReasoningStyle
from tests.common.notations.cases import fed, text_in
from tests.services.worker.engine.grammars.outputs import SOURCE, bound_row, finished, text_of

STYLES = list(ReasoningStyle)


def outputs(style: ReasoningStyle, *, is_open: bool, budget: int | None, count: int = 2) -> list[str]:
    format_ = reasoned(style, answered(style, regex("[0-9]{2}")), is_open=is_open, budget=budget)
    text = json.dumps({"type": "structural_tag", "format": format_})
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, text, "thinking_token_budget")
    return [text_of(ids) for ids in finished([bound_row(row, grammar, seed=row, length=60) for row in range(count)])]


def read(style: ReasoningStyle, output: str, *, is_open: bool) -> tuple[str, str]:
    """Return the reasoning and the text of an output."""
    is_harmony = style is ReasoningStyle.HARMONY
    parser = HarmonyParser({}) if is_harmony else ReasoningParser(MARKS[style], begins_inside=is_open)
    pieces = fed(parser, [output])
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)), text_in(pieces)


# Harmony's prompts open no message.
@pytest.mark.parametrize(
    ("style", "is_open"),
    [*((style, False) for style in STYLES), (ReasoningStyle.THINK, True), (ReasoningStyle.SEED, True)],
)
def test_a_budget_ends_the_reasoning_and_the_answer_follows(style: ReasoningStyle, is_open: bool) -> None:
    encoder = load_text_model(resolve_model(SOURCE.model)).tokenizer
    budget = 12
    lengths = []
    for output in outputs(style, is_open=is_open, budget=budget):
        thought, words = read(style, output, is_open=is_open)
        assert re.fullmatch("[0-9]{2}", words.strip()), output
        lengths.append(len(encoder.encode(thought).ids))
    # Other tokens than the encoder's may write the same text.
    assert 0 < max(lengths) <= 2 * budget


def test_without_a_budget_reasoning_is_optional() -> None:
    style = ReasoningStyle.THINK
    answers = [read(style, output, is_open=False) for output in outputs(style, is_open=False, budget=None, count=6)]
    assert any(re.fullmatch("[0-9]{2}", words.strip()) and not thought for thought, words in answers)


@pytest.mark.parametrize("style", [ReasoningStyle.THINK, ReasoningStyle.HARMONY])
def test_a_budget_of_nothing_leaves_the_answer_alone(style: ReasoningStyle) -> None:
    is_open = style is not ReasoningStyle.HARMONY
    for output in outputs(style, is_open=is_open, budget=0, count=2):
        thought, words = read(style, output, is_open=is_open)
        assert not thought
        assert re.fullmatch("[0-9]{2}", words.strip())


def test_after_the_reasoning_all_tokens_are_allowed() -> None:
    format_ = reasoned(ReasoningStyle.THINK, ANY_TOKENS, is_open=True, budget=4)
    assert format_["elements"][-1] == ANY_TOKENS
