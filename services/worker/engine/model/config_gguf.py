"""The shape of a decoder from the metadata of a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigurationError
from services.worker.engine.families.registry import families_by_architecture
from services.worker.engine.model.gguf_fields import GgufFields

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from services.worker.engine.model.config import ModelConfig


def config_from_gguf(
    fields: Mapping[str, Any], *, tensors: Collection[str], divisors: tuple[float, ...],
    long_divisors: tuple[float, ...] = (),
) -> ModelConfig:  # fmt: skip
    """Read a GGUF file's metadata; for the other arguments see `GgufFields`.

    Raises:
        ConfigurationError: the architecture is not supported, or a field is missing.
    """
    try:
        architecture = fields["general.architecture"]
        check_architecture(architecture)
        family, gguf = families_by_architecture()[architecture]
        read = gguf.read(
            GgufFields(architecture, fields, tensors=tensors, divisors=divisors, long_divisors=long_divisors)
        )
    except KeyError as error:
        raise ConfigurationError(f"the GGUF file has no field {error.args[0]!r}") from error
    return replace(read, family=family.name, overflows_float16=family.overflows_float16)


def check_architecture(architecture: str) -> None:
    """Raise a ConfigurationError if GGUF files of an architecture are not supported."""
    supported = families_by_architecture()
    if architecture not in supported:
        raise ConfigurationError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(supported)}"
        )
