from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ConfigurationError
from services.worker.engine.model.config_gguf import config_from_gguf
from services.worker.engine.model.config_json import config_from_json
from services.worker.engine.model.rotary import rotary_table

if TYPE_CHECKING:
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


def from_json(**changes: object) -> ModelConfig:
    return config_from_json({**LLAMA, **changes})


def test_a_config_of_transformers_4_is_read() -> None:
    config = from_json()
    assert (config.query_heads, config.kv_heads, config.head_dim, config.queries_per_kv) == (4, 2, 16, 2)
    assert (config.max_context, config.eos_token_ids, config.dtype) == (256, (2,), "bfloat16")
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.head_norms))


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    assert from_json(num_key_value_heads=None).kv_heads == 4


def test_families_differ_in_biases_and_norms() -> None:
    assert from_json(model_type="qwen2").qkv_bias
    assert not from_json(model_type="qwen2").output_bias
    assert from_json(model_type="qwen3").head_norms
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
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True}, (100, 100)),
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
def test_llama3_frequencies_are_those_of_transformers(old: bool) -> None:
    changes = {"rope_scaling": LLAMA3, "rope_theta": 500000.0} if old else {"rope_parameters": LLAMA3}
    config = from_json(head_dim=128, max_position_embeddings=20000, **changes)
    reference = transformers.LlamaConfig(head_dim=128, hidden_size=512, rope_parameters=LLAMA3)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    table = rotary_table(config.rotary, 128, 20000, torch.device("cpu"))
    angles = torch.arange(20000.0)[:, None] * expected[None]
    # A frequency that differs in its last bit has turned by a thousandth after 20,000 tokens.
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), dim=1), atol=2e-3, rtol=0)
    assert max(config.rotary.frequency_divisors) == 8.0
    assert min(config.rotary.frequency_divisors) == 1.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model_type": "gpt2"},
            "family 'gpt2' is not supported; supported: llama, mistral, qwen2, .*gemma3_text",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "no 'original_max_position_embeddings'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: weights quantised by 'gptq'"),
        ({"sliding_window": 4, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        from_json(**changes)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json has no 'vocab_size'"):
        config_from_json({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    with pytest.raises(ConfigurationError, match=r"no field 'llama\.block_count'"):
        config_from_gguf(
            {key: value for key, value in GGUF.items() if key != "llama.block_count"},
            tied_embeddings=True,
            divisors=(),
        )


def test_gguf_defaults_are_those_of_llama_cpp() -> None:
    config = config_from_gguf(GGUF, tied_embeddings=True, divisors=())
    assert (config.kv_heads, config.head_dim, config.rotary.theta) == (4, 16, 10000.0)
    assert config.eos_token_ids == (2, 3)
    assert config.tied_embeddings


def test_gguf_models_that_rotate_half_a_head_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="partial rotary"):
        config_from_gguf({**GGUF, "llama.rope.dimension_count": 8}, tied_embeddings=True, divisors=())
