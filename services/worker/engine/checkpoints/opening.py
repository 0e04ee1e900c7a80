"""From a model reference to its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.models import ModelKind, resolve_model
from services.worker.engine.checkpoints.dummy import DummyCheckpoint
from services.worker.engine.checkpoints.gguf_file import GgufCheckpoint
from services.worker.engine.checkpoints.safetensors_directory import (
    SafetensorsCheckpoint,
    read_config,
    read_generation,
    read_json,
)
from services.worker.engine.model.config_json import Implementation, implementation_of
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint, open_transformers_checkpoint

if TYPE_CHECKING:
    import torch

    from services.worker.engine.checkpoints.interface import Checkpoint

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def open_checkpoint(
    reference: str, load_format: str, device: torch.device | None = None
) -> Checkpoint | TransformersCheckpoint:
    """Open the model that `reference` names; weights that are made up are made on `device`.

    Raises:
        ConfigurationError: there is no such model, or not in this format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigurationError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    files = resolve_model(reference, weights=load_format != "dummy")
    if files.kind is ModelKind.DIRECTORY and load_format != "gguf":
        raw = read_json(files.path / "config.json")
        if implementation_of(raw) is not Implementation.OWN:
            is_dummy = load_format == "dummy"
            return open_transformers_checkpoint(files.path, raw, read_generation(files.path), is_dummy=is_dummy)
    if load_format == "dummy":
        is_gguf = files.kind is ModelKind.GGUF
        config = GgufCheckpoint(files.path).config if is_gguf else read_config(files.path)
        return DummyCheckpoint(config, device=device)
    if files.kind is ModelKind.GGUF and load_format in ("auto", "gguf"):
        return GgufCheckpoint(files.path)
    if files.kind is ModelKind.DIRECTORY and load_format in ("auto", "safetensors"):
        return SafetensorsCheckpoint(files.path)
    raise ConfigurationError(f"model {reference!r} is a {files.kind.value}, not what load_format={load_format} reads")
