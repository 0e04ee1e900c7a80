"""Tensor parallelism of models of `transformers`, by the library's own plan of how each matrix is cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigurationError
from services.worker.engine.parallel.shards import split_evenly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.parallel.shards import Span

_WHOLE = "replicated_with_grad_allreduce"  # every rank holds all of it


class LayerSharing:
    """Cuts a decoder's layers in place, so that each rank computes some heads and some columns of feed-forward layers.

    Embeddings, norms, the head and what the plan does not name stay whole on every rank.
    """

    def __init__(self, family: str, heads: Mapping[str, Span], kv_heads: Mapping[str, int], group: RankGroup) -> None:
        """Give this rank `heads`, some of the `kv_heads` of each attention module, and the queries that share them."""
        self._family = family
        self._heads = heads
        self._kv_heads = kv_heads
        self._group = group

    def apply(self, decoder: torch.nn.Module, plan: Mapping[str, str] | None) -> None:
        """Replace weights by this rank's part; outputs of matrices whose columns are cut are summed up over the ranks.

        `plan` has a style of each module or parameter, by its name with `*` for the number of a layer.

        Raises:
            ConfigurationError: the plan, or a matrix in it, is of a kind that is not supported.
        """
        if not plan:
            raise self._refusal("transformers has no plan of tensor parallelism for it")
        styles = {re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")): plan[pattern] for pattern in plan}
        found: list[tuple[str, Any, str]] = []  # torch's modules and parameters are reached by names
        for name, part in (*decoder.named_modules(), *decoder.named_parameters()):
            found += [(name, part, style) for pattern, style in styles.items() if pattern.fullmatch(name)]
        if not found:
            raise self._refusal("transformers' plan of tensor parallelism names none of its layers")
        for name, part, style in found:
            if isinstance(part, torch.nn.Parameter):
                self._cut_parameter(decoder, name, part, style)
            else:
                self._cut_module(name, part, style)

    def _cut_module(self, name: str, module: torch.nn.Module, style: str) -> None:
        if style == _WHOLE:
            return
        if style == "moe_tp_experts":
            module.register_forward_hook(self._summed)
            return
        if style not in ("colwise", "rowwise", "packed_colwise"):
            raise self._refusal(f"its plan has the style {style!r} of {name}, which is not supported")
        if type(module) is not torch.nn.Linear:
            raise self._refusal(f"{name} is a {type(module).__name__}, not a linear layer")
        if style == "rowwise":
            columns = self._part(name, module.in_features)
            _replace(module, "weight", module.weight[:, columns])
            module.in_features = module.weight.shape[1]
            if self._group.rank > 0:
                module.register_parameter("bias", None)
            module.register_forward_hook(self._summed)
            return
        rows = self._rows(name, module.out_features, is_packed=style == "packed_colwise")
        _replace(module, "weight", module.weight[rows])
        module.out_features = module.weight.shape[0]
        bias = dict(module.named_parameters()).get("bias")
        if bias is not None:
            _replace(module, "bias", bias[rows])

    def _cut_parameter(self, decoder: torch.nn.Module, name: str, parameter: torch.nn.Parameter, style: str) -> None:
        """Cut matrices of experts, [experts, outputs, inputs]."""
        owner, _, own_name = name.rpartition(".")
        if parameter.ndim != 3 or style not in ("packed_colwise", "colwise", "rowwise"):
            raise self._refusal(f"its plan has the style {style!r} of {name}, which is not supported")
        if style == "rowwise":
            part = parameter[:, :, self._part(name, parameter.shape[2])]
        else:
            part = parameter[:, self._rows(name, parameter.shape[1], is_packed=style == "packed_colwise")]
        _replace(decoder.get_submodule(owner), own_name, part)

    def _rows(self, name: str, height: int, *, is_packed: bool) -> torch.Tensor:
        """Return which outputs this rank computes; packed ones are two matrices above each other."""
        if not is_packed:
            return torch.arange(height)[self._part(name, height)]
        half = torch.arange(height // 2)[self._part(name, height // 2)]
        return torch.cat((half, half + height // 2))

    def _part(self, name: str, width: int) -> slice:
        """Return this rank's part of a side of `width`: of heads in attention modules, else about as much as others."""
        module = next((module for module in self._heads if name.startswith(f"{module}.")), None)
        if module is None:
            return split_evenly(width, self._group.world_size)[self._group.rank].scaled(1)
        if width % self._kv_heads[module]:
            raise self._refusal(f"{name} has {width} numbers for {self._kv_heads[module]} KV heads")
        return self._heads[module].scaled(width // self._kv_heads[module])

    def _summed(self, _module: torch.nn.Module, _inputs: object, outputs: torch.Tensor) -> torch.Tensor:
        return self._group.sum(outputs.contiguous())

    def _refusal(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"model family {self._family!r} runs through transformers, and not on {self._group.world_size} ranks: "
            f"{reason}; use one rank (--tp 1)"
        )


def _replace(module: torch.nn.Module, name: str, part: torch.Tensor) -> None:
    # A copy, so that the whole is freed.
    setattr(module, name, torch.nn.Parameter(part.detach().clone(), requires_grad=False))
