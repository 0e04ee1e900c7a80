"""The bundled model under the corpus's schemas: what it writes does not depend on jumping forward."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from common.types import SamplingParams
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.services.worker.engine.grammars.outputs import EOS, schema_grammar, text_of
from tests.services.worker.engine.grammars.writing import ROWS, load, outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.worker.engine.execution.engine import ModelEngine

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    made = load(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("part", range(0, len(CORPUS), ROWS))
def test_the_model_writes_the_same_with_jumps_as_without(engine: ModelEngine, part: int, temperature: float) -> None:
    grammars = [schema_grammar(schema) for schema in list(CORPUS.values())[part : part + ROWS]]
    sampling = SamplingParams(temperature=temperature, seed=17)
    without, most = outputs(engine, grammars, sampling, 0)
    jumping, fewer = outputs(engine, grammars, sampling, 16)
    assert jumping == without
    assert fewer <= most
    for ids in jumping:
        if ids[-1] == EOS:
            json.loads(text_of(ids[:-1]))
