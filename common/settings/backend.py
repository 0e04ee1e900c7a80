"""Addresses at which the gateway reaches one of several models."""

from __future__ import annotations

from common.section import Section


class BackendSettings(Section):
    """Addresses of one of several models; fields have the same meaning as in the section `gateway`."""

    tokenizer: str
    """Address of the model's tokenizer."""
    detokenizer: str
    """Address of its detokenizer."""
    scheduler: str | None = None
    """Address of its scheduler, for administration only."""
    schedulers: tuple[str, ...] = ()
    """Addresses of its scheduler groups, instead of `scheduler`."""
    aliases: tuple[str, ...] = ()
    """Other names by which clients may request the model."""
