"""Idefics3 and SmolVLM: a SigLIP encoder over square tiles; squares of its patches become one embedding each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.encoder.model import ACTIVATIONS, TextAttention
from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import VisionLayer, VisionReader, batches, normed
from services.worker.engine.vision.family import VisionFamily

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage

# Patches that are computed together: 16 tiles of SmolVLM. More do not make a GPU any faster.
_BATCH_PATCHES = 16_384


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
        read = VisionReader(checkpoint, kernels, device, "model.vision_model.")
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self._device = device
        self._dtype = kernels.activation_dtype
        self._patches = read.patches("embeddings.patch_embedding", hidden, config.channels, patch, patch)
        table = read.tensor("embeddings.position_embedding.weight", config.side**2, hidden)
        self._positions = table[_positions(config.side).to(device)]
        self._layers = [_layer(read, f"encoder.layers.{i}", config) for i in range(config.layers)]
        self._last_norm = read.norm("post_layernorm", hidden)
        connector = VisionReader(checkpoint, kernels, device, "model.connector.")
        inputs = hidden * config.merge**2
        self._projection = connector.linear("modality_projection.proj", config.width, inputs, has_bias=False)
        self._activate = ACTIVATIONS[config.activation]

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """Return the embeddings of all tiles; `grid` decides nothing here. See `VisionEncoder.count`."""
        size = self.config.image_size
        if len(shape) != 4 or shape[0] < 1 or shape[1:] != (self.config.channels, size, size):
            raise ValueError(f"pixels of the shape {shape}: tiles of {size} x {size} are expected")
        return shape[0] * (self.config.side // self.config.merge) ** 2

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        counts = [image.shape[0] for image in images]
        # One tile after the other, of whichever image.
        tiles = [(image, i) for image, count in zip(images, counts, strict=True) for i in range(count)]
        patches = self.config.side**2
        parts = []
        for part in batches([patches] * len(tiles), _BATCH_PATCHES):
            own = [image.pixels(self._device, self._dtype, i, 1) for image, i in tiles[part.start : part.stop]]
            parts.append(self._encode(torch.cat(own)))
        by_tile = torch.cat(parts)
        return [part.flatten(0, 1) for part in torch.split(by_tile, counts)]

    def batch_bytes(self) -> int:
        config = self.config
        columns = 12 * config.hidden_size + 2 * config.intermediate_size + config.channels * config.patch_size**2
        return max(_BATCH_PATCHES, config.side**2) * columns * self._dtype.itemsize

    def _encode(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [tiles, embeddings of a tile, width] of tiles [tiles, channels, size, size]."""
        config, count = self.config, len(tiles)
        side, patch, merge = config.side, config.patch_size, config.merge
        # What is left beside whole patches belongs to none.
        whole = tiles[:, :, : side * patch, : side * patch]
        cut = whole.reshape(count, config.channels, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        hidden = self._patches(cut.reshape(count * side * side, -1))
        hidden = (hidden.view(count, side * side, -1) + self._positions).flatten(0, 1)
        attention = TextAttention(np.full(count, side * side, np.int64), config.heads, self._device)
        for layer in self._layers:
            layer.run(hidden, attention, self._activate, config.norm_epsilon)
        hidden = normed(hidden, self._last_norm, config.norm_epsilon)
        # Squares of patches, row by row, side by side (pixel shuffle).
        squares = hidden.view(count, side // merge, merge, side // merge, merge, -1).transpose(2, 3)
        merged = self._projection(squares.reshape(count * (side // merge) ** 2, -1))
        return merged.view(count, -1, config.width)


def _layer(read: VisionReader, name: str, config: VisionConfig) -> VisionLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = [f"{name}.self_attn.{part}_proj" for part in ("q", "k", "v")]
    return VisionLayer(
        attention_norm=read.norm(f"{name}.layer_norm1", hidden),
        qkv=read.stacked(parts, hidden, hidden),
        attention_output=read.linear(f"{name}.self_attn.out_proj", hidden, hidden),
        feed_forward_norm=read.norm(f"{name}.layer_norm2", hidden),
        up=read.linear(f"{name}.mlp.fc1", inner, hidden),
        down=read.linear(f"{name}.mlp.fc2", hidden, inner),
    )


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
