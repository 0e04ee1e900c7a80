"""The report of the last self-attack, for the console and for Prometheus."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from gateway.pipeline.port import JsonObject

MAX_REPORT_BYTES = 4 * 1024 * 1024
# Fields of an entry of `pando attack --json` that are shown, and of the entry about its last run.
REPORT_FIELDS = frozenset(
    ("label", "oracle", "metric", "value", "low", "high", "verdict", "note", "control", "date", "commit", "model")
)
RUN_FIELDS = ("every_s", "finished_unix_s", "started_unix_s", "requests", "error")
RUN = "run"
# Series that a report may have; no attack has as many oracles.
MAX_SERIES = 200
SUCCEEDED = frozenset({"leaks", "unbounded"})
PREFIX = "pando_gateway_attack_"
FINDINGS = "findings"
LABELS = ("mode", "oracle", "verdict")
HELP = {
    "report_readable": "1 while the report of the last self-attack can be read.",
    FINDINGS: "Findings of the last self-attack; leaks and unbounded contradict the claims.",
    "blind_controls": "Controls of the last self-attack that should have succeeded and did not.",
    "last_run_timestamp_seconds": "End of the last complete self-attack, in seconds since 1970; 0: there was none.",
    "interval_seconds": "Time between two self-attacks.",
    "requests": "Requests of the last self-attack.",
    "failed": "1 if the last self-attack did not come to its end.",
}


class SelfAttack:
    """The report file that `pando attack --json` writes; None: none is configured."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> JsonObject | None:
        """Return findings and the last run; with `error` if the file cannot be read, None if none is configured."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                written = os.fstat(file.fileno()).st_mtime
                entries = orjson.loads(file.read(MAX_REPORT_BYTES))
            runs = [entry for entry in entries if entry.get("metric") == RUN]
            findings = [_fields(entry, REPORT_FIELDS) for entry in entries if entry.get("metric") != RUN]
            run = {name: runs[-1].get(name) for name in RUN_FIELDS} if runs else None
            _check(run)
        except (OSError, ValueError, AttributeError, TypeError) as error:
            return {"error": f"{type(error).__name__}: {error}", "findings": []}
        return {"written_unix_s": written, "findings": findings, "run": run}


class SelfAttackMetrics:
    """A Prometheus collector of the report's verdicts and age; without a configured report, it has no metrics."""

    def __init__(self, attack: SelfAttack) -> None:
        self._attack = attack

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the report, and yield its metrics."""
        report: Any = self._attack.read()  # Any: JSON
        if report is None:
            return
        is_readable = "error" not in report
        yield _gauge("report_readable", is_readable)
        if is_readable:
            yield from _of_findings(report["findings"])
            yield from _of_run(report["run"], report["written_unix_s"])

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics without values; registering does not read the report."""
        for name, help_text in HELP.items():
            yield GaugeMetricFamily(PREFIX + name, help_text, labels=LABELS if name == FINDINGS else ())


def _gauge(name: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, HELP[name], value=float(value))


def _of_findings(findings: list[Mapping[str, Any]]) -> Iterator[GaugeMetricFamily]:
    verdicts = GaugeMetricFamily(PREFIX + FINDINGS, HELP[FINDINGS], labels=LABELS)
    attacks = [each for each in findings if each.get("verdict") and not each.get("control")]
    counts = Counter(tuple(str(each.get(name, "")) for name in ("label", "metric", "verdict")) for each in attacks)
    for labels, count in sorted(counts.items())[:MAX_SERIES]:
        verdicts.add_metric(labels, count)
    yield verdicts
    blind = sum(bool(each.get("control")) and each.get("verdict") not in SUCCEEDED for each in findings)
    yield _gauge("blind_controls", blind)


def _of_run(run: Mapping[str, Any] | None, written_unix_s: float) -> Iterator[GaugeMetricFamily]:
    finished = written_unix_s if run is None else run["finished_unix_s"]
    yield _gauge("last_run_timestamp_seconds", finished or 0.0)
    if run is not None:
        yield _gauge("interval_seconds", run["every_s"] or 0.0)
        yield _gauge("requests", run["requests"] or 0)
        yield _gauge("failed", bool(run["error"]))


def _fields(entry: Mapping[str, Any], names: frozenset[str]) -> JsonObject:
    return {name: value for name, value in entry.items() if name in names}


def _check(run: Mapping[str, Any] | None) -> None:
    """Check the types of a run's fields, as anything may stand in a file.

    Raises:
        TypeError: one is wrong.
    """
    if run is None:
        return
    for name in ("every_s", "finished_unix_s", "requests"):
        if run[name] is not None and not isinstance(run[name], int | float):
            raise TypeError(f"{name} of the last run is no number")
