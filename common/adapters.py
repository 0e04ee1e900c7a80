"""Low-rank adapters (LoRA) of a served model, by name."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidRequestError
from common.names import check_name

# Separates the base model's name from the adapter's in `model` of requests.
SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter; see `AdapterInfo` in protos/pando/v1/common.proto. Without a digest it has not been read."""

    name: str
    source: str
    digest: str = ""
    pinned: bool = False
    rank: int = 0
    bytes: int = 0


def check_adapter_name(name: str) -> str:
    """Return a name of an adapter.

    Raises:
        InvalidRequestError: it is empty, too long, or has characters that names of adapters cannot have.
    """
    check_name("lora_name", name)
    if not name or SEPARATOR in name or any(character.isspace() for character in name):
        message = f"'lora_name' should be a name without spaces and '{SEPARATOR}'."
        raise InvalidRequestError(message, param="lora_name")
    return name
