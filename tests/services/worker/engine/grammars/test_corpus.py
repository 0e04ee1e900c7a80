"""Whatever a model's logits are, what it samples under a schema is valid against it."""

from __future__ import annotations

import json

import jsonschema
import pytest

from common.json_schemas import check_json_schema
from services.worker.grammars.template import warnings_refused
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import bound_row, finished, library, schema_grammar, text_of

CHECKER = jsonschema.FormatChecker(
    # The checker's own time is an older draft's, without an offset.
    [name for name in jsonschema.FormatChecker.checkers if name not in ("time", "regex")]
)


def test_the_corpus_is_large_and_whole() -> None:
    assert len(CORPUS) >= 60
    for schema in CORPUS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        check_json_schema(schema, "response_format")


@pytest.mark.parametrize("name", CORPUS)
def test_outputs_are_valid(name: str) -> None:
    validator = jsonschema.Draft202012Validator(CORPUS[name], format_checker=CHECKER)
    grammar = schema_grammar(CORPUS[name])
    with warnings_refused():
        library().matcher(grammar)
    for ids in finished([bound_row(row, grammar, seed=row) for row in range(3)]):
        validator.validate(json.loads(text_of(ids)))
