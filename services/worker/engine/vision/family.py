"""The description of vision encoders of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.config import VisionConfig
    from services.worker.engine.vision.encoder import VisionEncoder


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One kind of vision encoder."""

    names: tuple[str, ...]
    """`model_type`s of the checkpoints that contain it."""
    title: str
    """The models that are published so, for documents."""
    read: Callable[[JsonConfig], VisionConfig]
    """Read a config.json. What would change results and is not supported is a ConfigurationError that names it."""
    load: Callable[[Checkpoint, VisionConfig, Kernels, torch.device], VisionEncoder]
    """Read the weights."""
