"""A model's files on this host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class ModelKind(Enum):
    """The format of a model's files."""

    GGUF = "gguf"
    DIRECTORY = "directory"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this host: a GGUF file, or a directory that holds config.json."""

    name: str
    kind: ModelKind
    path: Path
    shards: tuple[str, ...] | None = None
    """The safetensors files in `path` with the tensors that were chosen; None: all tensors are needed."""
