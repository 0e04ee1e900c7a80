"""The kept answers are what `transformers` says today."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.conftest import require_model
from tests.e2e.greedy.prompts import PROMPTS, Prompt
from tests.e2e.greedy.reference import MINIMUM_MARGIN, Reference, ReferenceModel, read_golden

pytestmark = pytest.mark.timeout(400)

REFERENCES = {reference.name: reference for reference in read_golden()}


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    require_model()
    return ReferenceModel()


def without_margin(reference: Reference) -> Reference:
    """Return what two machines must agree on."""
    return replace(reference, margin=0.0)


def test_every_prompt_has_an_answer_that_rounding_cannot_change() -> None:
    assert list(REFERENCES) == [prompt.name for prompt in PROMPTS]
    assert min(reference.margin for reference in REFERENCES.values()) >= MINIMUM_MARGIN


def test_prompts_encode_to_the_kept_ids(model: ReferenceModel) -> None:
    assert {prompt.name: tuple(model.encode(prompt)) for prompt in PROMPTS} == {
        name: reference.prompt_ids for name, reference in REFERENCES.items()
    }


def test_every_kept_token_is_the_most_likely_one_after_those_before_it(model: ReferenceModel) -> None:
    assert {name: model.predict(reference) for name, reference in REFERENCES.items()} == {
        name: reference.output_ids for name, reference in REFERENCES.items()
    }


@pytest.mark.parametrize("name", ["english-capital", "chinese-numbers", "chat-sum"])
def test_generate_gives_the_kept_answer(model: ReferenceModel, name: str) -> None:
    prompt = next(prompt for prompt in PROMPTS if prompt.name == name)
    again = model.answer(prompt)
    assert without_margin(again) == without_margin(REFERENCES[name])
    assert again.margin == pytest.approx(REFERENCES[name].margin, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.name)
def test_generate_gives_every_kept_answer(
    model: ReferenceModel, prompt: Prompt, request: pytest.FixtureRequest
) -> None:
    # A minute or more for what two tests above show faster; with a new version of transformers: `pytest -m slow …`.
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("runs only where slow tests are chosen: -m slow")
    assert without_margin(model.answer(prompt)) == without_margin(REFERENCES[prompt.name])
