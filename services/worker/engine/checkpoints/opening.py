"""From a model reference to its checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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
from services.worker.engine.checkpoints.stage_tensors import tensors_of_stage
from services.worker.engine.model.config_json import Implementation, implementation_of
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint, open_transformers_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from common.models.selection import TensorChoice
    from common.steps import EngineSpec
    from services.worker.engine.checkpoints.interface import Checkpoint

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def open_checkpoint(
    reference: str,
    load_format: str,
    device: torch.device | None = None,
    rope: Mapping[str, Any] | None = None,
    choose: TensorChoice | None = None,
) -> Checkpoint | TransformersCheckpoint:
    """Open the model that `reference` names; weights that are made up are made on `device`.

    `rope` has parameters of the rotary embedding in place of those of config.json. Only files of the tensors that
    `choose` chooses are fetched; None: all.

    Raises:
        ConfigurationError: there is no such model, or not in this format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigurationError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    files = resolve_model(reference, weights=load_format != "dummy", choose=choose)
    if rope and files.kind is ModelKind.GGUF:
        raise ConfigurationError("model.rope_parameters is for directories with a config.json, and this is a GGUF file")
    if files.kind is ModelKind.DIRECTORY and load_format != "gguf":
        raw = read_json(files.path / "config.json")
        if implementation_of(raw) is not Implementation.OWN:
            if rope:
                raise ConfigurationError(
                    f"model.rope_parameters is for families that Pando implements, and {raw.get('model_type')!r} "
                    "runs through transformers: change its config.json instead"
                )
            is_dummy = load_format == "dummy"
            return open_transformers_checkpoint(files.path, raw, read_generation(files.path), is_dummy=is_dummy)
    if load_format == "dummy":
        is_gguf = files.kind is ModelKind.GGUF
        config = GgufCheckpoint(files.path).config if is_gguf else read_config(files.path, rope)
        return DummyCheckpoint(config, device=device)
    if files.kind is ModelKind.GGUF and load_format in ("auto", "gguf"):
        return GgufCheckpoint(files.path)
    if files.kind is ModelKind.DIRECTORY and load_format in ("auto", "safetensors"):
        return SafetensorsCheckpoint(files.path, rope, choose)
    raise ConfigurationError(f"model {reference!r} is a {files.kind.value}, not what load_format={load_format} reads")


def open_stage(spec: EngineSpec, device: torch.device) -> Checkpoint | TransformersCheckpoint:
    """Open the model of `spec`, of which only those files are fetched that have tensors of its stage.

    Raises:
        ConfigurationError: as for `open_checkpoint`.
    """
    rope = read_rope(spec.rope_parameters)
    return open_checkpoint(spec.model, spec.load_format, device, rope, tensors_of_stage(spec, rope))


def read_rope(parameters: str) -> dict[str, Any]:
    """Return the object in `EngineSpec.rope_parameters`, empty if that is.

    Raises:
        ConfigurationError: it is no JSON object.
    """
    try:
        found = json.loads(parameters or "{}")
    except ValueError as error:
        raise ConfigurationError(f"rope_parameters: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError("rope_parameters: a JSON object is expected")
    return found
