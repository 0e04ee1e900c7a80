"""From the reference of an adapter to its directory."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigurationError
from common.models.progress import LogReport
from common.models.references import parse_hub_reference


def resolve_adapter(reference: str) -> Path:
    """Return the directory of an adapter: a local one, or one of a hub, whose files are downloaded if need be.

    Args:
        reference: a directory with adapter_config.json, or `organisation/repository[@revision]`.

    Raises:
        ConfigurationError: there is no such adapter, or it cannot be downloaded; the message says what to do.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return path.resolve()
    named = parse_hub_reference(reference)
    if named is None or named.quantization is not None or "/" not in named.repository:
        raise ConfigurationError(
            f"adapter {reference!r}: no such directory; give one with adapter_config.json, or an adapter on the "
            "Hugging Face hub as organisation/repository[@revision]"
        )
    try:
        from common.models import hub
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"adapter {reference}: adapters on a hub need the package {error.name}, which is not installed"
        ) from error
    return hub.fetch_adapter(named, LogReport())
