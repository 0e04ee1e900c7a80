"""Logits of rows with adapters of their own against PEFT, on every back end and over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.steps import AdapterLoad
from common.types import AdapterSlot
from tests.examples import one_in
from tests.services.worker.engine.adapters.peft_adapters import (
    ATTENTION,
    EVERYTHING,
    FEED_FORWARD,
    peft_logits,
    save_adapter,
)
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, save_family

if TYPE_CHECKING:
    from services.worker.engine.model_runner import ModelRunner
    from tests.services.worker.engine.parallel.ranks import Ranks

PROMPTS = [random_ids(count, VOCABULARY, seed=count) for count in (1, 13, 21, 30)]
TOLERANCE = 2e-3


def save_four(tmp_path: Path, family: str, modules: tuple[str, ...], **options: Any) -> tuple[Path, list[Path | None]]:
    """Write a model, and adapters of several ranks for the prompts; one prompt has none."""
    model = save_family(tmp_path / "model", family)
    first = save_adapter(model, tmp_path / "first", modules, r=8, **options)
    second = save_adapter(model, tmp_path / "second", modules, seed=2, r=16, lora_alpha=8, use_rslora=True, **options)
    return model, [first, second, None, first]


def logits_of(runner: ModelRunner, adapters: list[Path | None]) -> list[torch.Tensor]:
    """Return the logits of all tokens of each prompt, all computed in one pass."""
    assert runner.adapters is not None
    slots: dict[Path | None, int] = {None: -1}
    for slot, adapter in enumerate(sorted({each for each in adapters if each is not None})):
        weights = runner.adapters.read(adapter)
        runner.adapters.keep(weights)
        runner.adapters.load([AdapterLoad(AdapterSlot(slot), weights.digest)])
        slots[adapter] = slot
    driver = Driver(runner)
    work = [(driver.open(len(prompt) + 1), prompt) for prompt in PROMPTS]
    batch = driver.batch(work, all_tokens=True)
    by_token = [slots[adapter] for adapter, prompt in zip(adapters, PROMPTS, strict=True) for _ in prompt]
    logits = runner.forward(replace(batch, adapters=torch.tensor(by_token, dtype=torch.int32)))
    return list(torch.split(logits, [len(prompt) for prompt in PROMPTS])) if len(logits) else []


def check(model: Path, adapters: list[Path | None], logits: list[torch.Tensor]) -> None:
    for prompt, adapter, found in zip(PROMPTS, adapters, logits, strict=True):
        wanted = peft_logits(model, adapter, prompt)
        assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()
        if adapter is not None:
            assert (wanted - peft_logits(model, None, prompt)).abs().max() > 10 * TOLERANCE * wanted.abs().max()


CASES = [
    ("llama", EVERYTHING),
    ("llama tied", EVERYTHING),
    ("llama biased", (*ATTENTION, *FEED_FORWARD)),
    ("qwen3", EVERYTHING),
    ("phi4", ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")),
    ("gemma3", EVERYTHING),
    ("granite", EVERYTHING),
    ("olmo2", (*ATTENTION, *FEED_FORWARD)),
    ("qwen2 moe", (*ATTENTION, *FEED_FORWARD)),
]


@pytest.mark.parametrize(
    ("family", "modules", "backend"),
    [
        *((*case, "compiled") for case in CASES),
        # Plain torch computes adapters in the same way for all of them.
        *one_in(4, [(*case, "torch") for case in CASES]),
    ],
)
def test_each_row_has_its_own_adapter_as_in_peft(
    family: str, modules: tuple[str, ...], backend: str, tmp_path: Path
) -> None:
    model, adapters = save_four(tmp_path, family, modules)
    runner = load(model, backend=backend, adapter_slots=4)
    check(model, adapters, logits_of(runner, adapters))


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_experts_have_adapters_as_in_peft(family: str, tmp_path: Path) -> None:
    model, adapters = save_four(
        tmp_path, family, ATTENTION, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    runner = load(model, backend="compiled", adapter_slots=4)
    check(model, adapters, logits_of(runner, adapters))


@pytest.mark.parametrize(("family", "can"), [("llama4", True), ("llama4 of two experts", False)])
def test_experts_of_which_a_token_has_several_by_weighted_inputs_take_no_adapters(
    family: str, can: bool, tmp_path: Path
) -> None:
    """Each choice is a token of its own there, and adapters would be added to others'."""
    runner = load(save_family(tmp_path / "model", family), backend="torch", adapter_slots=1)
    assert runner.adapters is not None
    assert any(".experts." in site.name for site in runner.adapters._active.sites) is can


def as_rank(rank: int, world_size: int, rendezvous: str, model: str, adapters: list[str | None]) -> list[torch.Tensor]:
    runner = load(model, backend="compiled", rank=rank, world_size=world_size, rendezvous=rendezvous, adapter_slots=4)
    try:
        return logits_of(runner, [None if each is None else Path(each) for each in adapters])
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("family", "modules", "options"),
    [
        ("llama", EVERYTHING, {}),
        ("llama tied", EVERYTHING, {}),
        ("qwen3 moe", ATTENTION, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ],
)
def test_two_ranks_share_adapters(
    ranks: Ranks, family: str, modules: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    model, adapters = save_four(tmp_path, family, modules, **options)
    first, second = ranks.run(as_rank, 2, str(model), [None if each is None else str(each) for each in adapters])
    assert second == []
    check(model, adapters, first)
