"""The section of the configuration that is about logging."""

from __future__ import annotations

from typing import Literal

from common.section import Section


class LogSettings(Section):
    """How services log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, JSON lines otherwise."""
