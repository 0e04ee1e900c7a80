"""Finds vision encoders by the `model_type` of a config.json."""

from __future__ import annotations

import logging
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.encoder.model import import_flash_attention
from services.worker.engine.vision import gemma, idefics, pixtral, qwen2_5, qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.config import VisionConfig
    from services.worker.engine.vision.encoder import VisionEncoder
    from services.worker.engine.vision.family import VisionFamily

log = logging.getLogger(__name__)


@cache
def vision_families() -> Mapping[str, VisionFamily]:
    """Return all kinds of vision encoders by `model_type`."""
    return MappingProxyType(
        {
            name: family
            for module in (gemma, idefics, pixtral, qwen2_5, qwen3)
            for family in module.FAMILIES
            for name in family.names
        }
    )


def read_vision(config: JsonConfig) -> VisionConfig:
    """Read the vision encoder's part of a config.json.

    Raises:
        ConfigurationError: the model has none, or an option is not supported, or a field is missing.
    """
    name = config.get("model_type")
    family = vision_families().get(str(name))
    if family is None:
        raise ConfigurationError(f"images: {name!r} has no vision encoder that is supported")
    try:
        return family.read(config)
    except KeyError as error:
        raise ConfigurationError(f"config.json has no {error.args[0]!r}") from error


def find_vision(config: JsonConfig) -> VisionConfig | None:
    """Return the encoder of images that a config.json describes; None: there is none, or it is not supported."""
    if config.get("model_type") not in vision_families():
        return None
    try:
        return read_vision(config)
    except ConfigurationError as error:
        log.warning("images.refused reason=%s", error)
        return None


def load_vision(checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> VisionEncoder:
    """Read the weights of the encoder that `config` describes.

    Raises:
        ConfigurationError: a tensor is missing or has another shape.
    """
    import_flash_attention(device)
    return vision_families()[config.family].load(checkpoint, config, kernels, device)
