"""`pando cache replay`: replays a decision log and shows the first difference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from rich.table import Table

from deploy.evaluation.bench.report import output_console
from services.scheduler.cache.debug.replay import LogError, replay

if TYPE_CHECKING:
    import argparse

    from services.scheduler.cache.debug.replay import Difference

SHOWN_CHARACTERS = 400
DIFFERENT, UNREADABLE = 1, 2


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pando cache replay`."""
    parser.add_argument("log", type=Path, help="the file of scheduler.cache.decision_log; it contains all prompts")


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay the log; return 0 if all decisions are as logged, 1 at a difference, 2 if the log cannot be read."""
    console = output_console()
    try:
        with arguments.log.open("rb") as lines:
            report = replay(lines)
    except (OSError, LogError) as error:
        sys.stderr.write(f"pando cache replay: {error}\n")
        return UNREADABLE
    console.print(f"{report.operations:,} operations of {report.starts:,} starts replayed")
    if report.is_lost:
        console.print("the log ends early: its writer was killed or too slow")
    if report.difference is None:
        console.print(f"no difference; the tree has {report.nodes:,} nodes, {report.cached_pages:,} pages are in use")
        return 0
    difference = report.difference
    place = f"operation {difference.operation:,} ({difference.logged.get('operation')}), line {difference.line:,}"
    console.print(f"first difference: {place}")
    console.print(_describe(difference))
    return DIFFERENT


def _describe(difference: Difference) -> Table:
    table = Table()
    for name in ("", "logged", "replayed"):
        table.add_column(name, overflow="fold")
    for field in difference.fields:
        part, _, name = field.partition(".")
        sides = (facts.get(part, {}) for facts in (difference.logged, difference.replayed))
        table.add_row(field, *(_shorten(side.get(name) if name else side) for side in sides))
    return table


def _shorten(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text):,} characters)"
