"""The kept answers are what `transformers` says today.

Loading its model takes half a minute, so all but the first test are left to `make soak`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.conftest import require_model
from tests.e2e.greedy.checks import TIMEOUT_S
from tests.e2e.greedy.prompts import PROMPTS, Prompt
from tests.e2e.greedy.reference import MINIMUM_MARGIN, Reference, ReferenceModel, read_golden

pytestmark = pytest.mark.timeout(TIMEOUT_S)

REFERENCES = {reference.name: reference for reference in read_golden()}


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    require_model()
    return ReferenceModel()


def without_margin(reference: Reference) -> Reference:
    """Return the facts that must be equal on two machines."""
    return replace(reference, margin=0.0)


def test_every_prompt_has_an_answer_that_rounding_cannot_change() -> None:
    assert list(REFERENCES) == [prompt.name for prompt in PROMPTS]
    assert min(reference.margin for reference in REFERENCES.values()) >= MINIMUM_MARGIN


@pytest.mark.soak
def test_prompts_encode_to_the_kept_ids(model: ReferenceModel) -> None:
    assert {prompt.name: tuple(model.encode(prompt)) for prompt in PROMPTS} == {
        name: reference.prompt_ids for name, reference in REFERENCES.items()
    }


@pytest.mark.soak
def test_every_kept_token_is_the_most_likely_one_after_those_before_it(model: ReferenceModel) -> None:
    assert {name: model.predict(reference) for name, reference in REFERENCES.items()} == {
        name: reference.output_ids for name, reference in REFERENCES.items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_generate_gives_every_kept_answer(model: ReferenceModel, prompt: Prompt) -> None:
    again = model.answer(prompt)
    assert without_margin(again) == without_margin(REFERENCES[prompt.name])
    assert again.margin == pytest.approx(REFERENCES[prompt.name].margin, abs=1e-3)
