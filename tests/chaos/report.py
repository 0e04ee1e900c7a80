"""The campaign's table, its file for machines, and its exit code."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.chaos.rounds import Outcome

# Of a line of the services' logs.
SHOWN_CHARACTERS = 600
HEADER = f"{'fault':44} {'requests':>8} {'lost':>5} {'wrong':>5} {'leaked':>6} {'p50 s':>6} {'max s':>6} {'goal s':>6}"


def row(outcome: Outcome) -> str:
    """Return a line of the table, and a line for each problem."""
    slow = "" if outcome.is_quick else "  slow"
    verdict = "" if outcome.is_clean else "  FAILED"
    line = (
        f"{outcome.fault:44} {outcome.requests:8} {outcome.lost:5} {outcome.wrong:5} {outcome.leaked:6} "
        f"{outcome.pause_p50_s:6.1f} {outcome.pause_max_s:6.1f} {outcome.pause_goal_s:6.1f}{slow}{verdict}"
    )
    return "\n".join([line, *(f"    {problem}" for problem in outcome.problems)])


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the table's last lines."""
    slow = [outcome.fault for outcome in outcomes if not outcome.is_quick]
    lines = [
        f"{len(outcomes)} faults, {sum(outcome.requests for outcome in outcomes)} requests: "
        f"{sum(outcome.lost for outcome in outcomes)} lost, {sum(outcome.wrong for outcome in outcomes)} wrong, "
        f"{sum(outcome.leaked for outcome in outcomes)} leaks"
    ]
    if slow:
        lines.append(f"pauses above the goal: {', '.join(slow)}")
    return "\n".join(lines)


def warnings_in(log: Iterable[str]) -> list[str]:
    """Return the warnings and errors of the services, each kind once: how often it came, and its last line."""
    found: dict[str, tuple[int, str]] = {}
    for line in log:
        service, _, text = line.rstrip().partition(": ")
        with contextlib.suppress(ValueError, AttributeError):
            fields = json.loads(text)
            if fields.get("level") in ("warning", "error", "critical"):
                kind = f"{service}: {fields.get('event')}"
                found[kind] = found.get(kind, (0, ""))[0] + 1, text
    return [f"{kind} x{count}: {text[:SHOWN_CHARACTERS]}" for kind, (count, text) in sorted(found.items())]


def exit_code(outcomes: Sequence[Outcome], *, strict_pauses: bool) -> int:
    """Return 0 if the goals are met; pauses count only if `strict_pauses`, as a busy machine adds to them."""
    met = bool(outcomes) and all(outcome.is_clean for outcome in outcomes)
    return 0 if met and (not strict_pauses or all(outcome.is_quick for outcome in outcomes)) else 1


def write_json(path: Path, outcomes: Sequence[Outcome], *, seed: int) -> None:
    """Write all outcomes."""
    content = {"seed": seed, "outcomes": [asdict(outcome) for outcome in outcomes]}
    path.write_text(json.dumps(content, indent=2) + "\n")
