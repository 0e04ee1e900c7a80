from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.checkpoints.tensor_shapes import tensor_shape
from services.worker.engine.model.config import ExpertGroups, RotaryConfig, RouterScores, SharedExperts
from services.worker.engine.model.config_gguf import config_from_gguf
from services.worker.engine.model.config_json import Implementation, config_from_json, implementation_of
from services.worker.engine.model.rotary_config import head_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.model.config import ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 4,
    "llama.context_length": 256, "llama.feed_forward_length": 128, "llama.block_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 100, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}  # fmt: skip


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def from_json(**changes: object) -> ModelConfig:
    return config_from_json({**LLAMA, **changes})


def test_a_config_of_transformers_4_is_read() -> None:
    config = from_json()
    assert (config.query_heads, config.kv_heads, config.head_dim, config.queries_per_kv) == (4, 2, 16, 2)
    assert (config.max_context, config.eos_token_ids, config.dtype) == (256, (2,), "bfloat16")
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    assert from_json(num_key_value_heads=None).kv_heads == 4


def test_families_differ_in_biases_and_norms() -> None:
    assert from_json(model_type="qwen2").qkv_bias
    assert not from_json(model_type="qwen2").output_bias
    assert from_json(model_type="qwen3").qk_norm
    biased = from_json(attention_bias=True, mlp_bias=True)
    assert biased.qkv_bias
    assert biased.output_bias
    assert biased.mlp_bias


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, (100, 100)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, ()),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9, 9)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen3_moe", "sliding_window": 9, "use_sliding_window": True, **EXPERTS}, (9, 9)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        (
            {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True,
             "layer_types": ["sliding_attention", "full_attention"]},
            (9, None),
        ),
    ],
)  # fmt: skip
def test_layers_have_the_windows_that_the_file_says(
    changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    config = from_json(**changes)
    assert config.windows == windows
    assert config.max_context == 256


@pytest.mark.parametrize("old", [False, True])
def test_rope_parameters_are_read_from_files_of_transformers_4_and_5(old: bool) -> None:
    changes = {"rope_scaling": LLAMA3, "rope_theta": 500000.0} if old else {"rope_parameters": LLAMA3}
    config = from_json(head_dim=128, **changes)
    assert config.rotary.theta == 500000.0
    assert (max(config.rotary.frequency_divisors), min(config.rotary.frequency_divisors)) == (8.0, 1.0)


def test_gemma_s_windowed_layers_have_a_separate_rope_base() -> None:
    layers = {"num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16, "sliding_window": 32}
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3, "rope_theta": 1e6}
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    first, second = (config_from_json({"model_type": "gemma3_text", **layers, **changes}) for changes in (old, new))
    assert first == second
    assert first.windows == (32, 32, 32, 32, 32, None)
    assert first.rotary_of(0) == RotaryConfig(5e3)
    assert first.rotary_of(5) == RotaryConfig(1e6, (8.0,) * 8)


def test_the_text_model_of_a_checkpoint_with_vision_is_read() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = config_from_json(
        {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    )
    assert (config.family, config.hidden_size, config.query_heads, config.head_dim) == ("gemma3_text", 2560, 8, 256)
    assert (config.eos_token_ids, config.dtype, config.tied_embeddings) == ((1, 106), "bfloat16", True)
    assert (config.windows[4], config.windows[5]) == (1024, None)
    assert config.overflows_float16


def gemma4(**changes: object) -> dict[str, object]:
    """Return a config.json of Gemma 4 as it is published."""
    return {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision", "sliding_window": 1024, **changes,
    }  # fmt: skip


def test_layers_of_gemma_4_with_a_window_have_heads_of_their_own() -> None:
    config = config_from_json(gemma4())
    assert config.windows == (1024,) * 5 + (None,)
    assert [(config.at(i).kv_heads, config.at(i).head_dim) for i in (0, 4, 5)] == [(16, 256), (16, 256), (4, 512)]
    assert (config.keys_are_values, config.attention_scale, config.moe) == (True, 1.0, None)
    assert config.rotary_of(0) == RotaryConfig(1e4)
    # A quarter of the head turns, at frequencies of whole heads.
    assert config.rotary_of(5) == RotaryConfig(1e6, (1.0,) * 64 + (math.inf,) * 192)


def test_heads_of_gemma_4_are_read_as_published_and_as_transformers_writes_them() -> None:
    written = {
        "num_global_key_value_heads": None,
        "per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 4}},
    }
    assert config_from_json(gemma4(**written)) == config_from_json(gemma4())
    # `transformers` pads numbers of layers to the same length.
    full = {"head_dim": 512, "num_key_value_heads": 4}
    padded = written | {"per_layer_config": {"05": full, "11": full}}
    assert config_from_json(gemma4(num_hidden_layers=12, **padded)) == config_from_json(gemma4(num_hidden_layers=12))
    # Without common keys and values, the published number of heads does not count.
    apart = config_from_json(gemma4(attention_k_eq_v=False))
    assert (apart.kv_heads, apart.head_dim) == (16, 512)


@pytest.mark.parametrize("changes", [{"hidden_size_per_layer_input": 256}, {"num_kv_shared_layers": 2}])
@pytest.mark.parametrize("wrap", [dict, lambda text: {"model_type": "gemma4", "text_config": text}])
def test_variants_of_a_family_that_are_not_covered_run_through_transformers(
    changes: dict[str, object], wrap: Callable[[dict[str, object]], dict[str, object]]
) -> None:
    assert implementation_of(wrap(gemma4())) is Implementation.OWN
    assert implementation_of(wrap(gemma4(**changes))) is Implementation.TRANSFORMERS
    # What a file leaves out counts, too: embeddings of each layer are the default.
    published = gemma4()
    del published["hidden_size_per_layer_input"]
    assert implementation_of(wrap(published)) is Implementation.TRANSFORMERS


def test_layers_of_a_mixture_may_be_dense() -> None:
    experts = {
        "model_type": "qwen3_moe", "num_hidden_layers": 6, **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3],
    }  # fmt: skip
    config = from_json(**experts)
    assert config.moe is not None
    assert config.moe.dense_layers == (0, 2, 3, 4)
    assert [config.moe_of(i) is None for i in range(6)] == [True, False, True, True, True, False]


def test_longrope_is_read_as_phi_s_files_have_it() -> None:
    factors = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    config = from_json(
        model_type="phi3", rope_scaling=factors, partial_rotary_factor=0.75, original_max_position_embeddings=64,
        max_position_embeddings=1024, sliding_window=2048,
    )  # fmt: skip
    assert config.rotary.amplitude == math.sqrt(1 + math.log(1024 / 64) / math.log(64))
    assert (config.rotary.rotated, config.rotary.is_interleaved, config.windows) == (12, False, ())
    assert config.within(64).rotary.frequency_divisors == (1.0,) * 6
    assert config.within(65).rotary.frequency_divisors == (4.0,) * 6
    assert config.within(65).rotary.long_divisors == ()


def test_experts_of_glm_are_chosen_in_groups() -> None:
    config = from_json(
        model_type="glm4_moe", num_hidden_layers=4, n_routed_experts=16, moe_intermediate_size=32, n_shared_experts=2,
        num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    assert config.moe is not None
    assert config.moe.shared == SharedExperts(64)
    assert config.moe.groups == ExpertGroups(4, 2, best=2)
    assert [config.moe_of(i) is None for i in range(4)] == [True, True, False, False]
    assert (config.moe.routing_scale, config.moe.scores, config.rotary.rotated) == (2.5, RouterScores.SIGMOID, 8)


def test_head_order_puts_rotated_pairs_into_halves() -> None:
    assert head_order(RotaryConfig(1e4), 8) is None
    assert head_order(RotaryConfig(1e4, is_interleaved=True), 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert head_order(RotaryConfig(1e4, rotated=4), 8) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert head_order(RotaryConfig(1e4, rotated=4, is_interleaved=True), 8) == (0, 2, 4, 5, 1, 3, 6, 7)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model_type": "gpt2"},
            "family 'gpt2' is not supported; supported: .*gemma3_text, .*llama, mistral, .*qwen2",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "no 'original_max_position_embeddings'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: weights quantised by 'hqq'"),
        ({"sliding_window": 4, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.6}, "partial_rotary_factor: 9 of 16 components"),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "original_max_position_embeddings": 128,
                },
            },
            "short_factor and long_factor: 8 factors each",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
            "no 'orig",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        (gemma4(use_bidirectional_attention="all"), "use_bidirectional_attention: 'all'"),
        (gemma4(per_layer_config={"0": {"head_dim": 64}}), "per_layer_config: other heads in layers of the same kind"),
        (gemma4(enable_moe_block=True), "no 'num_experts'"),
        ({"model_type": "granite", "hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({"model_type": "mixtral"}, "no 'num_local_experts'"),
        ({"model_type": "granitemoe"}, "no 'num_local_experts'"),
        ({"model_type": "glm4_moe"}, "no 'n_routed_experts'|no 'moe_intermediate_size'"),
        ({"model_type": "olmo3", "layer_types": ["chunked_attention"] * 2, "sliding_window": 8}, "layer_types"),
    ],
)
def test_unsupported_configurations_are_refused_with_a_reason(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        from_json(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": None}, "config.json has no 'num_hidden_layers'"),
        ({"num_hidden_layers": -3}, "num_hidden_layers of config.json should be a positive whole number, got -3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of config.json should be at most 4096"),
        ({"num_key_value_heads": 0}, "num_key_value_heads of config.json should be a positive whole number, got 0"),
        ({"hidden_size": "64"}, "hidden_size of config.json should be a positive whole number, got '64'"),
        ({"vocab_size": 100.0}, "vocab_size of config.json should be a positive whole number, got 100.0"),
        ({"rope_theta": "much"}, "config.json has a value of an unexpected type or range"),
        ({"quantization_config": "fp8"}, "config.json has a value of an unexpected type or range"),
    ],
)
def test_malformed_fields_are_refused_with_a_reason(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(complaint)):
        from_json(**changes)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json has no 'vocab_size'"):
        config_from_json({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    with pytest.raises(ConfigurationError, match=r"no field 'llama\.block_count'"):
        config_from_gguf(
            {key: value for key, value in GGUF.items() if key != "llama.block_count"},
            tensors=(),
            divisors=(),
        )


def test_gguf_defaults_are_those_of_llama_cpp() -> None:
    config = config_from_gguf(GGUF, tensors=(), divisors=())
    assert (config.kv_heads, config.head_dim, config.rotary.theta) == (4, 16, 10000.0)
    assert config.eos_token_ids == (2, 3)
    assert config.tied_embeddings


def test_gguf_models_that_rotate_half_a_head_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="partial rotary"):
        config_from_gguf({**GGUF, "llama.rope.dimension_count": 8}, tensors=(), divisors=())


def parameters_of(config: ModelConfig) -> int:
    """Return how many weights a model's matrices have."""
    heads = ("q_proj", "k_proj", "v_proj", "o_proj")
    names = ["model.embed_tokens.weight", *([] if config.tied_embeddings else ["lm_head.weight"])]
    for layer in range(config.layers):
        prefix, moe = f"model.layers.{layer}", config.moe_of(layer)
        experts = [""] if moe is None else [f"experts.{i}." for i in range(moe.experts)]
        names += [f"{prefix}.self_attn.{name}.weight" for name in heads]
        names += [f"{prefix}.mlp.{each}{name}_proj.weight" for each in experts for name in ("gate", "up", "down")]
    return sum(math.prod(tensor_shape(name, config)) for name in names)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("qwen3-0.6b", 0.60), ("llama-3.1-8b", 8.03), ("qwen3-14b", 14.77), ("qwen3-30b-a3b", 30.5), ("gemma-3-4b", 3.88)],
)
def test_shapes_that_are_measured_are_those_of_the_models(shape: str, billions: float) -> None:
    config = read_config(Path("deploy/evaluation/shapes") / shape)
    assert parameters_of(config) / 1e9 == pytest.approx(billions, rel=0.01)
