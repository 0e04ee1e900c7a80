from __future__ import annotations

import json
from typing import Any

import pytest

from common.grammars import Grammar, GrammarKind
from common.models import resolve_model
from common.notations.formats import marked, regex, sequence, text_with_calls
from common.tokenization import load_text_model
from tests.services.worker.engine.grammars.outputs import SOURCE, library, schema_grammar


def is_allowed(grammar: Grammar, text: str) -> bool:
    found = library().matcher(grammar)
    assert found is not None
    matcher = found._matcher
    return bool(matcher.accept_string(text) and matcher.is_completed())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date"}, '"2021-02-28"', '"2021-02-30"'),
        ({"type": "string", "format": "ipv4"}, '"10.0.0.1"', '"10.0.0.256"'),
        ({"oneOf": [{"const": 1}, {"const": "a"}]}, '"a"', '"b"'),
        (
            {"type": "object", "properties": {"on": {"type": "string", "format": "date"}}, "required": ["on"]},
            '{"on": "2021-02-28"}',
            '{"on": "2021-02-29"}',
        ),
    ],
)
def test_a_schema_inside_a_structural_tag_is_enforced_like_a_plain_one(
    schema: dict[str, Any], good: str, bad: str
) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    inside = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), "tools")
    for grammar in (schema_grammar(schema), inside):
        assert is_allowed(grammar, good)
        assert not is_allowed(grammar, bad)


def accepts(format_: dict[str, Any], ids: list[int]) -> bool:
    found = library().matcher(
        Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": format_}), "tools")
    )
    assert found is not None
    return all(found.accept(id_) for id_ in ids) and found._matcher.is_completed()


def test_marks_are_special_tokens_where_the_vocabulary_has_them_and_text_elsewhere() -> None:
    tokenizer = load_text_model(resolve_model(SOURCE.model)).tokenizer
    format_ = sequence(*marked("<repo_name>a<file_sep>"), regex("[0-9]"), *marked("<no_token>"))
    assert accepts(format_, tokenizer.encode("<repo_name>a<file_sep>7<no_token>").ids)
    # The letters of a special token are another text.
    letters = [tokenizer.token_to_id(letter) for letter in "<repo_name>"]
    assert not accepts(format_, [id_ for id_ in letters if id_ is not None])
    assert accepts(sequence(*marked("<no_token>")), tokenizer.encode("<no_token>").ids)


@pytest.mark.parametrize(("mark", "other"), [("<repo_name>", "<file_sep>"), ("<calls>", "<other>")])
def test_calls_in_a_text_begin_with_their_mark(mark: str, other: str) -> None:
    tokenizer = load_text_model(resolve_model(SOURCE.model)).tokenizer
    for repeats in (True, False):
        format_ = text_with_calls(mark, sequence(*marked("ab")), excludes=[other], repeats=repeats)
        assert accepts(format_, tokenizer.encode(f"Well, {mark}ab").ids)
        assert accepts(format_, tokenizer.encode("Well").ids)
        assert not accepts(format_, tokenizer.encode(f"Well, {mark}ac").ids)
        assert not accepts(format_, tokenizer.encode(other).ids)
        assert accepts(format_, tokenizer.encode(f"Well, {mark}ab and {mark}ab").ids) is repeats
