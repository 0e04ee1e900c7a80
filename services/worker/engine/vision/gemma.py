"""Gemma 3: a SigLIP encoder over square pictures; the average of each square of patches becomes an embedding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import VisionReader
from services.worker.engine.vision.family import VisionFamily
from services.worker.engine.vision.siglip import SiglipTower

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage

_ENCODER = "siglip_vision_model"
_TOWERS = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_FIRST = "embeddings.patch_embedding.weight"


def read_config(config: JsonConfig) -> VisionConfig:
    """Read the config.json of a checkpoint; what files leave out has the values of `transformers`."""
    vision, text, family = config["vision_config"], config["text_config"], config["model_type"]
    if vision.get("model_type") != _ENCODER:
        raise ConfigurationError(f"vision_config.model_type: {vision.get('model_type')!r} is not supported in {family}")
    patch, size = read_side(vision, "patch_size", 16), read_side(vision, "image_size", 224)
    block = config.get("mm_tokens_per_image", 256)
    squares = math.isqrt(block)
    if squares**2 != block or not 0 < squares <= size // patch or size // patch % squares:
        raise ConfigurationError(
            f"mm_tokens_per_image: {size // patch} x {size // patch} patches cannot be divided into {block} squares"
        )
    return VisionConfig(
        family=family,
        placeholder_id=int(config.get("image_token_id", config.get("image_token_index", 262_144))),
        width=text["hidden_size"],
        hidden_size=vision.get("hidden_size", 768),
        intermediate_size=vision.get("intermediate_size", 3072),
        layers=vision.get("num_hidden_layers", 12),
        heads=vision.get("num_attention_heads", 12),
        patch_size=patch,
        image_size=size,
        channels=vision.get("num_channels", 3),
        merge=size // patch // squares,
        norm_epsilon=vision.get("layer_norm_eps", 1e-6),
        activation=read_activation(vision, "gelu_pytorch_tanh"),
        block=block,
    )


class GemmaEncoder:
    """See `VisionEncoder`; the pixels of an image are [tiles, channels, image_size, image_size].

    The tiles are the whole picture and, with pan and scan, its crops.
    """

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> None:
        """Read the weights."""
        self.config = config
        self._kernels = kernels
        prefix = next((name for name in _TOWERS if checkpoint.has_beside(name + _FIRST)), _TOWERS[0])
        self._tower = SiglipTower(VisionReader(checkpoint, kernels, device, prefix), config)
        outer = prefix[: prefix.index("vision_tower.")]
        read = VisionReader(checkpoint, kernels, device, f"{outer}multi_modal_projector.")
        # Of Gemma's norms, weights are what is added to 1.
        self._norm = 1.0 + read.tensor("mm_soft_emb_norm.weight", config.hidden_size).float()
        projection = checkpoint.read_beside(
            f"{outer}multi_modal_projector.mm_input_projection_weight", (config.hidden_size, config.width)
        )
        self._projection = kernels.linear(projection.t().contiguous(), None)

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """Return the embeddings of all tiles; `grid` decides nothing here. See `VisionEncoder.count`."""
        self._tower.check(shape)
        return shape[0] * self.config.block

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        return self._tower.encode(images, self._project)

    def batch_bytes(self) -> int:
        return self._tower.batch_bytes()

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tiles, block, width] of hidden states [tiles, patches, hidden]."""
        count, merge, squares = len(hidden), self.config.merge, self.config.side // self.config.merge
        averages = hidden.view(count, squares, merge, squares, merge, -1).mean(dim=(2, 4))
        normed = self._kernels.rms_norm(averages.flatten(0, 2), self._norm, self.config.norm_epsilon)
        return self._projection(normed).view(count, -1, self.config.width)


FAMILIES = (VisionFamily(("gemma3",), "Gemma 3", read_config, GemmaEncoder),)
