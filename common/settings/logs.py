"""The logging section of the configuration."""

from __future__ import annotations

from typing import Literal

from common.section import Section


class LogSettings(Section):
    """The services' logs, written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON lines otherwise."""
