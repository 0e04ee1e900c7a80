"""The encoder of SigLIP (Zhai et al. 2023) over square images of one size, which several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.engine.encoder.model import ACTIVATIONS, TextAttention
from services.worker.engine.vision.encoder import EncoderImage, VisionLayer, VisionReader, batches, normed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.vision.config import VisionConfig

# Patches that are computed together: 16 tiles of SmolVLM. More do not make a GPU any faster.
_BATCH_PATCHES = 16_384
_DIMENSIONS = 4


class SiglipTower:
    """Turns square tiles of `config.image_size` pixels into hidden states of their patches."""

    def __init__(self, read: VisionReader, config: VisionConfig, rows: torch.Tensor | None = None) -> None:
        """Read the weights.

        `rows` [patches] int64 are the rows of the position table that patches have; None: those of their own numbers.
        """
        hidden, patch = config.hidden_size, config.patch_size
        self._config = config
        self._device = read.device
        self._dtype = read.kernels.activation_dtype
        self._patches = read.patches("embeddings.patch_embedding", hidden, config.channels, patch, patch)
        table = read.tensor("embeddings.position_embedding.weight", config.side**2, hidden)
        self._positions = table if rows is None else table[rows.to(read.device)]
        self._layers = [_layer(read, f"encoder.layers.{i}", config) for i in range(config.layers)]
        self._last_norm = read.norm("post_layernorm", hidden)
        self._activate = ACTIVATIONS[config.activation]

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless pixels of this shape are [tiles, channels, image_size, image_size]."""
        size = self._config.image_size
        if len(shape) != _DIMENSIONS or shape[0] < 1 or shape[1:] != (self._config.channels, size, size):
            raise ValueError(f"pixels of the shape {shape}: tiles of {size} x {size} are expected")

    def encode(
        self, images: Sequence[EncoderImage], project: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the embeddings of each image, those of its tiles one after the other.

        `project` returns the embeddings [tiles, embeddings of a tile, width] of hidden states [tiles, patches, hidden].
        """
        counts = [image.shape[0] for image in images]
        # One tile after the other, of whichever image.
        tiles = [(image, i) for image, count in zip(images, counts, strict=True) for i in range(count)]
        parts = []
        for part in batches([self._config.side**2] * len(tiles), _BATCH_PATCHES):
            own = [image.pixels(self._device, self._dtype, i, 1) for image, i in tiles[part.start : part.stop]]
            parts.append(project(self._hidden_states(torch.cat(own))))
        return [part.flatten(0, 1) for part in torch.split(torch.cat(parts), counts)]

    def batch_bytes(self) -> int:
        """Return an upper bound of the memory that `encode` takes beside its results."""
        config = self._config
        columns = 12 * config.hidden_size + 2 * config.intermediate_size + config.channels * config.patch_size**2
        return max(_BATCH_PATCHES, config.side**2) * columns * self._dtype.itemsize

    def _hidden_states(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the normalised hidden states [tiles, patches, hidden] of tiles [tiles, channels, size, size]."""
        config, count = self._config, len(tiles)
        side, patch = config.side, config.patch_size
        # What is left beside whole patches belongs to none.
        whole = tiles[:, :, : side * patch, : side * patch]
        cut = whole.reshape(count, config.channels, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
        hidden = self._patches(cut.reshape(count * side * side, -1))
        hidden = (hidden.view(count, side * side, -1) + self._positions).flatten(0, 1)
        attention = TextAttention(np.full(count, side * side, np.int64), config.heads, self._device)
        for layer in self._layers:
            layer.run(hidden, attention, self._activate, config.norm_epsilon)
        return normed(hidden, self._last_norm, config.norm_epsilon).view(count, side * side, -1)


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
