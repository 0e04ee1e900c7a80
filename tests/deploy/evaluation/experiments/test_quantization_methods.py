"""Weights that published methods choose: their errors, and what they leave as it was."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigurationError
from deploy.evaluation.experiments.quantization_methods import choose, gptq_integers, output_error
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.families import VOCABULARY, save_model
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, rounded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.quantization.stored_formats import IntegerLayout

TEXTS = [random_ids(96, VOCABULARY, seed=1), random_ids(80, VOCABULARY, seed=2)]


def layout_of(scheme: str) -> IntegerLayout:
    layout = SCHEMES[scheme].layout
    assert layout is not None
    return layout


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.1}
    return save_model(tmp_path_factory.mktemp("plain"), "Llama", {**shape, **heads})


@pytest.mark.parametrize("scheme", ["gptq", "gptq act-order", "gptq act-order zero points", "compressed zero points"])
def test_gptq_makes_up_for_errors_where_inputs_are_correlated(scheme: str) -> None:
    layout, generator = layout_of(scheme), torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=generator)
    inputs = torch.randn(512, 24, generator=generator) @ torch.randn(24, 128, generator=generator)
    moments = inputs.t() @ inputs / len(inputs)
    nearest = rounded(weight, layout.bits, layout.size, symmetric=layout.symmetric)
    chosen = gptq_integers(weight, moments, layout)
    errors = [output_error(each.weight.float() - weight, moments) for each in (chosen, nearest)]
    assert errors[0] < errors[1] / 2
    assert torch.bincount(chosen.groups).tolist() == torch.bincount(nearest.groups).tolist()
    assert bool((chosen.groups.diff() < 0).any()) == layout.act_order


def test_gptq_rounds_to_nearest_where_inputs_are_independent() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    chosen, nearest = gptq_integers(weight, torch.eye(256), layout_of("gptq")), rounded(weight, 4, 128, symmetric=True)
    assert torch.equal(chosen.values, nearest.values)
    assert torch.equal(chosen.weight, nearest.weight)


@torch.inference_mode()
def logits_of(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    logits: torch.Tensor = model(torch.tensor(TEXTS[:1])).logits
    return logits


def test_awq_moves_factors_between_tensors_that_compute_the_same(plain: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(plain, directory)
    chosen = choose(directory, "awq 32", TEXTS)
    assert len(chosen) == 14
    torch.testing.assert_close(logits_of(directory), logits_of(plain), rtol=1e-3, atol=1e-4)
    before, after = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (plain, directory))
    moved = {name.split(".", 3)[-1] for name in after if not torch.equal(before[name], after[name])}
    assert moved >= {"input_layernorm.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert not moved & {"self_attn.o_proj.weight", "model.embed_tokens.weight"}


def test_gptq_takes_activations_of_the_quantised_layers_before(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "model")
    chosen = choose(tmp_path / "model", "gptq", TEXTS)
    assert len(chosen) == 14
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    exact = logits_of(plain)
    errors = []
    for stored in (chosen, None):
        for name, matrix in model.named_modules():
            weight = f"{name}.weight"
            if weight in chosen:
                source = chosen[weight] if stored else SCHEMES["gptq"].store(exact_weight(plain, weight))
                matrix.weight.data = source.weight.float()
        with torch.inference_mode():
            errors.append(float((model(torch.tensor(TEXTS[:1])).logits - exact).norm()))
    assert 0 < errors[0] < errors[1]


def exact_weight(directory: Path, name: str) -> torch.Tensor:
    weight: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()[name]
    return weight


def test_static_scales_cover_the_largest_activation(plain: Path) -> None:
    chosen = choose(plain, "fp8 static", TEXTS)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].abs().max()))
    with torch.inference_mode():
        for text in TEXTS:
            model(torch.tensor([text]))
    scale = chosen["model.layers.1.mlp.down_proj.weight"].tensors["input_scale"]
    torch.testing.assert_close(scale * 448, torch.stack(seen).max())


def test_formats_without_a_method_are_refused(plain: Path) -> None:
    with pytest.raises(ConfigurationError, match="int8: weights of this format are rounded to nearest"):
        choose(plain, "int8", TEXTS)
