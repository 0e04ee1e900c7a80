"""Qwen3-VL: patches of images of any size, and embeddings of several layers for the decoder's first ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import gelu

from services.worker.engine.encoder.model import ACTIVATIONS, TextAttention
from services.worker.engine.uploads import to_device, upload
from services.worker.engine.vision.axes import read_axes
from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import VisionLayer, VisionReader, batches, normed
from services.worker.engine.vision.family import VisionFamily
from services.worker.engine.vision.patches import (
    BATCH_PATCHES,
    PatchPlaces,
    PatchRotation,
    count_squares,
    joined_pixels,
    rotate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.encoder.weights import Norm
    from services.worker.engine.kernels.interface import Kernels, Linear
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage

_PREFIXES = ("model.visual.", "visual.")
_SECTIONS = (24, 20, 20)


def read_config(config: JsonConfig) -> VisionConfig:
    """Read the config.json of a checkpoint; what files leave out has the values of `transformers`."""
    vision, text = config.get("vision_config") or {}, config["text_config"]
    return VisionConfig(
        family=config["model_type"],
        placeholder_id=config.get("image_token_id", 151_655),
        width=text["hidden_size"],
        hidden_size=vision.get("hidden_size", 1152),
        intermediate_size=vision.get("intermediate_size", 4304),
        layers=vision.get("depth", 27),
        heads=vision.get("num_heads", 16),
        patch_size=read_side(vision, "patch_size", 16),
        frames=vision.get("temporal_patch_size", 2),
        channels=vision.get("in_channels", 3),
        merge=vision.get("spatial_merge_size", 2),
        activation=read_activation(vision, "gelu_pytorch_tanh"),
        positions=int(vision.get("num_position_embeddings", 2304) ** 0.5),
        deep_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
        axes=read_axes(text, _SECTIONS, are_mixed=True),
    )


@dataclass(frozen=True, slots=True)
class _Merger:
    """Makes embeddings of squares of patches, which are normalised before or after they are joined."""

    norm: Norm
    width: int
    mixed: Linear
    projection: Linear

    def __call__(self, hidden: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return embeddings [squares, width] of hidden states [patches, hidden]."""
        normalised = normed(hidden.view(-1, len(self.norm.weight)), self.norm, epsilon)
        return self.projection(gelu(self.mixed(normalised.view(-1, self.width))))


class Qwen3Encoder:
    """See `VisionEncoder`, and `count_squares` for the pixels of an image."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> None:
        """Read the weights."""
        prefix = next((name for name in _PREFIXES if checkpoint.has_beside(f"{name}merger.norm.weight")), _PREFIXES[0])
        read = VisionReader(checkpoint, kernels, device, prefix)
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self._device = device
        self._dtype = kernels.activation_dtype
        self._patches = read.patches("patch_embed.proj", hidden, config.channels, config.frames, patch, patch)
        self._positions = read.tensor("pos_embed.weight", config.positions**2, hidden)
        self._layers = [_layer(read, f"blocks.{i}", config) for i in range(config.layers)]
        self._merger = _merger(read, "merger", config, is_joined=False)
        self._deep = {
            layer: _merger(read, f"deepstack_merger_list.{i}", config, is_joined=True)
            for i, layer in enumerate(config.deep_layers)
        }
        self._rotation = PatchRotation(config.head_dim, device)
        self._activate = ACTIVATIONS[config.activation]

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """See `VisionEncoder.count`."""
        return count_squares(shape, grid, self.config)

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for part in batches([image.shape[0] for image in images], BATCH_PATCHES):
            made += self._encode(images[part.start : part.stop])
        return made

    def batch_bytes(self) -> int:
        config = self.config
        columns = 14 * config.hidden_size + 2 * config.intermediate_size
        return BATCH_PATCHES * columns * self._dtype.itemsize

    def _encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        config = self.config
        places = [PatchPlaces.of(image.grid, config.merge) for image in images]
        coordinates = to_device(np.concatenate([each.coordinates for each in places]), self._device)
        hidden = self._patches(joined_pixels(images, self._dtype, self._device))
        sizes = torch.tensor([image.grid[1:3] for image in images]).repeat_interleave(
            torch.tensor([len(each.coordinates) for each in places]), dim=0
        )
        hidden += self._stretched(coordinates, upload(sizes, self._device)).to(hidden.dtype)
        angles = self._rotation.angles(coordinates)
        cosines, sines = angles.cos(), angles.sin()
        attention = TextAttention(np.concatenate([each.frames for each in places]), config.heads, self._device)

        def turned(qkv: torch.Tensor) -> torch.Tensor:
            rotate(qkv, cosines, sines)
            return attention(qkv)

        deep = []
        for i, layer in enumerate(self._layers):
            layer.run(hidden, turned, self._activate, config.norm_epsilon)
            if i in self._deep:
                deep.append(self._deep[i](hidden, config.norm_epsilon))
        embeddings = torch.cat((self._merger(hidden, config.norm_epsilon), *deep), dim=1)
        return list(torch.split(embeddings, [len(each.coordinates) // config.merge**2 for each in places]))

    def _stretched(self, coordinates: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return positions [patches, hidden] float32 between those of the table, whose corners are images' corners.

        `sizes` [patches, 2] are rows and columns of each patch's image.
        """
        side = self.config.positions
        at = coordinates.float() * (side - 1) / (sizes - 1).clamp(min=1)
        low = at.floor().long()
        high, share = (low + 1).clamp(max=side - 1), at - low
        total = torch.zeros(len(at), self._positions.shape[1], device=self._device)
        for row, of_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for column, of_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                total += self._positions[row * side + column] * (of_row * of_column)[:, None]
        return total


def _layer(read: VisionReader, name: str, config: VisionConfig) -> VisionLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return VisionLayer(
        attention_norm=read.norm(f"{name}.norm1", hidden),
        qkv=read.linear(f"{name}.attn.qkv", 3 * hidden, hidden),
        attention_output=read.linear(f"{name}.attn.proj", hidden, hidden),
        feed_forward_norm=read.norm(f"{name}.norm2", hidden),
        up=read.linear(f"{name}.mlp.linear_fc1", inner, hidden),
        down=read.linear(f"{name}.mlp.linear_fc2", hidden, inner),
    )


def _merger(read: VisionReader, name: str, config: VisionConfig, *, is_joined: bool) -> _Merger:
    joined = config.hidden_size * config.merge**2
    return _Merger(
        norm=read.norm(f"{name}.norm", joined if is_joined else config.hidden_size),
        width=joined,
        mixed=read.linear(f"{name}.linear_fc1", joined, joined),
        projection=read.linear(f"{name}.linear_fc2", config.width, joined),
    )


FAMILIES = (VisionFamily(("qwen3_vl",), "Qwen3-VL", read_config, Qwen3Encoder),)
