"""Where the gateway finds one of several models."""

from __future__ import annotations

from common.section import Section


class BackendSettings(Section):
    """Where one of several models is served; the fields mean what they mean in the gateway's own section."""

    tokenizer: str
    """Address of the model's tokenizer."""
    detokenizer: str
    """Address of its detokenizer."""
    scheduler: str | None = None
    """Address of its scheduler, for administration only."""
    schedulers: tuple[str, ...] = ()
    """Addresses of its scheduler groups, in place of `scheduler`."""
    aliases: tuple[str, ...] = ()
    """What else clients may call the model."""
