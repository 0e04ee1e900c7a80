"""Pixtral's encoder in Mistral 3 and LLaVA: images of any size, whose patches are turned by their rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import ConfigurationError
from services.worker.engine.encoder.model import ACTIVATIONS, TextAttention
from services.worker.engine.uploads import to_device
from services.worker.engine.vision.config import VisionConfig, read_activation, read_side
from services.worker.engine.vision.encoder import VisionReader, batches
from services.worker.engine.vision.family import VisionFamily
from services.worker.engine.vision.patches import BATCH_PATCHES, PatchRotation, rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import Kernels, Linear
    from services.worker.engine.model.family import JsonConfig
    from services.worker.engine.vision.encoder import EncoderImage

_ENCODER = "pixtral"
_MISTRAL3 = "mistral3"
_PREFIXES = ("model.", "")
_EPSILON = 1e-5
_DIMENSIONS = 3


def read_config(config: JsonConfig) -> VisionConfig:
    """Read the config.json of a checkpoint; what files leave out has the values of `transformers`."""
    vision, text, family = config["vision_config"], config["text_config"], config["model_type"]
    if vision.get("model_type") != _ENCODER:
        raise ConfigurationError(f"vision_config.model_type: {vision.get('model_type')!r} is not supported in {family}")
    layers = vision.get("num_hidden_layers", 24)
    chosen = config.get("vision_feature_layer", -1)
    if not isinstance(chosen, int) or not -layers <= chosen < 0:
        raise ConfigurationError(f"vision_feature_layer: {chosen} is not supported")
    if config.get("vision_feature_select_strategy", "full") != "full":
        raise ConfigurationError("vision_feature_select_strategy: only 'full' is supported")
    hidden, heads = vision.get("hidden_size", 1024), vision.get("num_attention_heads", 16)
    if vision.get("head_dim") not in (None, hidden // heads):
        raise ConfigurationError(f"vision_config.head_dim: {vision['head_dim']} is not supported")
    placeholder = config.get("image_token_id", config.get("image_token_index"))
    if placeholder is None:
        raise KeyError("image_token_id")
    return VisionConfig(
        family=family,
        placeholder_id=placeholder,
        width=text["hidden_size"],
        hidden_size=hidden,
        intermediate_size=vision.get("intermediate_size", 4096),
        layers=layers + 1 + chosen,
        heads=heads,
        patch_size=read_side(vision, "patch_size", 16),
        channels=vision.get("num_channels", 3),
        merge=config.get("spatial_merge_size", 2) if family == _MISTRAL3 else 1,
        activation=read_activation(vision, "gelu"),
        norm_epsilon=_EPSILON,
        projector_activation=read_activation({"hidden_act": config.get("projector_hidden_act")}, "gelu"),
        projector_bias=config.get("multimodal_projector_bias", family != _MISTRAL3),
        projector_epsilon=text.get("rms_norm_eps", 1e-6),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class PixtralEncoder:
    """See `VisionEncoder`; the pixels of an image are [channels, height, width], in whole squares of patches."""

    def __init__(self, checkpoint: Checkpoint, config: VisionConfig, kernels: Kernels, device: torch.device) -> None:
        """Read the weights."""
        outer = next(
            (name for name in _PREFIXES if checkpoint.has_beside(f"{name}vision_tower.ln_pre.weight")), _PREFIXES[0]
        )
        read = VisionReader(checkpoint, kernels, device, f"{outer}vision_tower.")
        hidden, patch = config.hidden_size, config.patch_size
        self.config = config
        self._kernels = kernels
        self._device = device
        self._patches = read.patches("patch_conv", hidden, config.channels, patch, patch, has_bias=False)
        self._first_norm = read.tensor("ln_pre.weight", hidden)
        self._layers = [_layer(read, f"transformer.layers.{i}", config) for i in range(config.layers)]
        self._projector = _Projector(
            VisionReader(checkpoint, kernels, device, f"{outer}multi_modal_projector."), config
        )
        self._rotation = PatchRotation(config.head_dim, device, are_mixed=True)
        self._activate = ACTIVATIONS[config.activation]

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """Return the embeddings of an image; `grid` decides nothing here. See `VisionEncoder.count`."""
        config, square = self.config, self.config.patch_size * self.config.merge
        is_image = len(shape) == _DIMENSIONS and shape[0] == config.channels and min(shape) > 0
        if not is_image or shape[1] % square or shape[2] % square:
            raise ValueError(f"pixels of the shape {shape}: sides of multiples of {square} are expected")
        return shape[1] // square * (shape[2] // square)

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        sizes = [image.shape[1] * image.shape[2] // self.config.patch_size**2 for image in images]
        made: list[torch.Tensor] = []
        for part in batches(sizes, BATCH_PATCHES):
            made += self._encode(images[part.start : part.stop])
        return made

    def batch_bytes(self) -> int:
        config = self.config
        columns = 14 * config.hidden_size + 4 * config.intermediate_size
        return BATCH_PATCHES * columns * self._kernels.activation_dtype.itemsize

    def _encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        config, kernels, patch = self.config, self._kernels, self.config.patch_size
        grids = [(image.shape[1] // patch, image.shape[2] // patch) for image in images]
        cut = [
            image.pixels(self._device, kernels.activation_dtype)
            .view(config.channels, rows, patch, columns, patch)
            .permute(1, 3, 0, 2, 4)
            .reshape(rows * columns, -1)
            for image, (rows, columns) in zip(images, grids, strict=True)
        ]
        hidden = kernels.rms_norm(self._patches(torch.cat(cut)), self._first_norm, _EPSILON)
        places = np.concatenate([np.indices(grid).reshape(2, -1).T for grid in grids])
        angles = self._rotation.angles(to_device(places, self._device))
        cosines, sines = angles.cos(), angles.sin()
        attention = TextAttention(np.array([rows * columns for rows, columns in grids]), config.heads, self._device)
        for layer in self._layers:
            qkv = layer.qkv(kernels.rms_norm(hidden, layer.attention_norm, _EPSILON))
            rotate(qkv, cosines, sines)
            layer.attention_output.add_to(attention(qkv), hidden)
            gate, up = layer.gate_up(kernels.rms_norm(hidden, layer.feed_forward_norm, _EPSILON)).chunk(2, dim=1)
            layer.down.add_to(self._activate(gate) * up, hidden)
        return self._projector(hidden, grids, kernels)


class _Projector:
    """Joins squares of patches in Mistral 3, and makes embeddings of them."""

    def __init__(self, read: VisionReader, config: VisionConfig) -> None:
        hidden, width, has_bias = config.hidden_size, config.width, config.projector_bias
        self._config = config
        self._merging: tuple[torch.Tensor, Linear] | None = None
        if config.family == _MISTRAL3:
            merging = read.linear("patch_merger.merging_layer", hidden, hidden * config.merge**2, has_bias=False)
            self._merging = read.tensor("norm.weight", hidden), merging
        self._first = read.linear("linear_1", width, hidden, has_bias=has_bias)
        self._second = read.linear("linear_2", width, width, has_bias=has_bias)
        self._activate = ACTIVATIONS[config.projector_activation]

    def __call__(self, hidden: torch.Tensor, grids: Sequence[tuple[int, int]], kernels: Kernels) -> list[torch.Tensor]:
        """Return the embeddings of images of `grids` patches."""
        merge = self._config.merge
        if self._merging is not None:
            norm, merging = self._merging
            parts = torch.split(
                kernels.rms_norm(hidden, norm, self._config.projector_epsilon), [r * c for r, c in grids]
            )
            squares = [
                # A component of all patches of a square, then the next component.
                part.view(rows // merge, merge, columns // merge, merge, -1)
                .permute(0, 2, 4, 1, 3)
                .flatten(2)
                .flatten(0, 1)
                for part, (rows, columns) in zip(parts, grids, strict=True)
            ]
            hidden = merging(torch.cat(squares))
        embeddings = self._second(self._activate(self._first(hidden)))
        return list(torch.split(embeddings, [rows * columns // merge**2 for rows, columns in grids]))


def _layer(read: VisionReader, name: str, config: VisionConfig) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = [f"{name}.attention.{part}_proj" for part in ("q", "k", "v")]
    gates = [f"{name}.feed_forward.{part}_proj" for part in ("gate", "up")]
    return _Layer(
        attention_norm=read.tensor(f"{name}.attention_norm.weight", hidden),
        qkv=read.stacked(parts, hidden, hidden, has_bias=False),
        attention_output=read.linear(f"{name}.attention.o_proj", hidden, hidden, has_bias=False),
        feed_forward_norm=read.tensor(f"{name}.ffn_norm.weight", hidden),
        gate_up=read.stacked(gates, inner, hidden, has_bias=False),
        down=read.linear(f"{name}.feed_forward.down_proj", hidden, inner, has_bias=False),
    )


FAMILIES = (VisionFamily((_MISTRAL3, "llava"), "Mistral Small 3, Pixtral", read_config, PixtralEncoder),)
