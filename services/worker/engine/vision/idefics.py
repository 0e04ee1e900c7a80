"""Idefics3 and SmolVLM: a SigLIP encoder over square tiles; squares of its patches become one embedding each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import VisionReader
from services.worker.engine.vision.family import VisionFamily
from services.worker.engine.vision.siglip import SiglipTower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage


def read_config(config: JsonConfig) -> VisionConfig:
    """Read the config.json of a checkpoint; what files leave out has the values of `transformers`."""
    vision = config.get("vision_config") or {}
    return VisionConfig(
        family=config["model_type"],
        placeholder_id=int(config.get("image_token_id", 128_257)),
        width=config["text_config"]["hidden_size"],
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 3072),
        layers=vision.get("num_hidden_layers", 12),
        heads=vision.get("num_attention_heads", 16),
        patch_size=read_side(vision, "patch_size", 32),
        image_size=read_side(vision, "image_size", 224),
        channels=vision.get("num_channels", 3),
        merge=config.get("scale_factor", 2),
        norm_epsilon=vision.get("layer_norm_eps", 1e-6),
        activation=read_activation(vision, "gelu_pytorch_tanh"),
    )


class IdeficsEncoder:
    """See `VisionEncoder`; the pixels of an image are [tiles, channels, image_size, image_size]."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> None:
        """Read the weights."""
        self.config = config
        read = VisionReader(checkpoint, kernels, device, "model.vision_model.")
        self._tower = SiglipTower(read, config, _positions(config.side))
        connector = VisionReader(checkpoint, kernels, device, "model.connector.")
        inputs = config.hidden_size * config.merge**2
        self._projection = connector.linear("modality_projection.proj", config.width, inputs, has_bias=False)

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """Return the embeddings of all tiles; `grid` decides nothing here. See `VisionEncoder.count`."""
        self._tower.check(shape)
        return shape[0] * (self.config.side // self.config.merge) ** 2

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        return self._tower.encode(images, self._project)

    def batch_bytes(self) -> int:
        return self._tower.batch_bytes()

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tiles, embeddings of a tile, width] of hidden states [tiles, patches, hidden]."""
        count, squares, merge = len(hidden), self.config.side // self.config.merge, self.config.merge
        # Squares of patches, row by row, side by side (pixel shuffle).
        merged = hidden.view(count, squares, merge, squares, merge, -1).transpose(2, 3)
        return self._projection(merged.reshape(count * squares**2, -1)).view(count, -1, self.config.width)


def _positions(side: int) -> torch.Tensor:
    """Return the row of the position table that each patch of a tile has, [side * side] int64.

    In exact arithmetic that is the patch's own number. `transformers` sorts fractions of the side into buckets in
    float32, and so checkpoints were trained, which for some sides moves a few patches to a neighbour's row.
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    buckets = torch.bucketize(fractions, borders, right=True)
    return (buckets[:, None] * side + buckets[None, :]).flatten()


FAMILIES = (VisionFamily(("idefics3", "smolvlm"), "Idefics3, SmolVLM 1 and 2", read_config, IdeficsEncoder),)
