"""Parses `quantization_config` of a config.json: the format of weights that are stored quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.quantization.formats import (
    FP8_BLOCK,
    Fp8Format,
    GroupedFormat,
    GroupedLayout,
    Int8Format,
    Mxfp4Format,
    StoredScales,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.worker.engine.quantization.formats import StoredFormat

_SUPPORTED = (
    "supported are FP8 (one scale per channel, per tensor or per block of 128 x 128), AWQ, GPTQ, MXFP4, and "
    "compressed-tensors with FP8, INT8 or packed 4- and 8-bit weights"
)
_BLOCK = [FP8_BLOCK, FP8_BLOCK]
_BITS = (4, 8)
_SMALLEST_GROUP = 16
_FP8_STRATEGIES = {"channel": StoredScales.CHANNEL, "tensor": StoredScales.TENSOR, "block": StoredScales.BLOCK}
# compressed-tensors names the layout of stored weights; the first three are FP8's.
_FP8_FORMATS = ("float-quantized", "naive-quantized", None)
_COMPRESSED_FORMATS = (*_FP8_FORMATS, "int-quantized", "pack-quantized")


def stored_format(quantization: Mapping[str, Any]) -> StoredFormat:
    """Read the storage format of a checkpoint's matrices from its configuration.

    Layers that are left out of the scheme are recognised by the names and types of their tensors.

    Raises:
        ConfigurationError: the scheme is another one; the message names it.
    """
    method = quantization.get("quant_method")
    _check_kv_scheme(quantization.get("kv_cache_scheme") or {})
    match method:
        case "fp8":
            return _fp8(quantization)
        case "awq":
            return _awq(quantization)
        case "gptq":
            return _gptq(quantization)
        case "compressed-tensors":
            return _compressed_tensors(quantization)
        case "mxfp4":
            return Mxfp4Format()
        case _:
            raise _refusal(f"weights quantised by {method!r} are")


def _check_kv_scheme(scheme: Mapping[str, Any]) -> None:
    """Accept scales of keys and values in FP8, which kv_dtype=fp8 uses; with other types they are left out."""
    if not scheme:
        return
    kind = (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor"))
    if kind not in (("float", 8, "tensor"), ("float", 8, "attn_head")):
        raise _refusal(f"kv_cache_scheme: keys and values in {kind} are")
    if not scheme.get("symmetric", True):
        raise _refusal("kv_cache_scheme: keys and values with zero points are")


def _fp8(quantization: Mapping[str, Any]) -> Fp8Format:
    block = quantization.get("weight_block_size")
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refusal(f"activation_scheme: activations scaled by {scheme!r} numbers are")
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"fmt: FP8 numbers of the form {quantization['fmt']!r} are")
    if not block:
        return Fp8Format(StoredScales.TENSOR, has_input_scales=scheme == "static")
    if list(block) != _BLOCK:
        raise _refusal(f"weight_block_size: FP8 weights with a scale for each block {list(block)} are")
    if scheme == "static":
        raise _refusal("activation_scheme: 'static' together with weight_block_size is")
    return Fp8Format(StoredScales.BLOCK, scale_suffix="_scale_inv")


def _awq(quantization: Mapping[str, Any]) -> GroupedFormat:
    version = str(quantization.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refusal(f"version: AWQ weights in the layout {version!r} are")
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if bits != 4:
        raise _refusal(f"bits: AWQ weights of {bits} bits are")
    group = _group_size(quantization.get("group_size", quantization.get("q_group_size", 128)))
    return GroupedFormat(GroupedLayout.AWQ, 4, group, bool(quantization.get("zero_point", True)))


def _gptq(quantization: Mapping[str, Any]) -> GroupedFormat:
    bits = _bits(quantization.get("bits", 4))
    layouts = {"gptq": GroupedLayout.GPTQ, "gptq_v2": GroupedLayout.GPTQ_V2}
    layout = quantization.get("checkpoint_format") or "gptq"
    if layout not in layouts:
        raise _refusal(f"checkpoint_format: GPTQ weights stored as {layout!r} are")
    if quantization.get("dynamic"):
        raise _refusal("dynamic: GPTQ weights of different bits or groups in one checkpoint are")
    return GroupedFormat(
        layouts[layout],
        bits,
        _group_size(quantization.get("group_size", 128)),
        # Symmetric weights have zero points, too, which are all the same.
        has_zero_points=True,
        has_group_index=bool(quantization.get("desc_act", False)),
    )


def _compressed_tensors(quantization: Mapping[str, Any]) -> StoredFormat:
    layout = quantization.get("format")
    if layout not in _COMPRESSED_FORMATS:
        raise _refusal(f"format: weights stored as {layout!r} are")
    sparsity = quantization.get("sparsity_config") or {}
    if sparsity and sparsity.get("format") != "dense":
        raise _refusal("sparsity_config: sparse weights are")
    if quantization.get("transform_config"):
        raise _refusal("transform_config: weights transformed by rotations are")
    groups = list((quantization.get("config_groups") or {}).values())
    found = {_group_format(group, layout) for group in groups}
    if len(found) != 1:
        raise _refusal(f"config_groups: {len(found)} different schemes in one checkpoint are")
    return found.pop()


def _group_format(group: Mapping[str, Any], layout: str | None) -> StoredFormat:
    # A group may name its own format where the checkpoint's is "mixed-precision", which is refused before.
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    match layout:
        case "pack-quantized":
            return _packed(weights, activations)
        case "int-quantized":
            return _int8(weights, activations)
        case _:
            return _float8(weights, activations)


def _float8(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> Fp8Format:
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        raise _refusal(f"config_groups: weights of {weights.get('num_bits')} bits, {weights.get('type')!r}, are")
    strategy = weights.get("strategy")
    if strategy not in _FP8_STRATEGIES:
        raise _refusal(f"config_groups: FP8 weights with a scale for each {strategy!r} are")
    if strategy == "block" and list(weights.get("block_structure") or ()) != _BLOCK:
        raise _refusal(f"config_groups: FP8 weights with a scale for each block {weights.get('block_structure')} are")
    _check_symmetry(weights)
    is_dynamic = bool(activations.get("dynamic"))
    kind = (activations.get("type"), activations.get("num_bits"), activations.get("strategy"))
    if strategy == "block":
        is_known = (kind, is_dynamic) == (("float", 8, "group"), True) and activations.get("group_size") == FP8_BLOCK
    else:
        is_known = (kind, is_dynamic) in ((("float", 8, "token"), True), (("float", 8, "tensor"), False))
    if not is_known:
        raise _activations_refusal(kind, is_dynamic=is_dynamic)
    return Fp8Format(_FP8_STRATEGIES[strategy], has_input_scales=not is_dynamic)


def _int8(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> Int8Format:
    if (weights.get("type"), weights.get("num_bits")) != ("int", 8):
        raise _refusal(f"config_groups: weights of {weights.get('num_bits')} bits, {weights.get('type')!r}, are")
    if weights.get("strategy") != "channel":
        raise _refusal(f"config_groups: INT8 weights with a scale for each {weights.get('strategy')!r} are")
    _check_symmetry(weights)
    is_dynamic = bool(activations.get("dynamic"))
    kind = (activations.get("type"), activations.get("num_bits"), activations.get("strategy"))
    if kind != ("int", 8, "token") or not is_dynamic:
        raise _activations_refusal(kind, is_dynamic=is_dynamic)
    if not activations.get("symmetric", True):
        raise _refusal("config_groups: input_activations with zero points are")
    return Int8Format()


def _packed(weights: Mapping[str, Any], activations: Mapping[str, Any]) -> GroupedFormat:
    if weights.get("type") != "int":
        raise _refusal(f"config_groups: packed weights of the type {weights.get('type')!r} are")
    if activations:
        raise _refusal("config_groups: packed weights with quantised input_activations are")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _refusal(f"config_groups: packed weights with a scale for each {strategy!r} are")
    return GroupedFormat(
        GroupedLayout.COMPRESSED,
        _bits(weights.get("num_bits")),
        _group_size(weights.get("group_size") if strategy == "group" else -1),
        has_zero_points=not weights.get("symmetric", True),
        has_group_index=weights.get("actorder") in ("group", "dynamic"),
    )


def _bits(bits: Any) -> int:  # whatever the file says
    if bits not in _BITS:
        raise _refusal(f"weights of {bits} bits are")
    return int(bits)


def _group_size(size: Any) -> int | None:  # whatever the file says
    if size == -1:
        return None
    if not isinstance(size, int) or size < _SMALLEST_GROUP or size % _SMALLEST_GROUP:
        raise _refusal(f"group_size: a scale for each {size} inputs is")
    return size


def _check_symmetry(weights: Mapping[str, Any]) -> None:
    if not weights.get("symmetric", True):
        raise _refusal("config_groups: weights with zero points are")


def _activations_refusal(kind: tuple[Any, ...], *, is_dynamic: bool) -> ConfigurationError:
    return _refusal(f"config_groups: input_activations {kind}, {'dynamic' if is_dynamic else 'static'}, are")


def _refusal(subject: str) -> ConfigurationError:
    return ConfigurationError(f"quantization_config: {subject} not supported; {_SUPPORTED}")
