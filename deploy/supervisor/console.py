"""Console output of `pando up`: services' logs with prefixes, progress while the model loads, a banner."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from common.errors import ConfigurationError
from common.heads import Task, tasks_of
from common.logs import escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deploy.supervisor.layout import Layout
    from deploy.supervisor.supervisor import ServiceFailedError

OWN_NAME = "pando"
NAME_WIDTH = 11
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta", "bright_green")
# Bodies of the example requests in the banner. Greedy decoding, as small models are unreliable at higher temperatures.
CHAT: dict[str, object] = {"temperature": 0, "messages": [{"role": "user", "content": "Name three primary colors."}]}
EMBEDDING = {"input": ["Name three primary colors.", "Red, yellow and blue."]}
CLASSIFICATION = {"input": "I love this."}
EXAMPLES: dict[Task, tuple[str, dict[str, object]]] = {
    Task.GENERATE: ("chat/completions", CHAT),
    Task.EMBED: ("embeddings", {**EMBEDDING}),
    Task.CLASSIFY: ("classify", {**CLASSIFICATION}),
    Task.TOKEN_CLASSIFY: ("pooling", {**CLASSIFICATION}),
}
LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}
# Fields that are shown separately, or are the same in every line of a service.
PLACED_FIELDS = frozenset({"event", "level", "timestamp", "service", "component", "exception"})


class ConsoleReporter:
    """Writes events to standard error, styled on a terminal and otherwise as plain text."""

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        """Assign a colour to each of the services `names`."""
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._styles = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
        self._styles[OWN_NAME] = "bold white"
        self._alive: set[str] = set()
        self._expected = len(names)
        self._progress: Progress | None = None
        self._starting: TaskID | None = None
        self._loading: dict[str, TaskID] = {}

    def begin(self) -> None:
        """Show the progress of the start on a terminal, until `ready` or `end`."""
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._starting = self._progress.add_task("starting services", total=self._expected + 1)
        self._progress.start()

    def end(self) -> None:
        """Remove the progress display."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._loading.clear()

    def line(self, service: str, text: str) -> None:
        """Show one line of a service; on a terminal, events with progress only update the progress bar."""
        event = parse_line(text)
        if event.progress is not None and self._progress is not None:
            self._show_progress(self._progress, service, event)
            return
        self._print(service, event)

    def note(self, text: str) -> None:
        """Show a message of the supervisor."""
        self._print(OWN_NAME, LogEvent(text))

    def alive(self, service: str) -> None:
        """Advance the progress bar of the start."""
        self._alive.add(service)
        if self._progress is not None and self._starting is not None:
            names = ", ".join(name for name in self._styles if name not in self._alive and name != OWN_NAME)
            description = f"starting {names}" if names else "waiting until the model serves"
            self._progress.update(self._starting, completed=len(self._alive), description=description)

    def ready(self, layout: Layout) -> None:
        """Show the deployment's URL and an example request."""
        self.end()
        self._console.print()
        self._console.print(Text(banner(layout), style="bold" if self._console.is_terminal else ""))
        self._console.print()

    def failed(self, error: ServiceFailedError) -> None:
        """Show why the deployment ends, and the last lines of the failed service's log."""
        self.end()
        self._console.print()
        self._console.print(Text(f"{error}; the end of its log:", style="bold red"))
        for text in error.last_lines:
            self._print(error.name, parse_line(text))

    def _print(self, service: str, event: LogEvent) -> None:
        if not self._console.is_terminal:
            self._console.print(Text(format_event(service, event)))
            return
        prefix = Text(f"{service:>{NAME_WIDTH}} │ ", style=self._styles.get(service, "white"))
        style = LEVEL_STYLES.get(event.level, "")
        parts = [(event.time, "dim"), (event.text, style), (event.details, "dim")]
        body = Text(" ").join(Text(text, style=part_style) for text, part_style in parts if text)
        self._console.print(prefix + body)
        for text in event.traceback.splitlines():
            self._console.print(prefix + Text(text, style="red"))

    def _show_progress(self, progress: Progress, service: str, event: LogEvent) -> None:
        assert event.progress is not None
        done, total = event.progress
        # One bar per loading rank, described by its stage.
        key = f"{service} {event.text} {event.fields.get('rank', '')}"
        stage = str(event.fields.get("stage", event.text))
        if key not in self._loading:
            self._loading[key] = progress.add_task(stage, total=total)
        progress.update(self._loading[key], description=stage, completed=done, total=total, visible=done < total)


class JsonReporter:
    """Forwards the services' JSON lines unchanged, for log collectors."""

    def begin(self) -> None:
        """No effect: there is no progress display."""

    def end(self) -> None:
        """No effect: there is no progress display."""

    def line(self, service: str, text: str) -> None:
        """Write a line; a line that is not JSON becomes an event of its service."""
        self._write(text if text.startswith("{") else json.dumps({"event": text, "level": "info", "service": service}))

    def note(self, text: str, level: str = "info", **fields: object) -> None:
        """Write a message of the supervisor as an event."""
        self._write(json.dumps({"event": text, "level": level, "service": OWN_NAME, **fields}))

    def alive(self, service: str) -> None:
        """No effect: services log their own start."""

    def ready(self, layout: Layout) -> None:
        """Write the deployment's URL and models."""
        self.note("deployment.ready", url=layout.url, model=layout.model, models=list(layout.models))

    def failed(self, error: ServiceFailedError) -> None:
        """Write why the deployment ends; the lines of the failed service have already been written."""
        self.note("deployment.failed", level="error", failed_service=error.name, cause=error.cause)

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def banner(layout: Layout) -> str:
    """Return the message that is shown when the deployment is ready: its URL and example requests."""
    path, fields = EXAMPLES[main_task(layout)]
    body = json.dumps({"model": layout.model, **fields})
    more = f"  {own_command()} chat --url {layout.url}\n\n" if fields is CHAT else ""
    serves_console = layout.find("gateway").settings.gateway.console.enabled
    web = f"  {own_command()} console    # {layout.url}/console\n\n" if serves_console else ""
    return (
        f"Pando serves {', '.join(layout.models) or layout.model} at {layout.url}/v1\n\n"
        f"  curl {layout.url}/v1/{path} -H 'content-type: application/json' \\\n"
        f"    -d {shlex.quote(body)}\n\n{more}{web}"
        "Press Ctrl-C to stop after open requests have finished, twice to stop at once."
    )


def own_command() -> str:
    """Return the command for `pando`: its name if it is on the PATH, otherwise its relative path."""
    beside = Path(sys.executable).with_name(OWN_NAME)
    return OWN_NAME if shutil.which(OWN_NAME) or not beside.exists() else os.path.relpath(beside)


def main_task(layout: Layout) -> Task:
    """Return the main task of the model of the example requests."""
    from common.tokenization import served_traits

    settings = layout.find(f"{layout.models.get(layout.model, '')}tokenizer").settings.model
    try:
        traits = served_traits(settings)
    except ConfigurationError:  # a fake model may have no files
        return Task.GENERATE
    return tasks_of(traits.head, generates=traits.generates)[0]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event that a service has logged, in printable text; a line of unknown format is an event without fields."""

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
        """The fields as `name=value`, values quoted if they contain spaces, or characters that cannot be printed."""
        return " ".join(f"{name}={_shown(value)}" for name, value in self.fields.items())


def parse_line(line: str) -> LogEvent:
    """Parse one line of a service's output, which may contain texts of clients."""
    try:
        content = json.loads(line)
    except ValueError:
        return LogEvent(escaped(line))
    if not isinstance(content, dict) or not isinstance(content.get("event"), str):
        return LogEvent(escaped(line))
    # structlog writes ISO 8601, as in 2026-01-31T12:34:56.789012Z; only the time of day is shown.
    time = str(content.get("timestamp", "")).partition("T")[2][:12]
    return LogEvent(
        text=escaped(content["event"]),
        level=str(content.get("level", "info")),
        time=time,
        fields={name: value for name, value in content.items() if name not in PLACED_FIELDS},
        traceback="\n".join(map(escaped, str(content.get("exception", "")).splitlines())),
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
    if not text.isprintable():
        return json.dumps(value, default=str)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) and (" " in text or not text) else text
