"""Alerts from the state of the fleet, for the console; those for Prometheus come with the Helm chart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

# States as JSON: of a group as `GetStateResponse`, of a model as `Console.fleet` returns it.
State: TypeAlias = Mapping[str, Any]

READY, SLEEPING = "READY", "SLEEPING"
# A queue this many times as long as there are rows takes several whole requests to drain.
LONG_QUEUE_ROWS = 4
# Pages of running rows, which cannot be evicted, as a share of a tier.
FULL_TIER = 0.95
BAD_VERDICTS = frozenset({"leaks", "unbounded"})


@dataclass(frozen=True, slots=True)
class ConsoleAlert:
    """A condition that an operator should know of; `about` is a model, a group or `attack`."""

    severity: Literal["critical", "warning"]
    about: str
    text: str


def alerts(models: Iterable[State], report: State | None) -> list[ConsoleAlert]:
    """Return the alerts of all `models` and of the attack `report`, critical ones first."""
    found = [alert for model in models for alert in _of_model(model)]
    if report is not None:
        found += _of_report(report)
    return sorted(found, key=lambda alert: alert.severity)


def _of_model(model: State) -> Iterator[ConsoleAlert]:
    for missing in model["missing"]:
        yield ConsoleAlert("critical", model["name"], missing)
    if model.get("error"):
        yield ConsoleAlert("warning", model["name"], model["error"])
    for group in model["groups"]:
        if "error" in group:
            yield ConsoleAlert("critical", group["group"], f"the scheduler does not answer: {group['error']}")
        else:
            yield from _of_group(group)


def _of_group(group: State) -> Iterator[ConsoleAlert]:
    name = group["group"]
    if group["worker_group"] == SLEEPING:
        yield ConsoleAlert("warning", name, f"its model was put to sleep at level {group['sleep_level']}")
    elif group["worker_group"] != READY:
        yield ConsoleAlert("critical", name, f"its workers are {group['worker_group']}")
    if group["paused"]:
        yield ConsoleAlert("warning", name, "admission is paused")
    if int(group["leaked_pages"]):
        yield ConsoleAlert("warning", name, f"{group['leaked_pages']} leaked pages were repaired: please report this")
    waiting, rows = group["waiting_requests"], group["max_rows"]
    if waiting > LONG_QUEUE_ROWS * rows > 0:
        yield ConsoleAlert("warning", name, f"{waiting} requests wait for {rows} rows")
    for tier in group["tiers"]:
        protected, capacity = int(tier["protected_pages"]), int(tier["capacity_pages"])
        if capacity and protected >= FULL_TIER * capacity:
            text = f"running requests hold {protected} of {capacity} pages of the tier {tier['tier']}"
            yield ConsoleAlert("warning", name, text)


def _of_report(report: State) -> Iterator[ConsoleAlert]:
    if "error" in report:
        yield ConsoleAlert("warning", "attack", f"the report cannot be read: {report['error']}")
    run = report.get("run")
    if run and run.get("error"):
        yield ConsoleAlert("warning", "attack", f"the last self-attack did not come to its end: {run['error']}")
    bad = sum(finding.get("verdict") in BAD_VERDICTS and not finding.get("control") for finding in report["findings"])
    if bad:
        yield ConsoleAlert("critical", "attack", f"{bad} findings of the last self-attack are leaks")
