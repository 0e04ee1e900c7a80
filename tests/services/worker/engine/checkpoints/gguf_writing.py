"""Writes a model of `transformers` as the converters of llama.cpp do."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize, quantize

from services.worker.engine.checkpoints.gguf_file import gguf_name
from services.worker.engine.checkpoints.tensor_names import split_expert
from services.worker.engine.families.registry import families_by_architecture, families_by_name
from services.worker.engine.model.config import RouterScores
from services.worker.engine.model.family import StackedPart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from services.worker.engine.model.config import LatentConfig, ModelConfig, MoeConfig
    from services.worker.engine.model.family import Family, GgufFamily

# Families whose scaling of rotary embedding is written as fields, not as a tensor; all but the first one's is YaRN.
_SCALED_BY_FIELDS = ("gemma3_text", "gpt_oss", "deepseek_v2", "deepseek_v3")


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    wide: tuple[str, ...] = (),
    is_dequantised: bool = False,
    has_latent_rows: bool = True,
    blocks_for: Callable[[str, NDArray[np.float32]], tuple[GGMLQuantizationType, NDArray[np.uint8]]] | None = None,
    **fields: Any,  # whatever a test wants to add
) -> Path:
    """Write `tensors`, named as in `transformers`; matrices are quantised but for stored names with one of `wide`.

    With `is_dequantised`, the quantised numbers are written in float32. Latent attention is written as converters do
    since 2025 unless `has_latent_rows` is False. `blocks_for` takes the stored name and the values of a matrix and
    returns the blocks that are written in its place, for kinds that the library does not quantise to.
    """
    family = families_by_name()[config.family]
    gguf = family.gguf or families_by_architecture()[family.gguf_name or ""][1]
    writer = GGUFWriter(path, gguf.architecture)
    add_metadata(writer, config, has_latent_rows=has_latent_rows)
    writer.add_token_list([f"token {i}" for i in range(config.vocabulary_size)])

    def add(name: str, values: NDArray[np.float32]) -> None:
        is_wide = values.ndim == 1 or any(part in name for part in wide)
        kind = GGMLQuantizationType.F32 if is_wide else quantization
        if blocks_for is None or is_wide:
            data = quantize(values, kind)
        else:
            kind, data = blocks_for(name, values)
        if is_dequantised:
            kind, data = GGMLQuantizationType.F32, dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    for key, value in fields.items():
        writer.add_key_value(key.replace("__", "."), *value)
    _add_divisors(writer, config)
    for name, tensor in stacked(renamed(tensors, family, gguf)).items():
        values = tensor.numpy().astype(np.float32)
        if name.endswith("kv_b_proj.weight") and config.latent is not None and has_latent_rows:
            for stored, matrices in _products(gguf_name(name, gguf), values, config.query_heads, config.latent):
                add(stored, matrices)
            continue
        if config.norm_offset and name.endswith("norm.weight"):
            values = values + np.float32(config.norm_offset)
        if gguf.interleaves_rotary and (".q_proj." in name or ".k_proj." in name):
            heads = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        add(gguf_name(name, gguf), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: GGUFWriter, config: ModelConfig, *, has_latent_rows: bool = True) -> None:
    """Describe a model, but for its tokens."""
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    _add_layers(writer, config)
    writer.add_rope_freq_base(config.rotary.theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_eos_token_id(config.eos_token_ids[0])
    if config.latent is not None:
        _add_latent(writer, config, config.latent, has_rows=has_latent_rows)
    _add_kinds(writer, config)


def _add_divisors(writer: GGUFWriter, config: ModelConfig) -> None:
    if config.rotary.long_divisors:
        writer.add_tensor("rope_factors_short.weight", np.array(config.rotary.frequency_divisors, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(config.rotary.long_divisors, np.float32))
    elif config.rotary.frequency_divisors and config.family not in _SCALED_BY_FIELDS:
        writer.add_tensor("rope_freqs.weight", np.array(config.rotary.frequency_divisors, np.float32))


def _add_layers(writer: GGUFWriter, config: ModelConfig) -> None:
    # A layer of multi-token prediction follows, whose tensors are not read.
    predicting = int(config.family == "glm4_moe")
    writer.add_block_count(config.layers + predicting)
    writer.add_nextn_predict_layers(predicting)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    if config.latent is None:
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.rotary.rotated or config.head_dim)


def _add_latent(writer: GGUFWriter, config: ModelConfig, latent: LatentConfig, *, has_rows: bool) -> None:
    writer.add_rope_dimension_count(latent.rotary_dim)
    writer.add_kv_lora_rank(latent.rank)
    if latent.query_rank is not None:
        writer.add_q_lora_rank(latent.query_rank)
    if has_rows:
        writer.add_key_length(latent.row_width)
        writer.add_value_length(latent.rank)
        writer.add_key_length_mla(latent.query_dim)
        writer.add_value_length_mla(latent.value_dim)
    else:
        writer.add_key_length(latent.query_dim)
        writer.add_value_length(latent.value_dim)
    if config.rotary.frequency_divisors:
        assert config.attention_scale is not None
        growth = math.sqrt(config.attention_scale * math.sqrt(latent.query_dim))
        writer.add_rope_scaling_yarn_log_mul((growth - 1) / math.log(max(config.rotary.frequency_divisors)))


def _products(
    name: str, values: NDArray[np.float32], heads: int, latent: LatentConfig
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the two parts of the matrix that makes keys and values of latent vectors; that of keys is transposed."""
    keys, made = np.split(values.reshape(heads, -1, latent.rank), [latent.content_dim], axis=1)
    yield name.replace("attn_kv_b", "attn_k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))
    yield name.replace("attn_kv_b", "attn_v_b"), np.ascontiguousarray(made)


def _add_experts(writer: GGUFWriter, moe: MoeConfig) -> None:
    writer.add_expert_count(moe.experts)
    writer.add_expert_used_count(moe.experts_per_token)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    if moe.routes_in_float32:
        _add_groups(writer, moe)
    elif moe.shared is not None:
        writer.add_expert_shared_feed_forward_length(moe.shared.intermediate_size)


def _add_groups(writer: GGUFWriter, moe: MoeConfig) -> None:
    kinds = {RouterScores.SOFTMAX: ExpertGatingFuncType.SOFTMAX, RouterScores.SIGMOID: ExpertGatingFuncType.SIGMOID}
    writer.add_leading_dense_block_count(len(moe.dense_layers))
    writer.add_expert_gating_func(kinds[moe.scores])
    writer.add_expert_weights_scale(moe.routing_scale)
    writer.add_expert_weights_norm(moe.normalizes_routing_weights)
    writer.add_expert_shared_count(moe.shared.intermediate_size // moe.intermediate_size if moe.shared else 0)
    if moe.groups is not None:
        writer.add_expert_group_count(moe.groups.count)
        writer.add_expert_group_used_count(moe.groups.chosen)


def _add_kinds(writer: GGUFWriter, config: ModelConfig) -> None:
    """Add what only some architectures have."""
    if config.moe is not None:
        _add_experts(writer, config.moe)
    if config.windows:
        writer.add_sliding_window(next(window for window in config.windows if window is not None))
        writer.add_sliding_window_pattern([window is not None for window in config.windows])
    if config.family == "gemma3_text":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rotary.frequency_divisors[0])
    if config.rotary.frequency_divisors and config.family in _SCALED_BY_FIELDS[1:]:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(max(config.rotary.frequency_divisors))
        # Of the tiny model.
        writer.add_rope_scaling_orig_ctx_len(32)
    if config.logits_softcap is not None:
        writer.add_final_logit_softcapping(config.logits_softcap)
    if config.attention_softcap is not None:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.rotary.long_divisors:
        writer.add_rope_scaling_attn_factors(config.rotary.amplitude)
        writer.add_rope_scaling_orig_ctx_len(config.rotary.original_context)
    if config.family.startswith("granite"):
        assert config.attention_scale is not None
        writer.add_attention_scale(config.attention_scale)
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(config.logits_divisor)


def renamed(tensors: Mapping[str, torch.Tensor], family: Family, gguf: GgufFamily) -> dict[str, torch.Tensor]:
    """Return `tensors` under the engine's names; matrices that GGUF files do not store as one are cut."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = {
            ours: theirs
            for ours, theirs in family.tensors.items()
            if isinstance(theirs, StackedPart) and name.endswith(f".{theirs.name}")
        }
        if parts:
            for ours, part in parts.items():
                outputs = tensor.transpose(1, 2) if part.is_transposed else tensor
                whole = name.removesuffix(part.name) + ours.replace("*.", "")
                result[whole] = outputs[:, part.first :: part.step].contiguous()
            continue
        for ours, theirs in family.tensors.items():
            if isinstance(theirs, StackedPart):
                continue
            number = r"(\d+)" if "*" in theirs else ""
            match = re.fullmatch(
                rf"(model\.layers\.\d+\.){re.escape(theirs).replace(re.escape('*'), number)}(\.\w+)", name
            )
            if match:
                place = f"{match[2]}." if number else ""
                name = match[1] + ours.replace("*.", place) + match[match.lastindex or 0]
                break
            if name.endswith(f".{theirs}"):  # a tensor without `.weight`
                name = name.removesuffix(theirs) + ours
                break
        if "gate_up_proj" in name and "mlp.gate_up_proj" not in gguf.tensors:
            gate, up = tensor.chunk(2, dim=-2)
            result |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            result[name] = tensor
    return result


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` with the matrices of all experts in one, [experts, rows, columns]."""
    result: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        whole, expert = split_expert(name)
        if expert is None:
            result[name] = tensor
        else:
            experts.setdefault(whole, {})[expert] = tensor
    for whole, matrices in experts.items():
        result[whole] = torch.stack([matrices[i] for i in range(len(matrices))])
    return result
