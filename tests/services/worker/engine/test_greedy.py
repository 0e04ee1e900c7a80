"""The bundled model's greedy tokens, at every width of batch, against those of `transformers` in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.e2e.greedy.reference import OUTPUT_TOKENS, Reference, read_golden
from tests.services.worker.engine.driving import Driver, load

if TYPE_CHECKING:
    from services.worker.engine.model_runner import ModelRunner
    from tests.services.worker.engine.parallel.ranks import Ranks

BUNDLED = "smollm2-135m-instruct"
REFERENCES = read_golden()
# Longer ones take seconds; the end-to-end tests have them.
SHORT = [reference for reference in REFERENCES if len(reference.prompt_ids) <= 300]
ALONE = ("one-token-word", "chinese-capitals", "emoji-flags", "chat-colors", "length-300")


def chosen(*names: str) -> list[Reference]:
    found = [reference for reference in REFERENCES if reference.name in names]
    assert len(found) == len(names)
    return found


def continue_all(runner: ModelRunner, references: list[Reference]) -> list[list[int]]:
    """Prefill all prompts in one pass and decode all rows together, whatever ends."""
    driver = Driver(runner)
    # Rows with a single token come first in a batch.
    order = sorted(range(len(references)), key=lambda i: len(references[i].prompt_ids))
    rows = {i: driver.open(len(references[i].prompt_ids) + OUTPUT_TOKENS) for i in order}
    work = {i: list(references[i].prompt_ids) for i in order}
    generated: dict[int, list[int]] = {i: [] for i in order}
    for _ in range(OUTPUT_TOKENS):
        logits = driver.run([(rows[i], work[i]) for i in order])
        for i, token in zip(order, logits.argmax(dim=-1).tolist(), strict=True):
            work[i] = [token]
            generated[i].append(token)
    return [generated[i] for i in range(len(references))]


def continue_as_rank(rank: int, world_size: int, rendezvous: str, names: tuple[str, ...]) -> list[list[int]]:
    """Generate as one of several ranks; ranks other than 0 are told the tokens."""
    runner = load(BUNDLED, threads=1, rank=rank, world_size=world_size, rendezvous=rendezvous, device_pages=40)
    driver = Driver(runner)
    results = []
    for reference in chosen(*names):
        row = driver.open(len(reference.prompt_ids) + len(reference.output_ids))
        generated: list[int] = []
        work = list(reference.prompt_ids)
        for _ in reference.output_ids:
            logits = driver.run([(row, work)])
            token = logits.argmax(dim=-1) if rank == 0 else torch.zeros(1, dtype=torch.int64)
            work = [int(runner.broadcast_tokens(token))]
            generated += work
        results.append(generated)
    runner.close()
    return results


def assert_equal(references: list[Reference], generated: list[list[int]]) -> None:
    for reference, tokens in zip(references, generated, strict=True):
        assert tokens[: len(reference.output_ids)] == list(reference.output_ids), reference.name


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load(BUNDLED, threads=0, device_pages=250)


def test_all_rows_of_one_batch_continue_as_transformers_does(runner: ModelRunner) -> None:
    assert len(SHORT) >= 20
    assert_equal(SHORT, continue_all(runner, SHORT))


@pytest.mark.parametrize("reference", chosen(*ALONE), ids=lambda reference: reference.name)
def test_a_row_alone_and_in_chunks_continues_as_transformers_does(runner: ModelRunner, reference: Reference) -> None:
    prompt, middle = list(reference.prompt_ids), len(reference.prompt_ids) // 3
    chunks = [middle, middle + 1] if middle > 1 else []
    assert_equal([reference], [Driver(runner).generate(prompt, len(reference.output_ids), chunks=chunks)])


@pytest.mark.slow
@pytest.mark.extended
def test_plain_torch_continues_as_transformers_does() -> None:
    references = chosen("english-capital", "one-token-code", "chinese-numbers", "chat-sum")
    assert_equal(references, continue_all(load(BUNDLED, backend="torch", threads=0), references))


@pytest.mark.slow
@pytest.mark.extended
def test_two_ranks_continue_as_transformers_does(ranks: Ranks) -> None:
    names = ("english-capital", "emoji-faces", "chat-sum")
    of_ranks = ranks.run(continue_as_rank, 2, names)
    assert len(of_ranks) == 2
    for generated in of_ranks:
        assert_equal(chosen(*names), generated)
