"""Names of tensors: the engine's, which are those of Llama and Qwen3-MoE in `transformers`, and those in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.worker.engine.model.family import StackedPart

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYERS = "model.layers."
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; with `expert`, that of the matrices in a tensor [experts, rows, columns]."""

    name: str
    expert: int | None = None
    part: StackedPart | None = None
    """Rows of that matrix, where it contains others, or is transposed."""


def stored_tensor(name: str, names: Mapping[str, str | StackedPart]) -> StoredTensor:
    """Find where the engine's tensor `name` is, by the `names` of a family.

    Keys are what follows `model.layers.N.`, or whole names outside of layers, with or without `.weight` or `.bias`; `*`
    stands for the number of an expert. If a value has no `*`, the tensor contains the matrices of all experts.
    """
    prefix, part = split_layer(name)
    part, expert = split_expert(part, "*")
    stem, _, suffix = part.rpartition(".")
    stored = names.get(part) or f"{names.get(stem, stem)}.{suffix}"
    if isinstance(stored, StackedPart):
        return StoredTensor(prefix + stored.name, expert, stored)
    if expert is None:
        return StoredTensor(prefix + stored)
    return (
        StoredTensor(prefix + stored.replace("*", str(expert)))
        if "*" in stored
        else StoredTensor(prefix + stored, expert)
    )


def split_layer(name: str) -> tuple[str, str]:
    """Split `model.layers.N.` off; an empty string where a tensor belongs to no layer."""
    if not name.startswith(_LAYERS):
        return "", name
    number, _, part = name.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{number}.", part


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to; None: it belongs to no layer."""
    prefix, _ = split_layer(name)
    return int(prefix.removeprefix(_LAYERS).removesuffix(".")) if prefix else None


def split_expert(name: str, placeholder: str = "") -> tuple[str, int | None]:
    """Return `name` with a placeholder, or without anything, instead of an expert's number, and that number."""
    before, found, after = name.partition(_EXPERTS)
    number, _, rest = after.partition(".")
    if not found or not number.isdigit():
        return name, None
    return f"{before}{_EXPERTS}{f'{placeholder}.' if placeholder else ''}{rest}", int(number)
