"""Qwen2.5-VL: patches of images of any size, most layers attend within windows; four patches become one embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import gelu

from services.worker.engine.encoder.model import TextAttention
from services.worker.engine.kernels.cpu.encoder_layers import fuse_encoder_layers
from services.worker.engine.model.config import Activation
from services.worker.engine.uploads import to_device
from services.worker.engine.vision.axes import read_axes
from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import GatedLayer, VisionReader, aligned, batches
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

    from numpy.typing import NDArray

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage

_PREFIXES = ("model.visual.", "visual.")
_SECTIONS = (16, 24, 24)


def read_config(config: JsonConfig) -> VisionConfig:
    """Read the config.json of a checkpoint; what files leave out has the values of `transformers`."""
    vision, text = config.get("vision_config") or {}, config.get("text_config") or config
    activation = read_activation(vision, "silu")
    heads, hidden = vision.get("num_heads", 16), vision.get("hidden_size", 3584)
    return VisionConfig(
        family=config["model_type"],
        placeholder_id=config["image_token_id"],
        width=text["hidden_size"],
        hidden_size=hidden,
        intermediate_size=vision.get("intermediate_size", 3420),
        layers=vision.get("depth", 32),
        heads=heads,
        patch_size=read_side(vision, "patch_size", 14),
        frames=vision.get("temporal_patch_size", 2),
        channels=vision.get("in_channels") or vision.get("in_chans") or 3,
        merge=vision.get("spatial_merge_size", 2),
        activation=activation,
        window=vision.get("window_size", 112),
        full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        axes=read_axes(text, _SECTIONS),
    )


@dataclass(frozen=True, slots=True)
class PreparedPatches:
    """Images that are computed together, on the device; see `Qwen25Encoder.prepare`."""

    counts: list[int]
    """Embeddings of each image."""
    pixels: torch.Tensor  # [patches, channels * frames * patch_size ** 2]
    coordinates: torch.Tensor  # [patches, 2] int64
    order: torch.Tensor  # [embeddings] int64, squares of patches, window by window
    windows: TextAttention
    frames: TextAttention


class Qwen25Encoder:
    """See `VisionEncoder`, and `count_squares` for the pixels of an image."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> None:
        """Read the weights."""
        prefix = next((name for name in _PREFIXES if checkpoint.has_beside(f"{name}merger.ln_q.weight")), _PREFIXES[0])
        read = VisionReader(checkpoint, kernels, device, prefix)
        hidden, patch, inputs = config.hidden_size, config.patch_size, config.hidden_size * config.merge**2
        self.config = config
        self._kernels = kernels
        self._device = device
        kernel = config.channels, config.frames, patch, patch
        self._patches = read.patches("patch_embed.proj", hidden, *kernel, has_bias=False)
        self._layers = [_layer(read, f"blocks.{i}", config) for i in range(config.layers)]
        self._last_norm = read.tensor("merger.ln_q.weight", hidden)
        self._mixed = read.linear("merger.mlp.0", inputs, inputs)
        self._projection = read.linear("merger.mlp.2", config.width, inputs)
        self._rotation = PatchRotation(config.head_dim, device)
        self._fused = fuse_encoder_layers(
            self._layers, config.full_layers, self._last_norm, config.heads, config.norm_epsilon
        )

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
        columns = 14 * config.hidden_size + 3 * aligned(config.intermediate_size)
        return BATCH_PATCHES * columns * self._kernels.activation_dtype.itemsize

    def _encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        prepared = self.prepare(images)
        return list(torch.split(self.run(prepared), prepared.counts))

    def prepare(self, images: Sequence[EncoderImage]) -> PreparedPatches:
        """Return on the device what `run` takes of images."""
        config = self.config
        places = [PatchPlaces.of(image.grid, config.merge) for image in images]
        windows_of = [_Windows.of(image.grid, config) for image in images]
        counts = [len(each.order) for each in windows_of]
        firsts = np.cumsum(counts) - counts
        order = np.concatenate([each.order + first for each, first in zip(windows_of, firsts, strict=True)])
        return PreparedPatches(
            counts=counts,
            pixels=joined_pixels(images, self._kernels.activation_dtype, self._device),
            coordinates=self._sent(np.concatenate([each.coordinates for each in places])),
            order=self._sent(order),
            windows=TextAttention(np.concatenate([each.sizes for each in windows_of]), config.heads, self._device),
            frames=TextAttention(np.concatenate([each.frames for each in places]), config.heads, self._device),
        )

    def run(self, prepared: PreparedPatches) -> torch.Tensor:
        """Return the embeddings [embeddings, width] of prepared images, one image after the other.

        After a first run, nothing comes from the host's memory, so a CUDA graph can have all of it.
        """
        config, square, order = self.config, self.config.merge**2, prepared.order
        # Squares of patches that attend to each other are neighbours from here on.
        hidden = _in_order(self._patches(prepared.pixels), order, square)
        angles = _in_order(self._rotation.angles(prepared.coordinates), order, square)
        if self._fused is not None:
            normed = self._fused(hidden, angles, prepared.windows.lengths, prepared.frames.lengths)
        else:
            normed = self._run_layers(hidden, angles, prepared)
        merged = self._projection(gelu(self._mixed(normed.view(-1, square * config.hidden_size))))
        embeddings = torch.empty_like(merged)
        embeddings[order] = merged
        return embeddings

    def _run_layers(self, hidden: torch.Tensor, angles: torch.Tensor, prepared: PreparedPatches) -> torch.Tensor:
        """Run `hidden` [patches, hidden] through the layers, in place, and return it normalised."""
        config, kernels = self.config, self._kernels
        cosines, sines = angles.cos(), angles.sin()
        for i, layer in enumerate(self._layers):
            attention = prepared.frames if i in config.full_layers else prepared.windows
            qkv = layer.qkv(kernels.rms_norm(hidden, layer.attention_norm, config.norm_epsilon))
            rotate(qkv, cosines, sines)
            layer.attention_output.add_to(attention(qkv), hidden)
            normed = kernels.rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
            layer.down.add_to(layer.gate_up(normed), hidden)
        return kernels.rms_norm(hidden, self._last_norm, config.norm_epsilon)

    def _sent(self, values: NDArray[np.int64]) -> torch.Tensor:
        return to_device(values, self._device)


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of an image within which layers attend."""

    order: NDArray[np.int64]  # [squares] the squares of patches, window by window
    sizes: NDArray[np.int64]  # patches of each window

    @classmethod
    def of(cls, grid: tuple[int, ...], config: VisionConfig) -> _Windows:
        (frames, height, width), merge = grid[:3], config.merge
        # In squares of patches.
        side = config.window // merge // config.patch_size
        down, right = np.indices((height // merge, width // merge)) // side
        window_of = (down * -(-(width // merge) // side) + right).reshape(-1)
        within = np.argsort(window_of, kind="stable")
        order = np.concatenate([within + frame * len(within) for frame in range(frames)])
        return cls(order, np.tile(np.bincount(window_of) * merge**2, frames))


def _in_order(patches: torch.Tensor, order: torch.Tensor, square: int) -> torch.Tensor:
    """Return rows of patches with their squares in another order."""
    return patches.view(-1, square, patches.shape[1])[order].flatten(0, 1)


def _layer(read: VisionReader, name: str, config: VisionConfig) -> GatedLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    return GatedLayer(
        attention_norm=read.tensor(f"{name}.norm1.weight", hidden),
        qkv=read.linear(f"{name}.attn.qkv", 3 * hidden, hidden),
        attention_output=read.linear(f"{name}.attn.proj", hidden, hidden),
        feed_forward_norm=read.tensor(f"{name}.norm2.weight", hidden),
        gate_up=read.gated(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", inner, hidden, Activation.SILU),
        down=read.aligned_linear(f"{name}.mlp.down_proj", hidden, inner),
    )


FAMILIES = (VisionFamily(("qwen2_5_vl",), "Qwen2.5-VL", read_config, Qwen25Encoder),)
