"""The description of a model family: how its files become a `ModelConfig`, and how they name its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.quantization.formats import Mxfp4Format

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.gguf_fields import GgufFields
    from services.worker.engine.quantization.formats import StoredFormat

# Any: free JSON; values are checked where they are read.
JsonConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Outputs of one matrix, or bias, of each expert in a tensor [experts, outputs, ...]."""

    name: str
    """The name of the stacked tensor after `model.layers.N.`."""
    first: int = 0
    step: int = 1
    """The tensor's outputs `first`, `first + step`, ... are the matrix's."""
    is_transposed: bool = False
    """Whether the tensor is [experts, inputs, outputs]."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family in GGUF files (llama.cpp's format)."""

    architecture: str
    """`general.architecture`."""
    read: Callable[[GgufFields], ModelConfig]
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Parts of a layer and their names in files, where not those of `LAYER_NAMES`."""
    interleaves_rotary: bool = False
    """Whether converters reorder rows of queries and keys so that rotated pairs lie side by side."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of config.json that has an implementation here."""

    name: str
    """`model_type`."""
    title: str
    """The models that are published so, for documents."""
    read: Callable[[JsonConfig], ModelConfig]
    """Read a config.json. What would change results and is not supported is a ConfigurationError that names it."""
    covers: Callable[[JsonConfig], bool] = lambda _config: True
    """Whether the implementation here computes the model of a config.json; if not, `transformers` does."""
    aliases: tuple[str, ...] = ()
    """Other `model_type`s of config.json for the same."""
    wrappers: tuple[str, ...] = ()
    """`model_type`s of checkpoints whose `text_config` is of this family; of these only the text model is served."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of `transformers` that files leave out."""
    tensors: Mapping[str, str | StackedPart] = field(default_factory=dict)
    """Names of tensors in safetensors files, where not Llama's or Qwen3-MoE's; see `stored_tensor`."""
    has_single_experts: bool = False
    """Whether files may also have tensors of one expert each, where `tensors` names one tensor of all experts."""
    ends: tuple[int, ...] = ()
    """Ids of tokens that end outputs, also where files do not say so."""
    overflows_float16: bool = False
    """Whether activations of published models grow beyond 65,504."""
    gguf: GgufFamily | None = None
    gguf_name: str | None = None
    """The architecture as which GGUF files contain this family, if that is another family's."""

    @property
    def gguf_architecture(self) -> str | None:
        """The architecture as which GGUF files contain this family; None: they are not read."""
        return self.gguf.architecture if self.gguf else self.gguf_name

    @property
    def stacks_experts(self) -> bool:
        """Whether one tensor always has the matrices of all experts, which quantised checkpoints leave as it was."""
        names = [stored for part, stored in self.tensors.items() if "experts.*" in part]
        return not self.has_single_experts and any(
            isinstance(stored, StackedPart) or "*" not in stored for stored in names
        )

    def with_defaults(self, config: JsonConfig) -> JsonConfig:
        """Return `config` with the values that its file leaves out."""
        if not self.defaults:
            return config
        return {**self.defaults, **{key: value for key, value in config.items() if value is not None}}

    def check_stored(self, stored: StoredFormat | None) -> None:
        """Raise ConfigurationError if checkpoints of this family cannot be read in a format."""
        if isinstance(stored, Mxfp4Format) and "mlp.experts.*.gate_proj.blocks" not in self.tensors:
            raise ConfigurationError(
                f"quantization_config: weights of {self.name} in MXFP4 are not supported; those of gpt-oss are"
            )
