"""Parses `quantization_config` of a config.json: the scales of weights that are stored in FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.model.config import StoredScales

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPPORTED = "FP8 with a scale for each channel or tensor, and activations that are scaled token by token, is"
_FORMATS = ("float-quantized", "naive-quantized", None)
_STRATEGIES = {"channel": StoredScales.CHANNEL, "tensor": StoredScales.TENSOR}


def stored_scales(quantization: Mapping[str, Any]) -> StoredScales:
    """Return how FP8 weights of a checkpoint are scaled.

    Read are what llm-compressor's scheme FP8_DYNAMIC writes (`compressed-tensors`), and `fp8` with a scale for each
    tensor. Layers that are left out of it are known by the type of their tensors.

    Raises:
        ConfigurationError: the scheme is another one; the message names it.
    """
    method = quantization.get("quant_method")
    if quantization.get("kv_cache_scheme"):
        raise _refusal("kv_cache_scheme: quantised keys and values are")
    match method:
        case "fp8":
            return _fp8(quantization)
        case "compressed-tensors":
            return _compressed_tensors(quantization)
        case _:
            raise _refusal(f"weights quantised by {method!r} are")


def _fp8(quantization: Mapping[str, Any]) -> StoredScales:
    if quantization.get("weight_block_size"):
        raise _refusal(
            f"weight_block_size: FP8 weights with a scale for each block {quantization['weight_block_size']} are"
        )
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise _refusal(f"activation_scheme: activations scaled by {scheme!r} numbers are")
    return StoredScales.TENSOR


def _compressed_tensors(quantization: Mapping[str, Any]) -> StoredScales:
    if quantization.get("format") not in _FORMATS:
        raise _refusal(f"format: weights stored as {quantization['format']!r} are")
    if quantization.get("sparsity_config"):
        raise _refusal("sparsity_config: sparse weights are")
    groups = list((quantization.get("config_groups") or {}).values())
    found = {_group_scales(group) for group in groups}
    if len(found) != 1:
        raise _refusal(f"config_groups: {len(found)} different schemes in one checkpoint are")
    return found.pop()


def _group_scales(group: Mapping[str, Any]) -> StoredScales:
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        raise _refusal(f"config_groups: weights of {weights.get('num_bits')} bits, {weights.get('type')!r}, are")
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise _refusal(f"config_groups: FP8 weights with a scale for each {strategy!r} are")
    if not weights.get("symmetric", True):
        raise _refusal("config_groups: weights with zero points are")
    kind = (activations.get("type"), activations.get("num_bits"), activations.get("strategy"))
    if kind != ("float", 8, "token") or not activations.get("dynamic"):
        when = "dynamic" if activations.get("dynamic") else "static"
        raise _refusal(f"config_groups: input_activations {kind}, {when}, are")
    return _STRATEGIES[strategy]


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(f"quantization_config: {what} not supported; {_SUPPORTED}")
