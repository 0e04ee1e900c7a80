"""Greedy tokens of every kind of model against `transformers`: in chunks, in batches, and over several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import (
    FAMILIES,
    SHARED,
    VOCABULARY,
    reference_logits,
    save_family,
    save_model,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

pytestmark = pytest.mark.extended

BACKENDS = ("torch", "compiled")
# Longer and shorter than the families' windows of 20 tokens, and one that is a single token.
PROMPTS = [random_ids(count, VOCABULARY, seed=count) for count in (1, 13, 45, 64)]
CHUNKS = (7, 28)
NEW_TOKENS = 8


def continued(driver: Driver) -> list[list[int]]:
    """Prefill the last prompt in chunks, the others beside its end, and decode all rows together."""
    rows = [driver.open(len(prompt) + NEW_TOKENS) for prompt in PROMPTS]
    for start, end in zip((0, *CHUNKS), CHUNKS, strict=False):
        driver.run([(rows[-1], PROMPTS[-1][start:end])])
    work = [*PROMPTS[:-1], PROMPTS[-1][CHUNKS[-1] :]]
    generated: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(NEW_TOKENS):
        logits = driver.run(list(zip(rows, work, strict=True)))
        chosen = logits.argmax(dim=-1) if logits.shape[0] else torch.zeros(len(rows), dtype=torch.int64)
        work = [[token] for token in driver.runner.broadcast_tokens(chosen).tolist()]
        for tokens, new in zip(generated, work, strict=True):
            tokens += new
    return generated


def as_rank(rank: int, world_size: int, rendezvous: str, model: str, backend: str) -> list[list[int]]:
    runner = load(model, backend=backend, rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        return continued(Driver(runner))
    finally:
        runner.close()


def check_greedy(directory: Path, generated: list[list[int]]) -> None:
    """Every token is the likeliest one after those before it, in `transformers`' eyes."""
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        logits = reference_logits(directory, prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_chunks_and_batches_continue_as_transformers_does(family: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    for backend in BACKENDS:
        check_greedy(tmp_path, continued(Driver(load(tmp_path, backend=backend))))


@pytest.mark.parametrize(("family", "backend"), SHARED.items())
def test_two_ranks_continue_as_transformers_does(ranks: Ranks, family: str, backend: str, tmp_path: Path) -> None:
    save_family(tmp_path, family)
    first, second = ranks.run(as_rank, 2, str(tmp_path), backend)
    assert first == second
    check_greedy(tmp_path, first)


@pytest.mark.parametrize(("context", "tokens"), [(32, 20), (512, 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_longrope_is_that_of_the_longest_context(backend: str, context: int, tokens: int, tmp_path: Path) -> None:
    name, options = FAMILIES["phi4"]
    save_model(tmp_path, name, {**options, "original_max_position_embeddings": 32})
    runner = load(tmp_path, backend=backend, max_context=context)
    assert runner.capacity.max_context == context
    prompt = random_ids(tokens, VOCABULARY)
    driver = Driver(runner)
    got = driver.run([(driver.open(tokens), prompt)], all_tokens=True)
    # transformers takes the long factors for prompts beyond the original context.
    assert torch.allclose(got, reference_logits(tmp_path, prompt), atol=1e-3, rtol=1e-3)


def test_models_of_other_frequencies_do_not_share_a_cache(tmp_path: Path) -> None:
    name, options = FAMILIES["phi4"]
    save_model(tmp_path, name, {**options, "original_max_position_embeddings": 32})
    prints = {load(tmp_path, max_context=context).capacity.fingerprint for context in (16, 32, 64, 512)}
    assert len(prints) == 2
