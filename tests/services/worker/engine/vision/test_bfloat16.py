"""Images in bfloat16, with heads as wide as kernels of GPUs take them, against the references in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.worker.engine.execution.torch_model import TorchModel
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.vision.encoder import EncoderImage
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.vision.driving import Session, engine_of
from tests.services.worker.engine.vision.models import MODELS, VOCABULARY, expected, picture, prompt, save_as

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine
    from tests.services.worker.engine.vision.models import Prompt

pytestmark = pytest.mark.extended

FAMILY = "qwen2.5-vl"
# Of the largest log probabilities, and of embeddings relative to their norm. Another picture changes far more.
LOGPROB_TOLERANCE, EMBEDDING_TOLERANCE = 0.1, 0.03
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
FORCED = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = MODELS[FAMILY]
    text, vision = options["text_config"], options["vision_config"]
    wide: dict[str, Any] = {
        **options,
        "text_config": {
            **text, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.06,
            "rope_parameters": {**text["rope_parameters"], "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            **vision, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256,
            "initializer_range": 0.06,
        },
    }  # fmt: skip
    return save_as(tmp_path_factory.mktemp("wide"), name, wide)


def engine_on(directory: Path, device: str, dtype: str = "bfloat16") -> ModelEngine:
    return engine_of(directory, "auto" if device == "cuda" else "torch", device=device, dtype=dtype)


def runner_of(engine: ModelEngine) -> ModelRunner:
    assert isinstance(engine._model, TorchModel)
    assert isinstance(engine._model.runner, ModelRunner)
    return engine._model.runner


def asked(seed: int) -> Prompt:
    """Return a prompt with two pictures that `seed` chooses."""
    first, second = picture(FAMILY, 5, 3, seed=seed), picture(FAMILY, 2, 2, seed=seed + 10)
    return prompt(random_ids(9, VOCABULARY - 5, 1), first, random_ids(7, VOCABULARY - 5, 2), second, [3, 44, 8])


def first_logprobs(engine: ModelEngine, prompts: list[Prompt], borders: tuple[int, ...]) -> list[torch.Tensor]:
    """Return log probabilities [vocabulary] of the first token after each prompt; 0 where they are not reported."""
    made = []
    for answer in Session(engine).answer(prompts, borders):
        logprobs = torch.zeros(VOCABULARY)
        logprobs[list(answer.top_ids[0])] = torch.tensor(answer.top_logprobs[0])
        made.append(logprobs)
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("borders", [(), (11, 20, 26)], ids=["whole", "in chunks"])
def test_log_probabilities_are_near_those_of_transformers(
    directory: Path, device: str, borders: tuple[int, ...]
) -> None:
    # Each row has one more token of the reference's answer in its prompt, so that a tie cannot lead them apart.
    tokens, logits = expected(directory, asked(1), FORCED)
    rows = [replace(asked(1), ids=(*asked(1).ids, *tokens[:known])) for known in range(FORCED)]
    found = first_logprobs(engine_on(directory, device), rows, borders)
    reference = torch.log_softmax(logits, dim=-1)
    for own, right in zip(found, reference, strict=True):
        reported = own.nonzero().flatten()
        assert len(reported) > 3
        assert (own - right)[reported].abs().max() < LOGPROB_TOLERANCE
    _, others = expected(directory, asked(2), 1)
    apart = (torch.log_softmax(others, dim=-1)[0] - reference[0])[found[0].nonzero().flatten()].abs().max()
    assert apart > 3 * LOGPROB_TOLERANCE, "the pictures matter"


@pytest.mark.parametrize("device", DEVICES)
def test_embeddings_are_near_those_in_float32(directory: Path, device: str) -> None:
    given = [image for seed in (1, 2) for image in asked(seed).images]
    images = [EncoderImage(image.pixels, image.grid) for image in given if image.pixels is not None]
    narrow_ones, wide_ones = (
        runner_of(engine).encode_images(images)
        for engine in (engine_on(directory, device), engine_on(directory, "cpu", "float32"))
    )
    pairs = list(zip(narrow_ones, wide_ones, strict=True))
    assert len(pairs) == 4
    for narrow, wide in pairs:
        assert narrow.dtype == torch.bfloat16
        assert (narrow.cpu().float() - wide).norm() < EMBEDDING_TOLERANCE * wide.norm()
