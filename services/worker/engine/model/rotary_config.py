"""Rotary position embedding as a config describes it: how frequencies are stretched for long contexts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.model.config import RotaryConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_NO_SCALING = "default"


def head_order(rotary: RotaryConfig, head_dim: int) -> tuple[int, ...] | None:
    """Return which component of a checkpoint's head stands at each place of ours; None: the same one.

    Ours has the first component of each rotated pair in the first half and the second one at the same place of the
    second half. Components that are not rotated fill both up; they turn by 0. Scores do not depend on the order.
    """
    rotated = rotary.rotated or head_dim
    if rotated == head_dim and not rotary.is_interleaved:
        return None
    if rotary.is_interleaved:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    rest = range(rotated, head_dim)
    middle = len(rest) // 2
    return (*first, *rest[:middle], *second, *rest[middle:])


def read_rotary(
    parameters: Mapping[str, Any], theta: float, head_dim: int, max_context: int, *, can_be_partial: bool = False
) -> RotaryConfig:
    """Read `rope_parameters` of a config.json, or `rope_scaling` as older ones call it.

    Args:
        parameters: what is there; empty: nothing is stretched.
        theta: the base where `parameters` has none.
        head_dim: components of a head.
        max_context: the model's longest context, from which a missing factor follows.
        can_be_partial: whether the family may rotate a part of each head.

    Raises:
        ConfigurationError: the type is not supported.
        KeyError: a parameter is missing.
    """
    theta = float(parameters.get("rope_theta", theta))
    share = parameters.get("partial_rotary_factor") or 1.0
    if _type_of(parameters) == "proportional":
        # The first pairs turn as those of heads that are rotated as a whole, the others by 0.
        turning, pairs = int(share * head_dim // 2), head_dim // 2
        factor = float(parameters.get("factor", 1.0))
        return RotaryConfig(theta, (factor,) * turning + (math.inf,) * (pairs - turning))
    if share == 1.0:
        return _read_scaling(parameters, theta, head_dim, max_context)
    rotated = int(head_dim * share)
    if not can_be_partial:
        raise ConfigurationError("partial_rotary_factor: rotating a part of each head is not supported in this family")
    if rotated % 2 or not 0 < rotated < head_dim:
        raise ConfigurationError(
            f"partial_rotary_factor: {rotated} of {head_dim} components cannot be rotated in pairs"
        )
    return replace(_read_scaling(parameters, theta, rotated, max_context), rotated=rotated)


def _read_scaling(parameters: Mapping[str, Any], theta: float, rotated: int, max_context: int) -> RotaryConfig:
    match _type_of(parameters):
        case "default" | "mrope":
            # Texts have the same coordinate on all axes; `vision/axes.py` has those of images.
            return RotaryConfig(theta)
        case "linear":
            return RotaryConfig(theta, (float(parameters["factor"]),) * (rotated // 2))
        case "llama3":
            return RotaryConfig(theta, llama3_divisors(theta, rotated, parameters))
        case "yarn":
            factor = _yarn_factor(parameters, max_context)
            return RotaryConfig(
                theta, yarn_divisors(theta, rotated, factor, parameters), _yarn_amplitude(factor, parameters)
            )
        case "longrope" | "su":
            original = int(parameters["original_max_position_embeddings"])
            short, long = (tuple(map(float, parameters[name])) for name in ("short_factor", "long_factor"))
            if {len(short), len(long)} != {rotated // 2}:
                raise ConfigurationError(f"short_factor and long_factor: {rotated // 2} factors each are expected")
            amplitude = _longrope_amplitude(parameters, max_context / original, original)
            return RotaryConfig(theta, short, amplitude, long_divisors=long, original_context=original)
        case other:
            raise ConfigurationError(f"rope type {other!r} is not supported; supported: {', '.join(ROTARY_TYPES)}")


def _type_of(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type", parameters.get("type", _NO_SCALING)))


def llama3_divisors(theta: float, head_dim: int, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Return by how much Llama 3.1 divides each frequency: long waves by `factor`, short ones not, between smoothly."""
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength > original / low:
            divisors.append(factor)
        elif wavelength < original / high:
            divisors.append(1.0)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(divisors)


def yarn_divisors(theta: float, head_dim: int, factor: float, parameters: Mapping[str, Any]) -> tuple[float, ...]:
    """Return by how much YaRN divides each frequency (Peng et al. 2023, section 3.2).

    Components that turn more than `beta_fast` times within the original context stay, those that turn less than
    `beta_slow` times are divided by `factor`, and in between weights go linearly with the component's number.
    """
    original = float(parameters["original_max_position_embeddings"])

    def component(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = component(parameters.get("beta_fast") or 32.0), component(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    divisors = []
    for i in range(head_dim // 2):
        stretched = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        divisors.append(1.0 / (stretched / factor + (1.0 - stretched)))
    return tuple(divisors)


def _longrope_amplitude(parameters: Mapping[str, Any], factor: float, original: int) -> float:
    """Return the factor of queries and keys (Ding et al. 2024); it does not depend on the length of a sequence."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = parameters.get("factor") or factor
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _yarn_factor(parameters: Mapping[str, Any], max_context: int) -> float:
    factor = parameters.get("factor")
    return float(max_context / parameters["original_max_position_embeddings"] if factor is None else factor)


def _yarn_amplitude(factor: float, parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    scale, scale_of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_of_all:
        return yarn_amplitude(factor, float(scale)) / yarn_amplitude(factor, float(scale_of_all))
    return yarn_amplitude(factor)


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """Return by how much YaRN raises queries and keys, so that the softmax stays as sharp over a longer context."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
