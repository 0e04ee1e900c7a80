"""Log lines of services as events: parsed from JSON, formatted for people."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Fields that are shown separately, or are the same in every line of a service.
PLACED_FIELDS = frozenset({"event", "level", "timestamp", "service", "component", "exception"})


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event that a service has logged; a line of unknown format is an event without fields."""

    text: str
    level: str = "info"
    time: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)
    traceback: str = ""

    @property
    def progress(self) -> tuple[float, float] | None:
        """The done and total amounts, for events with the field `percent` or the fields `done` and `total`."""
        done, total = self.fields.get("done"), self.fields.get("total")
        if "percent" in self.fields:
            done, total = self.fields["percent"], 100
        if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
            return float(done), float(total)
        return None

    @property
    def details(self) -> str:
        """The fields as `name=value`, values quoted if they contain spaces."""
        return " ".join(f"{name}={_shown(value)}" for name, value in self.fields.items())


def parse_line(line: str) -> LogEvent:
    """Parse one line of a service's output."""
    try:
        content = json.loads(line)
    except ValueError:
        return LogEvent(line)
    if not isinstance(content, dict) or not isinstance(content.get("event"), str):
        return LogEvent(line)
    # structlog writes ISO 8601, as in 2026-01-31T12:34:56.789012Z; only the time of day is shown.
    time = str(content.get("timestamp", "")).partition("T")[2][:12]
    return LogEvent(
        text=content["event"],
        level=str(content.get("level", "info")),
        time=time,
        fields={name: value for name, value in content.items() if name not in PLACED_FIELDS},
        traceback=str(content.get("exception", "")),
    )


def format_event(service: str, event: LogEvent) -> str:
    """Return the event as plain text, each line prefixed with the service's name."""
    severity = "" if event.level in ("info", "debug") else f"{event.level.upper()} "
    first = " ".join(part for part in (event.time, severity + event.text, event.details) if part)
    return "\n".join(f"{service:>12} | {line}" for line in (first, *event.traceback.splitlines()))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and (" " in text or not text) else text
