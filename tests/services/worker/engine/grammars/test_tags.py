from __future__ import annotations

import json
from typing import Any

import pytest

from common.grammars import Grammar, GrammarKind
from tests.services.worker.engine.grammars.outputs import library, schema_grammar


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
