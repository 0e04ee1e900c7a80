"""Where the gateway finds one of several models."""

from __future__ import annotations

from common.section import Section


class BackendSettings(Section):
    """Where one of several models is served; the fields mean what they mean in the gateway's own section."""

    tokenizer: str
    detokenizer: str
    scheduler: str | None = None
    schedulers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """What else clients may call the model."""
