"""Rows with adapters that decode together against PEFT: mixed ranks, slots that are filled again, sleep, two ranks.

On a GPU they decode in CUDA graphs, and what bfloat16 costs is allowed for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import AdapterLoad, Draft, EngineSpec, SleepLevel, SleepPart, StepPlan
from common.types import AdapterSlot, RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.adapters.peft_adapters import (
    ATTENTION,
    EVERYTHING,
    FEED_FORWARD,
    peft_logits,
    save_adapter,
)
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.execution.test_families import save_own
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.services.worker.engine.parallel.ranks import Ranks, can_capture, gpu_of
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import StepResult

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
NEW_TOKENS = 12
# Of the spread of logits: what bfloat16 may cost.
TOLERANCE = 0.1
PROMPTS = [random_ids(count, VOCABULARY, seed=count) for count in (5, 9, 14, 20, 33)]


needs_exact_sums = pytest.mark.skipif(
    torch.cuda.is_available(), reason="in bfloat16 a pass of other sizes may choose another of two likely tokens"
)


def nothing(*_: object) -> None: ...


class Engine:
    """A model with four slots, and a stream of plans."""

    def __init__(self, model: Path, *, rank: int = 0, world_size: int = 1, rendezvous: str = "") -> None:
        is_captured = world_size == 1 or can_capture()
        options = RunnerOptions(device_index=gpu_of(rank), threads=1, graphs=is_captured)
        self.engine = torch_engine(lambda spec, report: load_decoder(spec, report, options))
        spec = EngineSpec(
            str(model), dtype=DTYPE, max_rows=8, max_context=256, max_step_tokens=256, page_size=16, device_pages=64,
            adapter_slots=4, adapter_experts=True, rank=rank, world_size=world_size, rendezvous=rendezvous,
        )  # fmt: skip
        self.engine.configure(spec, nothing)
        self._steps = 0

    def generate(self, adapters: list[Path | None], slots: dict[Path, int]) -> list[list[int]]:
        """Continue every prompt with an adapter of its own, greedily, in one batch that decodes together."""
        results: list[StepResult] = []
        self._open(adapters, slots, results)
        self._run(StepPlan(self._step(), steps=NEW_TOKENS), results)
        self.engine.settle(lambda: False)
        self._close(results)
        passes = [tokens_by_row(result) for result in results]
        return [[tokens[row] for tokens in passes if row in tokens][:NEW_TOKENS] for row in range(len(PROMPTS))]

    def generate_with_drafts(
        self, adapters: list[Path | None], slots: dict[Path, int], guesses: list[list[int]]
    ) -> list[list[int]]:
        """Continue as `generate` does, but draft `guesses` of each row's tokens after its first one."""
        results: list[StepResult] = []
        self._open(adapters, slots, results)
        tokens = [row[:1] for row in guesses]
        drafts = tuple(Draft(RowSlot(row), np.array(guess[1:], np.int32)) for row, guess in enumerate(guesses))
        self._run(StepPlan(self._step(), drafts=drafts), results)
        self.engine.settle(lambda: False)
        assert [tokens_by_row(results[0])[row] for row in range(len(PROMPTS))] == [row[0] for row in tokens]
        for result in results[1:]:
            for rows, ids in ((result.rows, result.token_ids), (result.accepted_rows, result.accepted_token_ids)):
                for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                    tokens[row].append(token)
        self._close(results)
        return tokens

    def _open(self, adapters: list[Path | None], slots: dict[Path, int], results: list[StepResult]) -> None:
        store = self.engine.adapters
        assert store is not None
        read = [(AdapterSlot(slot), store.read(path)) for path, slot in slots.items()]
        for _, weights in read:
            store.keep(weights)
        loads = tuple(AdapterLoad(slot, weights.digest) for slot, weights in read)
        opens = tuple(
            replace(
                open_row(row, prompt, range(4 * row, 4 * row + 4), total=len(prompt) + NEW_TOKENS),
                adapter=None if adapter is None else AdapterSlot(slots[adapter]),
            )
            for row, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True))
        )
        chunks = tuple(chunk(row, 0, len(prompt)) for row, prompt in enumerate(PROMPTS))
        self._run(StepPlan(self._step(), opens=opens, prefills=chunks, adapters=loads), results)

    def _close(self, results: list[StepResult]) -> None:
        closes = tuple(RowSlot(row) for row in range(len(PROMPTS)))
        self._run(StepPlan(self._step(), closes=closes), results)
        self.engine.settle(lambda: False)
        assert not [result.error for result in results if result.error]

    def _run(self, plan: StepPlan, results: list[StepResult]) -> None:
        self.engine.execute(plan, results.append)

    def _step(self) -> StepId:
        self._steps += 1
        return StepId(self._steps)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return save_own(directory, "yarn")


def save_adapters(model: Path, directory: Path) -> tuple[Path, Path, Path]:
    layers = (*ATTENTION, *FEED_FORWARD)
    return (
        save_adapter(model, directory / "first", EVERYTHING, r=8, lora_alpha=16),
        save_adapter(model, directory / "second", layers, seed=2, r=64, lora_alpha=8, use_rslora=True),
        save_adapter(model, directory / "third", ("q_proj", "v_proj"), seed=3, r=256, lora_alpha=256),
    )


def check(model: Path, adapters: list[Path | None], outputs: list[list[int]]) -> None:
    """Every token is about as likely as the likeliest one, as PEFT computes it; the base model's are others."""
    differ = 0
    for prompt, adapter, tokens in zip(PROMPTS, adapters, outputs, strict=True):
        assert len(tokens) == NEW_TOKENS
        logits = peft_logits(model, adapter, prompt + tokens[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        spread = logits.max(dim=-1).values - logits.mean(dim=-1)
        assert ((logits.max(dim=-1).values - chosen) <= TOLERANCE * spread).all()
        if adapter is not None:
            base = peft_logits(model, None, prompt + tokens[:-1])[len(prompt) - 1 :]
            differ += bool((base.argmax(-1) != torch.tensor(tokens)).any())
    assert differ == sum(adapter is not None for adapter in adapters)


def test_rows_of_mixed_ranks_decode_together_as_in_peft(model: Path, tmp_path: Path) -> None:
    first, second, third = save_adapters(model, tmp_path)
    engine = Engine(model)
    mixed = [first, second, None, third, first]
    slots = {first: 0, second: 1, third: 3}
    outputs = engine.generate(mixed, slots)
    check(model, mixed, outputs)
    # The same graphs serve other adapters in the same slots, and none.
    other = [second, third, first, None, second]
    check(model, other, engine.generate(other, {second: 0, third: 1, first: 3}))
    bare: list[Path | None] = [None] * len(PROMPTS)
    check(model, bare, engine.generate(bare, {}))
    assert engine.generate(mixed, slots) == outputs


def test_rows_with_adapters_of_experts_decode_together_as_in_peft(tmp_path: Path) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = save_family(tmp_path / "model", "qwen3 moe")
    first, second = (
        save_adapter(model, tmp_path / f"adapter{seed}", ATTENTION, seed=seed, r=rank, target_parameters=targets)
        for seed, rank in ((1, 4), (2, 8))
    )
    engine, slots = Engine(model), {first: 2, second: 0}
    mixed = [first, None, second, first, None]
    check(model, mixed, engine.generate(mixed, slots))
    bare: list[Path | None] = [None] * len(PROMPTS)
    check(model, bare, engine.generate(bare, {}))


@needs_exact_sums
def test_drafts_of_rows_with_adapters_change_passes_and_nothing_else(model: Path, tmp_path: Path) -> None:
    """Right drafts are accepted whole; of those that the other adapters or the base model continue, the right part."""
    first, second, third = save_adapters(model, tmp_path)
    engine, mixed, slots = Engine(model), [first, second, None, third, first], {first: 0, second: 1, third: 3}
    outputs = engine.generate(mixed, slots)
    # A draft leaves room for the token that is sampled after it.
    assert engine.generate_with_drafts(mixed, slots, [row[:-1] for row in outputs]) == outputs
    bare = engine.generate([None] * len(PROMPTS), {})
    guesses = [row[:1] + of_base[1:-1] for row, of_base in zip(outputs, bare, strict=True)]
    found = engine.generate_with_drafts(mixed, slots, guesses)
    for row, guess, wanted in zip(found, guesses, outputs, strict=True):
        right = next((i for i in range(1, len(guess)) if guess[i] != wanted[i]), len(guess))
        assert row == wanted[: right + 1]
    assert sum(len(row) < NEW_TOKENS for row in found) >= 3
    assert len(found[2]) == NEW_TOKENS, "the row without an adapter continues as the base model does"


def test_adapters_are_loaded_again_after_sleep(model: Path, tmp_path: Path) -> None:
    first, second, third = save_adapters(model, tmp_path)
    engine, mixed, slots = Engine(model), [first, second, None, third, first], {first: 0, second: 1, third: 3}
    outputs = engine.generate(mixed, slots)
    for level in SleepLevel:
        engine.engine.sleep(level, keeps_host_pages=False)
        assert engine.engine.wake(tuple(SleepPart), nothing)
        assert engine.generate(mixed, slots) == outputs


def as_rank(rank: int, world_size: int, rendezvous: str, model: str, paths: list[str]) -> list[list[int]]:
    first, second, third = map(Path, paths)
    engine = Engine(Path(model), rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        return engine.generate([first, second, None, third, first], {first: 0, second: 1, third: 3})
    finally:
        engine.engine.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have not met yet: on GPUs they can only once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_on_gpus_share_adapters(fresh_ranks: Ranks, model: Path, tmp_path: Path) -> None:
    adapters = save_adapters(model, tmp_path)
    outputs, _ = fresh_ranks.run(as_rank, 2, str(model), [str(path) for path in adapters])
    first, second, third = adapters
    check(model, [first, second, None, third, first], outputs)
