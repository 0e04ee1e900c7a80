"""Models that see images, in bfloat16 as two ranks: the same log probabilities as of one, picture by picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.types import SamplingParams
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.parallel.ranks import Ranks
from tests.services.worker.engine.vision.driving import NEW_TOKENS, Session, engine_of
from tests.services.worker.engine.vision.models import MODELS, TILED, VOCABULARY, picture, prompt, save_as

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.services.worker.engine.vision.models import Prompt

pytestmark = pytest.mark.extended

RANKS = 2
# Heads as wide as the programs of GPUs take them, and weights so small that roundings decide nothing.
TEXT: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.06}
VISION: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.06}
WIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "idefics3": ({}, {"num_attention_heads": 2}),
    "qwen2.5-vl": ({"mrope_section": [8, 12, 12]}, {"num_heads": 2, "out_hidden_size": 256}),
    "qwen3-vl": ({"mrope_section": [12, 10, 10]}, {"num_heads": 2, "out_hidden_size": 256}),
    "mistral3": ({}, {"num_attention_heads": 2, "head_dim": 64}),
    "gemma3": ({"head_dim": 256, "query_pre_attn_scalar": 256}, {"num_attention_heads": 2}),
}
# Relative to the spread of log probabilities. Another picture changes them by at least `DIFFERENCE`.
TOLERANCE, DIFFERENCE = 0.03, 0.2
# Of the pictures; prompts are the same.
SEEDS = 1, 5
# The only token that rows may choose, so that a tie does not lead them apart. All log probabilities are reported.
FORCED = SamplingParams(
    temperature=0, top_logprobs=0, logprob_token_ids=tuple(range(VOCABULARY)), allowed_token_ids=(11,)
)


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have not met yet: on GPUs they can only once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


def save_wide(directory: Path, family: str) -> None:
    name, options = MODELS[family]
    its_text, its_vision = WIDE[family]
    text = {**options["text_config"], **TEXT, **its_text}
    if sections := text.pop("mrope_section", None):
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": sections}
    save_as(
        directory,
        name,
        {**options, "text_config": text, "vision_config": {**options["vision_config"], **VISION, **its_vision}},
    )


def asked(family: str, seed: int) -> list[Prompt]:
    """Return prompts with two pictures that `seed` chooses, with one of these, and with none."""
    sizes = ((1, 2), (1, 1)) if family in TILED else ((5, 3), (2, 2))
    first, second = (picture(family, *size, seed=seed + i) for i, size in enumerate(sizes))
    text = [random_ids(count, VOCABULARY - 5, i) for i, count in enumerate((9, 7, 5, 40))]
    return [prompt(text[0], first, text[1], second, text[2]), prompt(text[1], second, text[0]), prompt(text[3])]


def border(family: str) -> int:
    """Return a token within the first picture of the first prompt at which a chunk may end."""
    first = asked(family, SEEDS[0])[0]
    return first.border(first.images[0].offset + first.images[0].length // 2)


def answer(
    rank: int, world_size: int, rendezvous: str, model: str, family: str, device: str
) -> list[list[torch.Tensor]]:
    """Return log probabilities [new tokens, vocabulary] after each prompt of each seed; none of other ranks."""
    backend = "auto" if device == "cuda" else "torch"
    engine = engine_of(
        model, backend, rank=rank, world_size=world_size, rendezvous=rendezvous, device=device, dtype="bfloat16"
    )
    session, borders = Session(engine, FORCED), (border(family),)
    try:
        answers = [session.answer(asked(family, seed), borders) for seed in SEEDS]
    finally:
        engine.close()
    return [[torch.tensor(each.asked) for each in of_seed] for of_seed in answers] if rank == 0 else []


def check(ranks: Ranks, directory: Path, family: str, device: str) -> None:
    save_wide(directory, family)
    cut, first = border(family), asked(family, SEEDS[0])[0]
    assert first.images[0].offset < cut < first.images[1].offset, "chunks cut the first picture"
    found, nothing = ranks.run(answer, RANKS, str(directory), family, device)
    assert nothing == []
    alone = answer(0, 1, "", str(directory), family, device)
    spreads = [(one - one.mean(-1, keepdim=True)).norm() for one in alone[0]]
    for of_seed, its_alone in zip(found, alone, strict=True):
        for both, one, spread in zip(of_seed, its_alone, spreads, strict=True):
            assert both.shape == (NEW_TOKENS, VOCABULARY)
            assert (both - one).norm() < TOLERANCE * spread
    # Only the last prompt has no picture.
    differences = [(other - one).norm() / spread for one, other, spread in zip(*alone, spreads, strict=True)]
    assert [float(difference) > DIFFERENCE for difference in differences] == [True, True, False]


@pytest.mark.parametrize("family", WIDE)
def test_two_ranks_on_cpus_see_as_one_does(ranks: Ranks, family: str, tmp_path: Path) -> None:
    check(ranks, tmp_path, family, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", WIDE)
def test_two_ranks_on_gpus_see_as_one_does(fresh_ranks: Ranks, family: str, tmp_path: Path) -> None:
    check(fresh_ranks, tmp_path, family, "cuda")
