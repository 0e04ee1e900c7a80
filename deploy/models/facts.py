"""Facts of a model that need no weights: family, sizes, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from common.heads import only_embeds, read_head, tasks_of
from deploy.models.support import Service, support_of, support_of_gguf
from services.worker.engine.model.json_fields import MAX_LAYERS
from services.worker.engine.quantization.formats import Mxfp4Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from common.heads import Head
    from deploy.models.support import Support
    from services.worker.engine.model.config import LatentConfig, ModelConfig, RecurrentConfig

# Bytes of a checkpoint's elements, by `dtype` of config.json.
_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# 4 bits, and a scale of 16 bits for each 128 elements.
_FOUR_BITS: Final = 4 + 16 / 128
# 4 bits, and a scale of 8 bits for each 32 elements; a CPU holds scales of 16 bits.
_MXFP4_BITS: Final = 4 + 8 / 32


@dataclass(frozen=True, slots=True)
class Evidence:
    """A model's configuration and files, from a hub, a cache or a directory."""

    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    # Bytes of each file that would be used.
    files: Mapping[str, int] = field(default_factory=dict)
    # Bytes of all tensors by the safetensors index, or else the size of the weights' file.
    weight_bytes: int | None = None
    # Elements of all tensors, where the hub or a GGUF file states them.
    stated_parameters: int | None = None
    # Of a GGUF file: its architecture, and its shape if its header could be read.
    architecture: str | None = None
    gguf_config: ModelConfig | None = None
    gguf_context: int | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False
    # A pooling module of sentence-transformers.
    has_pooling: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Answers about one model; None where nothing is known. Memory is that of the weights, in bytes."""

    family: str
    service: Service
    reason: str
    parameters: int | None
    download_bytes: int
    memory: Mapping[str, int] | None
    quantization: str | None
    max_context: int | None
    kv_bytes_per_token: int | None
    """In bfloat16, over all layers."""
    kv_bytes_at_max_context: int | None
    """Of one sequence; layers with a window hold no more than that."""
    state_bytes: int | None
    """Of the recurrent states of one sequence, of any length; None: no layer has one."""
    has_tokenizer: bool
    has_chat_template: bool
    tasks: tuple[str, ...]
    """Tasks that a server offers with the model; empty if it is not served."""
    labels: tuple[str, ...]
    """Those of its classification head."""


def facts_of(evidence: Evidence) -> ModelFacts:
    """Compute the facts of a model."""
    support = _support(evidence)
    shape = evidence.gguf_config or support.config
    text = _text_part(evidence.config)
    parameters, layers = _parameters(evidence, support)
    context = shape.max_context if shape else evidence.gguf_context or _number(text, "max_position_embeddings")
    by_layer = _kv_of_layers(shape, text)
    if support.service is Service.ENCODER:  # it keeps none
        by_layer = ()
    windows = shape.windows if shape else ()
    quantised = 0 if shape is None else _mxfp4_parameters(shape)
    return ModelFacts(
        family=evidence.architecture or str(text.get("model_type") or evidence.config.get("model_type") or "unknown"),
        service=support.service,
        reason=support.reason,
        parameters=parameters,
        download_bytes=sum(evidence.files.values()),
        memory=_memory(parameters, layers, quantised) if parameters and layers is not None else None,
        quantization=_quantization(evidence.config),
        max_context=context,
        kv_bytes_per_token=sum(by_layer) or None,
        kv_bytes_at_max_context=_kv_of_sequence(by_layer, windows, context),
        state_bytes=_state_bytes(shape.recurrent) if shape and shape.recurrent else None,
        has_tokenizer=evidence.has_tokenizer,
        has_chat_template=evidence.has_chat_template,
        tasks=_tasks(evidence, support),
        labels=head.labels if (head := _head(evidence, support)) else (),
    )


def _state_bytes(recurrent: RecurrentConfig) -> int:
    matrix = recurrent.value_heads * recurrent.key_dim * recurrent.value_dim
    # Matrices are in float32, inputs of the convolution in bfloat16.
    return len(recurrent.layers) * (4 * matrix + 2 * (recurrent.kernel - 1) * recurrent.conv_width)


def _count_recurrent(recurrent: RecurrentConfig, hidden: int) -> tuple[int, int]:
    """Return the elements of the matrices of all recurrent layers, and those of their other tensors."""
    heads, values = recurrent.value_heads, recurrent.value_heads * recurrent.value_dim
    matrices = hidden * (recurrent.conv_width + 2 * values + 2 * heads)
    vectors = recurrent.conv_width * recurrent.kernel + 2 * heads + recurrent.value_dim
    return len(recurrent.layers) * matrices, len(recurrent.layers) * vectors


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the elements of all tensors of a decoder with an own implementation, and those of the layers' matrices."""
    hidden = config.hidden_size
    matrices = vectors = 0
    for layer in range(config.layers):
        if not config.is_recurrent(layer):
            of_layer = _count_attention(config, layer)
            matrices, vectors = matrices + of_layer[0], vectors + of_layer[1]
        moe = config.moe_of(layer)
        columns = config.intermediate_size if moe is None else moe.experts * moe.intermediate_size
        columns += config.intermediate_size if moe is not None and moe.is_beside_dense else 0
        if moe is not None and moe.shared is not None:
            columns += moe.shared.intermediate_size
        matrices += 3 * hidden * columns + (0 if moe is None else moe.experts * hidden)
    vectors += hidden + config.layers * config.has_layer_scales
    vectors += 2 * (config.pre_norms + config.post_norms) * hidden * config.layers
    if config.recurrent is not None:
        in_layers, in_vectors = _count_recurrent(config.recurrent, hidden)
        matrices, vectors = matrices + in_layers, vectors + in_vectors
    for moe in filter(None, map(config.moe_of, range(config.layers))):
        if moe.has_biases:
            vectors += moe.experts * (1 + 2 * moe.intermediate_size + hidden)
        if moe.shared is not None and moe.shared.is_gated:
            vectors += hidden
        vectors += 4 * hidden * moe.is_beside_dense + moe.experts * moe.has_expert_scales
    vectors += config.layers * config.query_heads if config.has_sinks else 0
    if config.mlp_bias:
        vectors += config.layers * (2 * config.intermediate_size + hidden)
    head = config.labels if config.labels else 0 if config.tied_embeddings else config.vocabulary_size
    embeddings = (config.vocabulary_size + head) * hidden
    return matrices + vectors + embeddings, matrices


def _head(evidence: Evidence, support: Support) -> Head | None:
    return None if support.service is Service.REFUSED else read_head(evidence.config)


def _tasks(evidence: Evidence, support: Support) -> tuple[str, ...]:
    if support.service in (Service.REFUSED, Service.UNKNOWN):
        return ()
    embeds = support.service is Service.ENCODER or only_embeds(evidence.config, has_pooling=evidence.has_pooling)
    return tuple(task.value for task in tasks_of(_head(evidence, support), generates=not embeds))


def _count_attention(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Return the elements of a layer's projections, and of its other tensors but the norms of hidden states."""
    own, hidden = config.at(layer), config.hidden_size
    queries, keys = own.query_heads * own.head_dim, own.kv_heads * own.head_dim
    has_values = not (own.keys_are_values and own.window_of(layer) is None)
    matrices, norms = 2 * hidden * queries + (1 + has_values) * hidden * keys, 0
    if config.latent is not None:
        matrices, norms = _count_latent(config.latent, config)
    matrices += hidden * queries if config.gated_attention else 0
    vectors = 2 * own.head_dim if config.qk_norm else 0
    vectors += norms + (queries + keys if config.projection_norm else 0)
    vectors += (queries + (1 + has_values) * keys if config.qkv_bias else 0) + (hidden if config.output_bias else 0)
    return matrices, vectors


def _count_latent(latent: LatentConfig, config: ModelConfig) -> tuple[int, int]:
    """Return the elements of a layer's projections, and of the norms within them."""
    hidden, heads = config.hidden_size, config.query_heads
    inputs = latent.query_rank or hidden
    compression = hidden * ((latent.query_rank or 0) + latent.row_width)
    expansion = heads * (inputs * latent.query_dim + latent.rank * (latent.content_dim + latent.value_dim))
    output = hidden * heads * latent.value_dim
    return compression + expansion + output, (latent.query_rank or 0) + latent.rank


def _support(evidence: Evidence) -> Support:
    if evidence.architecture is not None:
        return support_of_gguf(evidence.architecture)
    return support_of(evidence.config, evidence.generation)


def _parameters(evidence: Evidence, support: Support) -> tuple[int | None, int | None]:
    """Return the number of parameters, and of those that quantization would make smaller."""
    config = evidence.gguf_config or support.config
    if config is not None and (evidence.gguf_config is not None or support.service is Service.OWN):
        return count_parameters(config)
    text = _text_part(evidence.config)
    total = evidence.stated_parameters
    if total is None and _quantization(evidence.config) is None and evidence.weight_bytes:
        dtype = evidence.config.get("dtype") or evidence.config.get("torch_dtype") or text.get("torch_dtype")
        total = evidence.weight_bytes // _ELEMENT_BYTES.get(str(dtype or "float32"), 2)
    vocabulary, hidden = _number(text, "vocab_size"), _number(text, "hidden_size")
    if total is None or vocabulary is None or hidden is None:
        return total, total
    tied = config.tied_embeddings if config else bool(text.get("tie_word_embeddings", False))
    return total, max(total - vocabulary * hidden * (1 if tied else 2), 0)


def _mxfp4_parameters(config: ModelConfig) -> int:
    """Return the elements of experts' matrices, if they are stored in MXFP4."""
    if config.moe is None or not isinstance(config.stored_format, Mxfp4Format):
        return 0
    layers = sum(config.moe_of(i) is not None for i in range(config.layers))
    return layers * config.moe.experts * 3 * config.hidden_size * config.moe.intermediate_size


def _memory(parameters: int, matrices: int, in_mxfp4: int) -> dict[str, int]:
    """Return bytes of the weights with the layers' matrices in each type, and the rest in bfloat16.

    With elements that are stored in MXFP4, which cannot be quantised otherwise, only of this and of all in bfloat16.
    """
    if in_mxfp4:
        experts = math.ceil(in_mxfp4 * _MXFP4_BITS / 8)
        return {"bf16": 2 * parameters, "mxfp4": 2 * (parameters - in_mxfp4) + experts}
    rest = 2 * (parameters - matrices)
    return {
        "bf16": 2 * parameters,
        "fp8": rest + matrices,
        "4 bits": rest + math.ceil(matrices * _FOUR_BITS / 8),
    }


def _kv_of_layers(shape: ModelConfig | None, text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the bytes of one token's keys and values in each layer that attends; empty: nothing is known."""
    if shape is not None:
        attending = (layer for layer in range(shape.layers) if not shape.is_recurrent(layer))
        return tuple(2 * shape.at(layer).kv_width for layer in attending)
    each, layers = _kv_of_layer(text), _number(text, "num_hidden_layers")
    return (each,) * layers if each and layers and 0 < layers <= MAX_LAYERS else ()


def _kv_of_layer(text: Mapping[str, Any]) -> int | None:
    """Return the bytes of one token's keys and values in a layer, in bfloat16, from a config.json."""
    if text.get("kv_lora_rank"):  # multi-head latent attention keeps one compressed row
        return 2 * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0))
    heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
    if not heads or not hidden:
        return None
    return 4 * (_number(text, "num_key_value_heads") or heads) * (_number(text, "head_dim") or hidden // heads)


def _kv_of_sequence(by_layer: tuple[int, ...], windows: tuple[int | None, ...], context: int | None) -> int | None:
    if not by_layer or not context:
        return None
    seen = windows or (None,) * len(by_layer)
    return sum(
        each * (context if window is None else min(window, context))
        for each, window in zip(by_layer, seen, strict=True)
    )


def _quantization(config: Mapping[str, Any]) -> str | None:
    described = config.get("quantization_config") or _text_part(config).get("quantization_config")
    return str(described.get("quant_method")) if isinstance(described, dict) else None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) and text else config


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None
