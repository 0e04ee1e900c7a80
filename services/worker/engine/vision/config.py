"""The shape of a vision encoder, read from a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.encoder.config import EncoderActivation

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACTIVATIONS = {
    "gelu": EncoderActivation.GELU,
    "gelu_pytorch_tanh": EncoderActivation.GELU_TANH,
    "silu": EncoderActivation.SILU,
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Everything that is needed of a vision encoder, and of how a decoder takes its embeddings, but the weights."""

    family: str
    """`model_type` of the checkpoint."""
    placeholder_id: int
    """The token of the vocabulary that stands where embeddings of images belong."""
    width: int
    """Components of the decoder's hidden states."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    patch_size: int
    activation: EncoderActivation
    channels: int = 3
    image_size: int = 0
    """Side of images, or of the tiles that they are cut into, in pixels; 0: any multiple of `merge` patches."""
    merge: int = 1
    """Side in patches of the squares that become one embedding."""
    norm_epsilon: float = 1e-6
    frames: int = 1
    """Successive images of a video that a patch covers; a single image is repeated."""
    window: int = 0
    """Side in pixels of the windows within which layers attend; 0: they attend within whole images."""
    full_layers: tuple[int, ...] = ()
    """Layers that attend within whole images all the same."""
    positions: int = 0
    """Side of a table of positions that is stretched over each image; 0: there is none."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose outputs become embeddings, too: those of the first one are added to the outputs of the decoder's
    first layer, and so on (DeepStack, Meng et al. 2024). An embedding has the components of all, one after the other.
    """
    projector_activation: EncoderActivation = EncoderActivation.GELU
    """Of the two products that make embeddings of the encoder's outputs."""
    projector_bias: bool = True
    projector_epsilon: float = 1e-6
    block: int = 0
    """Embeddings of one encoded picture, whose tokens attend to each other in both directions in the decoder (Gemma 3),
    so that one pass has to compute all of them; 0: they attend to earlier tokens only, as text does."""
    axes: tuple[int, ...] = ()
    """The axis (time, height, width) of each frequency of the decoder's rotary embedding; empty: there is one axis."""

    def __post_init__(self) -> None:
        """Reject shapes that no code here could run."""
        if self.hidden_size % self.heads:
            raise ConfigurationError(f"vision_config: {self.heads} heads cannot share {self.hidden_size} components")
        if self.side % self.merge:
            raise ConfigurationError(
                f"vision_config: {self.side} patches along a side cannot be divided into squares of {self.merge}"
            )

    @property
    def components(self) -> int:
        """Components of an embedding, those of `deep_layers` included."""
        return (1 + len(self.deep_layers)) * self.width

    @property
    def head_dim(self) -> int:
        """Components of a head."""
        return self.hidden_size // self.heads

    @property
    def side(self) -> int:
        """Whole patches along one side of an image of `image_size`."""
        return self.image_size // self.patch_size


def read_activation(vision: Mapping[str, Any], default: str) -> EncoderActivation:
    """Return the activation function of a `vision_config`."""
    name = vision.get("hidden_act") or default
    if name not in _ACTIVATIONS:
        raise ConfigurationError(f"vision_config.hidden_act: {name!r} is not supported")
    return _ACTIVATIONS[name]


def read_side(vision: Mapping[str, Any], name: str, default: int) -> int:
    """Return the side in pixels of a square, which files may state as one number or as two equal ones."""
    value = vision.get(name) or default
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ConfigurationError(f"vision_config.{name}: {value} is no square, which is not supported")
    return int(sides.pop())
