"""The interface of vision encoders, and the layers that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import layer_norm, pad

from common.types import PackedPixels
from services.worker.engine.encoder.weights import Norm
from services.worker.engine.uploads import to_device, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import GatedLinear, Kernels, Linear
    from services.worker.engine.model.config import Activation
    from services.worker.engine.vision.config import VisionConfig

# With rows of weights that do not begin at multiples of 16 bytes, cuBLAS takes programs for older GPUs.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class EncoderImage:
    """One image: its pixels in host memory, and its `grid`.

    Packed pixels stay packed until they are encoded, as a row may wait for that.
    """

    given: NDArray[np.float32] | PackedPixels
    grid: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its pixels as the model's processor makes them."""
        return self.given.shape

    def pixels(
        self, device: torch.device, dtype: torch.dtype, first: int = 0, count: int | None = None
    ) -> torch.Tensor:
        """Return the pixels as the model's processor makes them, on a device.

        With `count`, only so many of the first dimension from `first` on; packed images then have a part for each.
        """
        chosen = slice(first, None if count is None else first + count)
        if not isinstance(self.given, PackedPixels):
            return upload(torch.from_numpy(self.given[chosen].copy()).to(dtype), device)
        values = to_device(self.given.values[chosen].copy(), device)
        table = to_device(self.given.table.copy(), device).to(dtype)
        places = values.int() + table.shape[1] * torch.arange(len(table), dtype=torch.int32, device=device)[:, None]
        numbers = table.flatten().index_select(0, places.flatten()).view(*values.shape[:2], 1, -1)
        shape = self.shape if count is None else (len(values), *self.shape[1:])
        return numbers.expand(-1, -1, self.given.frames, -1).reshape(shape)


class VisionEncoder(Protocol):
    """Turns images into embeddings, which take the places of tokens in a decoder's input."""

    @property
    def config(self) -> VisionConfig:
        """Its shape."""
        ...

    def count(self, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
        """Return how many embeddings an image has.

        Raises:
            ValueError: pixels of this shape and grid are no image of the model.
        """
        ...

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        """Return the embeddings of each image, in the type of the activations, on the device.

        They are [count, width], or wider where there are `deep_layers`.
        """
        ...

    def batch_bytes(self) -> int:
        """Return an upper bound of the memory that `encode` takes beside its results."""
        ...


@dataclass(frozen=True, slots=True)
class VisionReader:
    """Reads the tensors of a vision encoder, whose names in files begin with `prefix`."""

    checkpoint: Checkpoint
    kernels: Kernels
    device: torch.device
    prefix: str

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of this shape, in the type of the activations, on the device."""
        stored = self.checkpoint.read_beside(self.prefix + name, shape)
        # A copy: the tensor may be a view of the whole file.
        return stored.to(self.device, self.kernels.activation_dtype, copy=True)

    def norm(self, name: str, width: int) -> Norm:
        """Return a layer norm."""
        return Norm(self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width))

    def linear(self, name: str, outputs: int, inputs: int, *, has_bias: bool = True) -> Linear:
        """Return a product."""
        weight = self.checkpoint.read_beside(f"{self.prefix}{name}.weight", (outputs, inputs))
        bias = self.checkpoint.read_beside(f"{self.prefix}{name}.bias", (outputs,)) if has_bias else None
        return self.kernels.linear(weight.clone(), bias)

    def gated(self, gate: str, up: str, outputs: int, inputs: int, activation: Activation) -> GatedLinear:
        """Return the first half of a gated feed-forward layer with biases, with `aligned` outputs."""
        missing = aligned(outputs) - outputs

        def read(name: str, *shape: int) -> torch.Tensor:
            # A copy, as everything that is padded.
            return pad(self.checkpoint.read_beside(self.prefix + name, shape), (0, 0) * (len(shape) - 1) + (0, missing))

        gate_weight, up_weight = (read(f"{name}.weight", outputs, inputs) for name in (gate, up))
        gate_bias, up_bias = (read(f"{name}.bias", outputs) for name in (gate, up))
        return self.kernels.gated_linear(gate_weight, up_weight, (gate_bias, up_bias), activation)

    def aligned_linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """Return a product of `aligned` inputs, of which those after the first `inputs` are zeros."""
        weight = self.checkpoint.read_beside(f"{self.prefix}{name}.weight", (outputs, inputs))
        bias = self.checkpoint.read_beside(f"{self.prefix}{name}.bias", (outputs,))
        return self.kernels.linear(pad(weight, (0, aligned(inputs) - inputs)), bias)

    def patches(self, name: str, outputs: int, *kernel: int, has_bias: bool = True) -> Linear:
        """Return a convolution whose steps are as long as its kernel [channels, ...]: a product with whole patches."""
        weight = self.checkpoint.read_beside(f"{self.prefix}{name}.weight", (outputs, *kernel))
        bias = self.checkpoint.read_beside(f"{self.prefix}{name}.bias", (outputs,)) if has_bias else None
        return self.kernels.linear(weight.flatten(1).clone(), bias)

    def stacked(self, names: Sequence[str], outputs: int, inputs: int, *, has_bias: bool = True) -> Linear:
        """Return products of the same inputs as one; each has so many outputs."""
        read, prefix = self.checkpoint.read_beside, self.prefix
        weight = torch.cat([read(f"{prefix}{name}.weight", (outputs, inputs)) for name in names])
        biases = [read(f"{prefix}{name}.bias", (outputs,)) for name in names] if has_bias else None
        return self.kernels.linear(weight, None if biases is None else torch.cat(biases))


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One layer of a ViT (Dosovitskiy et al. 2021) whose norms come before attention and feed-forward layers."""

    attention_norm: Norm
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: Norm
    up: Linear
    down: Linear

    def run(
        self,
        hidden: torch.Tensor,
        attention: Callable[[torch.Tensor], torch.Tensor],
        activate: Callable[[torch.Tensor], torch.Tensor],
        epsilon: float,
    ) -> None:
        """Update the residual stream `hidden` [patches, hidden] in place.

        `attention` returns its output for queries, keys and values side by side.
        """
        self.attention_output.add_to(attention(self.qkv(normed(hidden, self.attention_norm, epsilon))), hidden)
        self.down.add_to(activate(self.up(normed(hidden, self.feed_forward_norm, epsilon))), hidden)


@dataclass(frozen=True, slots=True)
class GatedLayer:
    """One layer whose norms have scales only (RMS), and whose feed-forward layer is gated."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear
    attention_output: Linear
    feed_forward_norm: torch.Tensor  # [hidden]
    gate_up: GatedLinear
    down: Linear


def normed(hidden: torch.Tensor, norm: Norm, epsilon: float) -> torch.Tensor:
    """Return `hidden` [patches, hidden], normalised."""
    return layer_norm(hidden, hidden.shape[1:], norm.weight, norm.bias, epsilon)


def aligned(width: int) -> int:
    """Return the columns, no fewer than `width`, that matrix units take at full speed."""
    return -(-width // _ALIGNMENT) * _ALIGNMENT


def batches(sizes: Sequence[int], most: int) -> list[range]:
    """Divide consecutive images of `sizes` patches into batches of at most `most`, or of one image."""
    made, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            made.append(range(start, i))
            start, total = i, 0
        total += size
    return [*made, range(start, len(sizes))] if sizes else []
