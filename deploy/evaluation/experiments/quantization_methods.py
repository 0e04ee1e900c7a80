"""Published methods that choose quantised weights by a model's activations, instead of rounding to nearest.

- GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after another, and the error of each is made
  up for by those that are not rounded yet, as the inverse of the inputs' second moments says. Layers follow each other,
  with activations of the quantised ones before. With act-order, columns with the largest moments come first.
- AWQ (Lin et al. 2023, arXiv 2306.00978): inputs that are large on average are scaled up in the weights and down in
  what computes them, by the power of their mean that gives the smallest error of the outputs. Inputs of the
  attention's output are not scaled: its values are shared by several query heads.
- Static FP8: the largest activation that a matrix has seen is the largest of the range.

All are computed in float32 on the host, for models that `transformers` calls Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigurationError
from tests.services.worker.engine.quantization.stored_formats import (
    FP8_STATIC,
    SCHEMES,
    Integers,
    Stored,
    grid,
    rounded,
    static_fp8,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.services.worker.engine.quantization.stored_formats import IntegerLayout

# Added to the diagonal of second moments, in parts of its mean, so that they have an inverse.
DAMPING = 0.01
# How many powers of the inputs' means AWQ tries, from 0 (rounding to nearest) on.
POWERS = 20
_FP8_LARGEST: Final = 448.0
# Projections of a layer that share their inputs, by what computes these.
_SHARED_INPUTS: Final = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}


@dataclass(slots=True)
class Inputs:
    """Statistics of the inputs of one matrix on the calibration texts."""

    moments: torch.Tensor  # [in, in], the mean of products
    means: torch.Tensor  # [in], of absolute values
    largest: torch.Tensor  # of absolute values


@torch.inference_mode()
def choose(directory: Path, scheme: str, texts: Sequence[Sequence[int]]) -> dict[str, Stored]:
    """Return the matrices of the Llama in `directory` in a scheme of the tests', by the names of their weights.

    AWQ rewrites the directory's tensors: it moves factors between them, which leaves what they compute as it was.

    Raises:
        ConfigurationError: no method chooses weights in this scheme.
    """
    # A directory of this machine's, without a tokenizer.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    layout = SCHEMES[scheme].layout
    if SCHEMES[scheme].config == FP8_STATIC:
        return {name: _static(matrix.weight, seen) for name, matrix, seen in _each(model, texts)}
    if layout is None:
        raise ConfigurationError(f"{scheme}: weights of this format are rounded to nearest by the published tools, too")
    if SCHEMES[scheme].config["quant_method"] == "awq":
        return _awq(directory, model, layout, texts)
    chosen = {}
    for name, matrix, seen in _each(model, texts):
        integers = gptq_integers(matrix.weight, seen.moments, layout)
        chosen[name] = layout.pack(integers)
        matrix.weight.copy_(chosen[name].weight)
    return chosen


def gptq_integers(weight: torch.Tensor, moments: torch.Tensor, layout: IntegerLayout) -> Integers:
    """Return the integers that GPTQ chooses for a matrix [out, in], whose inputs have these second moments [in, in]."""
    width, largest = weight.shape[1], 2**layout.bits - 1
    size = width if layout.size == -1 else layout.size
    order = moments.diagonal().argsort(descending=True) if layout.act_order else torch.arange(width)
    left, factors = weight[:, order].clone(), _inverse_factors(moments[order][:, order])
    values, scales, zero_points = torch.zeros(weight.shape, dtype=torch.int32), [], []
    for start in range(0, width, size):
        stop = min(start + size, width)
        scale, zero = grid(left[:, start:stop], layout.bits, symmetric=layout.symmetric)
        scales.append(scale)
        zero_points.append(zero.int())
        errors = torch.empty(len(weight), stop - start)
        for i in range(start, stop):
            column = left[:, i : i + 1]
            integers = (column / scale + zero).round().clamp(0, largest)
            values[:, order[i]] = integers[:, 0].int()
            error = (column - (integers - zero) * scale) / factors[i, i]
            left[:, i + 1 : stop] -= error * factors[i, i + 1 : stop]
            errors[:, i - start] = error[:, 0]
        # Columns of later groups, at once.
        left[:, stop:] -= errors @ factors[start:stop, stop:]
    groups = torch.empty(width, dtype=torch.int64)
    groups[order] = torch.arange(width) // size
    return Integers(values, torch.cat(scales, dim=1).half(), torch.cat(zero_points, dim=1), groups)


def awq_factors(weights: Sequence[torch.Tensor], seen: Inputs, layout: IntegerLayout) -> torch.Tensor:
    """Return the factors [in] of inputs with which matrices that share them have the smallest error of outputs."""
    best, least = torch.ones_like(seen.means), float("inf")
    for power in range(POWERS):
        factors = seen.means.clamp_min(1e-4) ** (power / POWERS)
        factors /= (factors.max() * factors.min()).sqrt()
        error = sum(
            output_error(
                rounded(weight * factors, layout.bits, layout.size, symmetric=layout.symmetric).weight.float() / factors
                - weight,
                seen.moments,
            )
            for weight in weights
        )
        if error < least:
            best, least = factors, error
    return best


def output_error(difference: torch.Tensor, moments: torch.Tensor) -> float:
    """Return the mean square error of outputs, summed, where weights [out, in] differ by so much."""
    return float(((difference @ moments) * difference).sum())


def _inverse_factors(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the damped moments' inverse."""
    damped = moments + DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor


def _static(weight: torch.Tensor, seen: Inputs) -> Stored:
    stored = static_fp8(weight)
    return Stored({**stored.tensors, "input_scale": seen.largest / _FP8_LARGEST}, stored.weight)


def _awq(directory: Path, model: Any, layout: IntegerLayout, texts: Sequence[Sequence[int]]) -> dict[str, Stored]:
    inputs = {name: seen for name, _, seen in _each(model, texts)}
    modules = dict(model.named_modules())
    for layer in range(len(model.model.layers)):
        prefix = f"model.layers.{layer}"
        for source, names in _SHARED_INPUTS.items():
            matrices = [modules[f"{prefix}.{name}"] for name in names]
            factors = awq_factors([each.weight for each in matrices], inputs[f"{prefix}.{names[0]}.weight"], layout)
            before = modules[f"{prefix}.{source}"].weight
            before.div_(factors if before.ndim == 1 else factors[:, None])
            for each in matrices:
                each.weight.mul_(factors)
    tensors = load_file(directory / "model.safetensors")
    changed = model.state_dict()
    save_file({name: changed[name].contiguous() for name in tensors}, directory / "model.safetensors")
    return {name: layout.store(changed[name]) for name in inputs}


def _each(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[tuple[str, torch.nn.Linear, Inputs]]:
    """Give each projection, layer by layer, with its inputs after all changes to earlier layers."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *([0] * (longest - len(text)))] for text in texts])
    is_token = torch.arange(longest)[None, :] < torch.tensor([len(text) for text in texts])[:, None]
    states, options = _layer_inputs(model, ids)
    for index, layer in enumerate(model.model.layers):
        seen: dict[str, Inputs] = {}
        projections = {name: each for name, each in layer.named_modules() if isinstance(each, torch.nn.Linear)}
        hooks = [each.register_forward_pre_hook(_recorder(name, seen, is_token)) for name, each in projections.items()]
        layer(states, **options)
        for hook in hooks:
            hook.remove()
        for name, each in projections.items():
            yield f"model.layers.{index}.{name}.weight", each, seen[name]
        states = layer(states, **options)


def _layer_inputs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Return the arguments of the first layer's call: its positional one, and those by name."""
    calls: list[tuple[torch.Tensor, Mapping[str, Any]]] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _module, args, options: calls.append((args[0], options)), with_kwargs=True
    )
    model.model(ids, use_cache=False)
    hook.remove()
    ((states, options),) = calls
    return states, options


def _recorder(name: str, seen: dict[str, Inputs], is_token: torch.Tensor) -> Any:
    def record(_module: object, given: tuple[torch.Tensor]) -> None:
        rows = given[0][is_token]
        seen[name] = Inputs(rows.t() @ rows / len(rows), rows.abs().mean(dim=0), rows.abs().max())

    return record
