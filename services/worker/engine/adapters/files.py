"""Adapters as PEFT writes them: adapter_config.json beside one safetensors file of low-rank factors (LoRA)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import re2
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.safetensors_directory import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What precedes the names of a text model within one that has a vision tower, too.
_TEXT_PARTS = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embeds>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
_NOT_SUPPORTED = {
    "use_dora": "weight-decomposed adapters (DoRA)",
    "use_qalora": "adapters of grouped inputs (QA-LoRA)",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "adapters of transposed matrices (fan_in_fan_out)",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "adapters that begin at invocation tokens (aLoRA)",
    "modules_to_save": "whole modules beside the low-rank factors (modules_to_save)",
    "trainable_token_indices": "trained embeddings of single tokens (trainable_token_indices)",
    "megatron_config": "adapters of Megatron's layers",
    "use_bdlora": "block-diagonal adapters",
    "arrow_config": "routed adapters (Arrow)",
}
# These change the base model's own weights, unless they are converted when the adapter is saved.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The product of two factors that is added to a matrix [out, in]: `b` [out, rank] times `a` [rank, in]."""

    a: torch.Tensor
    b: torch.Tensor
    alpha: float
    by_root: bool = False
    """Whether products are divided by the square root of the rank (rsLoRA) instead of the rank."""

    @property
    def rank(self) -> int:
        """Columns of `b` and rows of `a`."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / (math.sqrt(self.rank) if self.by_root else self.rank)

    def of_expert(self, expert: int, experts: int) -> LowRank | None:
        """Return the part of one expert, if these are factors of the stacked matrices of `experts` experts."""
        rank, rest = divmod(self.rank, experts)
        if rest or not rank:
            return None
        return LowRank(
            self.a.view(experts, rank, -1)[expert],
            self.b.view(self.b.shape[0], rank, experts)[:, :, expert],
            self.alpha,
            self.by_root,
        )

    def rows(self, rows: slice | torch.Tensor) -> LowRank:
        """Return the part of some outputs."""
        return LowRank(self.a, self.b[rows], self.alpha, self.by_root)


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A whole adapter in host memory: low-rank factors by module, as the files name modules."""

    digest: str
    """SHA-256 of all tensors and of what else decides about results, in hexadecimal digits."""
    base: str
    """The base model that the files name; may be empty."""
    modules: Mapping[str, LowRank] = field(repr=False)
    embeddings: Mapping[str, LowRank] = field(repr=False)
    """Factors of embeddings: `a` [rank, vocabulary], `b` [hidden, rank]."""

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max((each.rank for each in (*self.modules.values(), *self.embeddings.values())), default=0)


def read_adapter(directory: Path) -> AdapterFile:
    """Read an adapter.

    Raises:
        ConfigurationError: files are missing or damaged, or the adapter is of a kind that is not supported.
    """
    if not (directory / CONFIG).is_file():
        raise ConfigurationError(f"adapter {directory}: {CONFIG} is no file")
    config = read_json(directory / CONFIG)
    _check_kind(directory, config)
    tensors = _read_tensors(directory)
    scaling = _Scaling.read(directory, config)
    factors: dict[tuple[bool, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _FACTOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None or tensor.dim() != 2 or not tensor.is_floating_point():
            raise ConfigurationError(f"adapter {directory}: the tensor {name!r} is not supported; factors of LoRA are")
        if tensor.dtype.itemsize == 1 or not _is_finite(tensor):
            raise ConfigurationError(f"adapter {directory}: the tensor {name!r} has values that are not supported")
        factors.setdefault((bool(found["embeds"]), found["module"]), {})[found["side"]] = tensor
    kinds: tuple[dict[str, LowRank], dict[str, LowRank]] = {}, {}
    for (embeds, module), pair in factors.items():
        kinds[embeds][_plain(module)] = _joined(directory, module, pair, scaling)
    return AdapterFile(
        digest=_digest(tensors, scaling),
        base=str(config.get("base_model_name_or_path") or ""),
        modules=kinds[False],
        embeddings=kinds[True],
    )


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Parameters of the scale of products."""

    alpha: float
    alphas: Mapping[str, float]
    """By patterns of modules' names, of which the first one that matches counts."""
    by_root: bool

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> _Scaling:
        try:
            alphas = {str(pattern): float(alpha) for pattern, alpha in (config.get("alpha_pattern") or {}).items()}
            read = cls(float(config.get("lora_alpha", 8)), alphas, bool(config.get("use_rslora")))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigurationError(f"adapter {directory}: {CONFIG}: lora_alpha: {error}") from error
        if not all(map(math.isfinite, (read.alpha, *alphas.values()))):
            raise ConfigurationError(f"adapter {directory}: {CONFIG}: lora_alpha: a value is not finite")
        for pattern in alphas:
            try:
                _matches(pattern, "")
            except re2.error as error:
                raise ConfigurationError(
                    f"adapter {directory}: {CONFIG}: alpha_pattern {pattern!r}: {error}"
                ) from error
        return read

    def alpha_of(self, module: str) -> float:
        for pattern, alpha in self.alphas.items():
            if module.endswith(f".{pattern}") or _matches(pattern, module):
                return alpha
        return self.alpha


def _matches(pattern: str, module: str) -> bool:
    """Return whether an expression of a file matches the end of a module's name, in time linear in its length.

    Raises:
        re2.error: it is none, or looks around or back.
    """
    return re2.fullmatch(rf"(.*\.)?({pattern})", module) is not None


def _check_kind(directory: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigurationError(f"adapter {directory}: peft_type {kind!r} is not supported; LORA is")
    for name, what in _NOT_SUPPORTED.items():
        if config.get(name):
            raise ConfigurationError(f"adapter {directory}: {CONFIG}: {name}: {what} are not supported")
    if (bias := config.get("bias", "none")) != "none":
        raise ConfigurationError(f"adapter {directory}: {CONFIG}: bias {bias!r} is not supported; 'none' is")
    initialised = config.get("init_lora_weights")
    if isinstance(initialised, str) and initialised.lower().startswith(_CHANGED_BASES):
        raise ConfigurationError(
            f"adapter {directory}: {CONFIG}: init_lora_weights {initialised!r} changes the base model's weights; save "
            "the adapter with PEFT's path_initial_model_for_weight_conversion"
        )


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / WEIGHTS
    if not path.is_file():
        other = " (Python pickles are not loaded)" if (directory / "adapter_model.bin").is_file() else ""
        raise ConfigurationError(f"adapter {directory}: there is no {WEIGHTS}{other}")
    try:
        # Not mapped: a file that becomes shorter while a mapping of it is read ends the process.
        tensors = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigurationError(f"adapter {directory}: {WEIGHTS}: {error}") from error
    if not tensors:
        raise ConfigurationError(f"adapter {directory}: {WEIGHTS} has no tensors")
    return tensors


def _joined(directory: Path, module: str, pair: Mapping[str, torch.Tensor], scaling: _Scaling) -> LowRank:
    if pair.keys() != {"A", "B"} or not 0 < pair["A"].shape[0] == pair["B"].shape[1]:
        raise ConfigurationError(f"adapter {directory}: module {module!r} has no two factors of one rank")
    return LowRank(pair["A"], pair["B"], scaling.alpha_of(module), scaling.by_root)


def _plain(module: str) -> str:
    """Return a module's name as it is in a text model."""
    for prefix, plain in _TEXT_PARTS:
        if module.startswith(prefix):
            return plain + module.removeprefix(prefix)
    return module


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is infinite or not a number, in one pass: far faster than `torch.isfinite`."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _digest(tensors: Mapping[str, torch.Tensor], scaling: _Scaling) -> str:
    digest = hashlib.sha256(json.dumps([scaling.alpha, list(scaling.alphas.items()), scaling.by_root]).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
