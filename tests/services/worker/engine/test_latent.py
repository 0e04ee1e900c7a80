"""Models with latent attention: one row per token, what their files may contain, and how they are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigurationError
from services.worker.engine.model.config import RouterScores
from services.worker.engine.model.config_json import config_from_json
from services.worker.engine.parallel.shards import Span, shard_model
from tests.services.worker.engine.driving import Driver, Row, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, save_family, save_model
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised
from tests.services.worker.engine.quantization.test_stored_formats import (
    assert_close_but_for_ties,
    error,
    rounded_inputs,
)

if TYPE_CHECKING:
    from services.worker.engine.model_runner import ModelRunner

CONFIGS = Path("tests/deploy/models/configs")
PROMPT = random_ids(40, VOCABULARY)
# Whole blocks of 128 inputs, and sides that formats can pack.
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 32, "num_hidden_layers": 2, "first_k_dense_replace": 2,
    "initializer_range": 0.05,
}  # fmt: skip


def published(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())["config"]
    return {**config, **changes}


def logits_of(directory: Path, backend: str = "torch", tokens: list[int] = PROMPT) -> torch.Tensor:
    driver = Driver(load(directory, backend=backend))
    return driver.run([(driver.open(len(tokens)), tokens)], all_tokens=True)


def test_published_configurations_are_read() -> None:
    lite, v3, kimi = (config_from_json(published(name)) for name in ("deepseek-v2-lite", "deepseek-v3", "kimi-k2"))
    for each in (lite, v3, kimi):
        assert (each.kv_heads, each.head_dim, each.kv_width, each.output_dim) == (1, 576, 576, 128)
        assert (each.rotary.is_interleaved, each.rotary.amplitude) == (True, 1.0)
    assert lite.latent is not None
    assert v3.latent is not None
    assert (lite.latent.query_rank, v3.latent.query_rank) == (None, 1536)
    scaled = [(lite, 0.707, 40), (v3, 1.0, 40), (kimi, 1.0, 32)]
    assert [each.attention_scale for each, _, _ in scaled] == pytest.approx(
        [192**-0.5 * (0.1 * scale * math.log(factor) + 1) ** 2 for _, scale, factor in scaled]
    )
    assert lite.moe is not None
    assert v3.moe is not None
    assert kimi.moe is not None
    assert (lite.moe.scores, lite.moe.groups, lite.moe.has_correction) == (RouterScores.SOFTMAX, None, False)
    assert (v3.moe.scores, v3.moe.has_correction, v3.moe.routing_scale) == (RouterScores.SIGMOID, True, 2.5)
    assert v3.moe.groups is not None
    assert (v3.moe.groups.count, v3.moe.groups.chosen, v3.moe.groups.best) == (8, 4, 2)
    assert (v3.moe.dense_layers, kimi.moe.dense_layers) == ((0, 1, 2), (0,))
    assert lite.moe.shared is not None
    assert lite.moe.shared.intermediate_size == 2816


def test_every_second_layer_may_be_dense() -> None:
    config = config_from_json(published("deepseek-v2-lite", num_hidden_layers=6, moe_layer_freq=2))
    assert config.moe is not None
    assert config.moe.dense_layers == (0, 1, 3, 5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"topk_method": "random"}, "topk_method: 'random' is not supported; supported: greedy, group_limited_greedy"),
        ({"scoring_func": "tanh"}, "scoring_func: 'tanh' is not supported; supported: softmax, sigmoid"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4, where 16 are expected"),
        ({"norm_topk_prob": True, "routed_scaling_factor": 2.0}, "norm_topk_prob: True with scoring_func 'softmax'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_options_that_would_change_results_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        config_from_json(published("deepseek-v2-lite", **changes))


def test_ranks_share_the_rows_and_cut_the_heads() -> None:
    config = config_from_json(published("deepseek-v3"))
    shards = [shard_model(config, rank, 8) for rank in range(8)]
    assert [shard.kv_heads for shard in shards] == [Span(0, 1)] * 8
    assert [shard.query_heads for shard in shards] == [Span(16 * rank, 16 * rank + 16) for rank in range(8)]
    with pytest.raises(ConfigurationError, match="FP8 in blocks is cut between 128 inputs"):
        shard_model(config_from_json(published("deepseek-v3", v_head_dim=100)), 0, 8)


@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_a_token_takes_one_row_of_each_layer(backend: str, tmp_path: Path) -> None:
    runner = load(save_family(tmp_path, "deepseek v3"), backend=backend)
    assert runner.capacity.kv_bytes_per_token == 3 * (24 + 8) * 4


def continued(runner: ModelRunner, *, shared: int) -> list[list[float]]:
    """Return logits of a prompt's end, whose first `shared` tokens another row has computed."""
    driver = Driver(runner)
    first = driver.open(len(PROMPT))
    driver.run([(first, PROMPT)])
    second = driver.open(len(PROMPT))
    pages = shared // runner.capacity.page_size
    row = Row([*first.pages[:pages], *second.pages[pages:]], PROMPT[:shared])
    logits: list[list[float]] = driver.run([(row, PROMPT[shared:])], all_tokens=True).tolist()
    return logits


def test_rows_of_a_shared_prefix_are_used_again(tmp_path: Path) -> None:
    runner = load(save_family(tmp_path, "deepseek v2"), page_size=16)
    whole = logits_of(tmp_path)
    assert torch.allclose(torch.tensor(continued(runner, shared=32)), whole[32:], atol=1e-4, rtol=1e-4)


def test_layers_of_multi_token_prediction_are_not_read(tmp_path: Path) -> None:
    expected = logits_of(save_family(tmp_path, "deepseek v3"))
    tensors = load_file(tmp_path / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    assert last
    for name, tensor in last.items():
        tensors[name.replace("model.layers.2.", "model.layers.3.")] = tensor * 3
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    change_config(tmp_path, num_nextn_predict_layers=1)
    assert torch.equal(logits_of(tmp_path), expected)


def test_kimi_k2_is_computed_as_deepseek_v3(tmp_path: Path) -> None:
    expected = logits_of(save_family(tmp_path, "deepseek v3"))
    change_config(tmp_path, model_type="kimi_k2")
    assert torch.equal(logits_of(tmp_path), expected)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_small_shapes_run_without_weights(name: str, quantization: str, tmp_path: Path) -> None:
    small = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1000, "n_routed_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "first_k_dense_replace": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published(name, **small)))
    runner = load(tmp_path, load_format="dummy", quantization=quantization, backend="torch")
    assert runner.capacity.kv_bytes_per_token == 3 * 576 * 4
    driver = Driver(runner)
    first, second = (driver.generate(random_ids(20, 1000), 4, chunks=chunks) for chunks in ((), (7,)))
    assert len(first) == 4
    assert first == second


@pytest.mark.parametrize("scheme", ["fp8 blocks", "awq 32", "compressed 8 bits", "int8"])
@pytest.mark.parametrize("kept", [(), ("kv_a_proj_with_mqa",)])
def test_quantised_projections_are_read(scheme: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    import transformers

    name, options = FAMILIES["deepseek v3"]
    plain = save_model(tmp_path / "plain", name, {**options, **WIDE})
    quantised = save_model(tmp_path / "quantised", name, {**options, **WIDE})
    weights = store_quantised(quantised, SCHEMES[scheme], but=kept)
    assert len(weights) == 2 * (8 - len(kept))
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64).eval()
    modules, rounding = dict(model.named_modules()), SCHEMES[scheme].round_inputs
    for matrix, weight in weights.items():
        stem = matrix.removesuffix(".weight")
        modules[stem].weight.data = weight
        # Not of what is multiplied into queries and outputs.
        if rounding is not None and not stem.endswith("kv_b_proj"):
            modules[stem].register_forward_pre_hook(rounded_inputs(rounding, None))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for backend in ("torch", "compiled"):
        got = logits_of(quantised, backend)
        if rounding is None:
            assert error(got, expected) < 1e-5
        else:
            assert_close_but_for_ties(got, expected, logits_of(plain))
