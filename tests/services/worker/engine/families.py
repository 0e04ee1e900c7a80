"""Tiny models of every family, with random weights, as `transformers` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

# No power of two: the last panel of the head is not full.
VOCABULARY = 131
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large weights, so that attention is sharp and logits are far apart.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
_GEMMA_ROTARY = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# The last layer sees all tokens, and has wider heads.
_GEMMA4: dict[str, Any] = {
    "sliding_window": 20, "global_head_dim": 48, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_GEMMA4_OF_KEYS: dict[str, Any] = {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.2, 1.5, 2.0, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 9.0],
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
_RECURRENT = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA4 = {
    "intermediate_size": 48, "intermediate_size_mlp": 80, "num_local_experts": 5, "attention_chunk_size": 20,
    "floor_scale": 16, "attn_scale": 0.5, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}
_GEMMA4_SHARING: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rms_norm_eps": 1e-6}),
    "mistral windowed": ("Mistral", {"sliding_window": 20}),
    "qwen2 windowed": (
        "Qwen2",
        {"rms_norm_eps": 1e-6, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "yarn": ("Qwen3", {"rms_norm_eps": 1e-6, "rope_parameters": _YARN}),
    "qwen3 moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3 moe partly dense": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2 moe": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": _GEMMA_ROTARY,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 30.0,
            "head_dim": 32,
        },
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 10.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 32,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4_OF_KEYS),
    "gemma4 of separate values": ("Gemma4", {**_GEMMA4, "tie_word_embeddings": False}),
    "gemma4 moe": (
        "Gemma4",
        {
            **_GEMMA4_OF_KEYS,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "phi3": ("Phi3", {"rms_norm_eps": 1e-5}),
    "phi3 windowed": ("Phi3", {"sliding_window": 20}),
    # Rotates a part of each head, as Phi-4-mini.
    "phi4": (
        "Phi3",
        {
            "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 512,
            "hidden_size": 64,
        },
    ),
    "granite": ("Granite", {**_MULTIPLIERS, "attention_bias": True, "tie_word_embeddings": True}),
    "granite moe": ("GraniteMoe", {**_MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granite moe shared": (
        "GraniteMoeShared",
        {**_MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 of one KV head": ("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm": ("Glm", {"attention_bias": True}),
    "glm4": ("Glm4", {"attention_bias": True}),
    "glm4 moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "ernie": ("Ernie4_5", {}),
    "ernie biased": ("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "seed oss": ("SeedOss", {}),
    "seed oss biased": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "gpt-oss": (
        "GptOss",
        {
            "sliding_window": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "hidden_size": 64,
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
        },
    ),
    # As V2-Lite: queries are not compressed, experts have no groups.
    "deepseek v2 lite": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek v3 of halves": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": {**_YARN, "mscale": 0.5, "mscale_all_dim": 1.0},
        },
    ),
    "qwen3 next": (
        "Qwen3Next",
        {**_EXPERTS, **_RECURRENT, "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    # Ends with a recurrent layer; a value head for each key head.
    "qwen3 next of dense layers": (
        "Qwen3Next",
        {
            **_RECURRENT,
            "num_experts": 0,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3.5": ("Qwen3_5", {**_RECURRENT, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5 moe": ("Qwen3_5Moe", {**_EXPERTS, **_RECURRENT, "shared_expert_intermediate_size": 64}),
    # Chunks of 20 tokens, as prompts are longer than windows elsewhere; every second layer has experts, as Maverick.
    "llama4": (
        "Llama4",
        {
            **_LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 4,
            "rope_parameters": _LLAMA3,
            "use_qk_norm": True,
        },
    ),
    # Two experts of each token, temperatures that rise after every fourth token, heads without norms.
    "llama4 of two experts": (
        "Llama4",
        {**_LLAMA4, "num_experts_per_tok": 2, "no_rope_layer_interval": 2, "use_qk_norm": False, "floor_scale": 4},
    ),
    # The last of four layers has no positions.
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 windowed": (
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    # As SmolLM2: three query heads for each of three KV heads.
    "smol": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
}


# Those that two ranks compute, and the back end of each.
SHARED = {
    "llama": "compiled",
    "llama tied": "torch",
    "llama biased": "compiled",
    "llama3": "torch",
    "llama linear": "compiled",
    "smol": "torch",
    "mistral": "torch",
    "mistral windowed": "compiled",
    "qwen3": "compiled",
    "yarn": "torch",
    "qwen3 moe partly dense": "compiled",
    "gemma3": "torch",
    "qwen2 windowed": "compiled",
    "qwen2 moe": "compiled",
    "gemma2": "compiled",
    "gemma4": "compiled",
    "gemma4 moe": "torch",
    "mixtral": "torch",
    "gemma": "torch",
    "phi3": "compiled",
    "phi4": "torch",
    "granite": "torch",
    "granite moe": "compiled",
    "granite moe shared": "torch",
    "olmo2": "compiled",
    "olmo2 of one KV head": "torch",
    "olmo3": "compiled",
    "glm": "torch",
    "glm4": "compiled",
    "glm4 moe": "compiled",
    "ernie biased": "torch",
    "seed oss": "torch",
    "seed oss biased": "compiled",
    "smollm3": "compiled",
    "smollm3 windowed": "torch",
    "gpt-oss": "torch",
    "deepseek v2 lite": "compiled",
    "deepseek v3": "torch",
    "qwen3 next": "compiled",
    "qwen3 next of dense layers": "torch",
    "qwen3.5": "compiled",
    "qwen3.5 moe": "torch",
    "llama4": "compiled",
    "llama4 of two experts": "torch",
}
# Those that the GPU's programs compute in Triton's interpreter: capped scores and norms of outputs; norms of
# projections and none of inputs; reordered heads and every kind of expert; attention sinks and experts with biases;
# latent attention; layers without positions and weighted inputs of experts; layers with other heads, norms of values
# and experts beside dense layers; recurrent layers.
INTERPRETED = (
    "gemma2", "olmo2", "glm4 moe", "gpt-oss", "deepseek v3", "llama4 of two experts", "gemma4 moe", "qwen3.5",
)  # fmt: skip
# One of each of the other families, in extended tests.
ALSO_INTERPRETED = (
    "deepseek v2", "ernie biased", "gemma", "gemma3", "glm", "glm4", "granite", "granite moe", "granite moe shared",
    "llama", "mistral", "mixtral", "olmo3", "phi4", "qwen2", "qwen2 moe", "qwen3", "qwen3 moe", "qwen3 next",
    "qwen3.5 moe", "seed oss biased", "smollm3",
)  # fmt: skip
# Those that are compared with their GGUF files, and what these do not contain.
IN_GGUF: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2 moe": {"mlp_only_layers": []},
    "qwen3": {},
    "qwen3 moe": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "phi3 windowed": {},
    "phi4": {},
    "granite": {"attention_bias": False},
    "granite moe": {},
    "granite moe shared": {},
    "olmo2": {},
    "glm4": {},
    "gpt-oss": {},
    "seed oss": {},
    "ernie": {},
    "ernie biased": {},
    "smollm3": {},
    "glm4 moe": {},
    "deepseek v2": {},
    "deepseek v2 lite": {},
    "deepseek v3": {},
}
# Families whose GGUF files are not read, and what llama.cpp calls these.
UNREAD_ARCHITECTURES = {
    "glm": "chatglm", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "llama4_text": "llama4", "gemma4_text": "gemma4",
}  # fmt: skip
# Families without an implementation, which run through `transformers`, and what each has that Llama has not.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"sliding_window": 20}),  # layer norms and biases
    "cohere": ("Cohere", {"logit_scale": 0.5}),  # attention beside the feed-forward layer, pairs rotated side by side
    "stablelm": ("StableLm", {"hidden_size": 64, "partial_rotary_factor": 0.5}),  # layer norms
    "vaultgemma": ("VaultGemma", {"sliding_window": 20}),  # capped scores, every other layer with a window
    "cohere2": (
        "Cohere2",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt neox": ("GPTNeoX", {}),  # attention beside the feed-forward layer
    "gpt2": ("GPT2", _GPT2),  # learned positions
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),  # a decoder within its model
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}),
    "nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),  # squared activations
    "ernie moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 1},
    ),
    # Embeddings of each layer, several residual streams, layers that take keys and values of others.
    "gemma3n": (
        "Gemma3nText",
        {
            **_GEMMA4_SHARING,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    # Wider and fewer heads in layers without a window.
    "gemma4": (
        "Gemma4Text",
        {**_GEMMA4_SHARING, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4 of even heads": ("Gemma4Text", {**_GEMMA4_SHARING, "global_head_dim": 32}),
}


def save_family(directory: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model of `family` to `directory`, which is returned."""
    return save_model(directory, *FAMILIES[family], seed=seed, **changes)


def save_model(
    directory: Path, name: str, options: dict[str, Any], *, seed: int = 0, task: str = "CausalLM", **changes: Any
) -> Path:
    """Write a tiny model of what `transformers` calls `name` for a task, its config changed by `options`."""
    import transformers

    config = tiny_config(name, options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if parameter.ndim == 1 or name_of.endswith(
                "_bias"
            ):  # biases and norm weights, which start out as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(directory, **changes)
    return directory


def tiny_config(name: str, options: dict[str, Any]) -> Any:  # a PretrainedConfig
    """Return the config of a tiny model of what `transformers` calls `name`, changed by `options`."""
    return config_class(name)(**{**_SHAPE, **options})


def config_class(name: str) -> Any:  # a PretrainedConfig
    """Return the class of the config of what `transformers` calls `name`."""
    import transformers

    is_part = name in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
    return getattr(transformers, f"{name}TextConfig" if is_part else f"{name}Config")


def reference_logits(directory: Path, token_ids: list[int], rounded: torch.dtype | None = None) -> torch.Tensor:
    """Return what `transformers` computes in fp32 for every token, [tokens, vocabulary].

    With `rounded`, matrices are rounded to that type first.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if rounded is not None and parameter.ndim == 2:
            parameter.data = parameter.data.to(rounded).float()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
