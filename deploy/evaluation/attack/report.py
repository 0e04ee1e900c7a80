"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from rich.table import Table

from deploy.evaluation.attack.findings import OracleVerdict
from deploy.evaluation.bench.results import read_entries, rounded, short_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from deploy.evaluation.attack.campaign import AttackReport
    from deploy.evaluation.attack.findings import Finding, Separation
    from deploy.evaluation.attack.schedule import AttackRun
    from deploy.evaluation.bench.results import Provenance

UNFINISHED = "unfinished"
RUN = "run"
STYLES = {
    OracleVerdict.LEAKS: "red",
    OracleVerdict.UNBOUNDED: "red",
    OracleVerdict.UNDECIDED: "yellow",
    OracleVerdict.CLOSED: "green",
    OracleVerdict.BOUNDED: "green",
    OracleVerdict.NOT_APPLICABLE: "dim",
}


def finding_table(reports: Iterable[AttackReport]) -> Table:
    """Return one table of all servers."""
    title = "what a user can learn of another one's private text; AUC 0.5 is guessing, [95 % interval]"
    table = Table(title=title, title_justify="left")
    for heading in ("mode", "oracle", "probes", "AUC", "verdict", ""):
        table.add_column(heading, justify="right" if heading == "probes" else "left", overflow="fold")
    for report in reports:
        for number, finding in enumerate(report.findings):
            table.add_row(report.mode if number == 0 else "", *_cells(finding))
        table.add_section()
    return table


class FindingsFile:
    """A list in the form of the other results, with oracle, verdict and note; complete after each oracle.

    An oracle's findings replace its earlier ones on the same model in the same mode, the others stay with their commit
    and date. The oracles of a mode that have not been run to their end are one entry, whose metric is `UNFINISHED`. The
    end of the last run on a schedule is one whose metric is `RUN`.
    """

    def __init__(self, path: Path, provenance: Provenance, planned: Mapping[str, Iterable[str]]) -> None:
        """Add to the findings in `path` those of the `planned` oracles, by mode.

        Raises:
            ValueError: the file exists, but is not a list of findings.
        """
        self._path = path
        self._provenance = provenance
        entries = read_entries(path)
        self._entries = [entry for entry in entries if entry.get("metric") not in (UNFINISHED, RUN)]
        self._runs = [entry for entry in entries if entry.get("metric") == RUN]
        earlier = [entry for entry in entries if entry.get("metric") == UNFINISHED]
        # By mode, in order.
        self._unfinished = {entry["label"]: dict.fromkeys(entry["oracles"]) for entry in earlier}
        for mode, oracles in planned.items():
            self._unfinished.setdefault(mode, {}).update(dict.fromkeys(oracles))
        self._write()

    def add(self, oracle: str, report: AttackReport) -> None:
        """Write all that an oracle has found in a mode."""
        new = [_entry(oracle, report, finding, self._provenance) for finding in report.findings]
        replaced = ("attack", short_model(report.model), report.mode, oracle)
        self._entries = [entry for entry in self._entries if _key(entry) != replaced] + new
        self._unfinished.get(report.mode, {}).pop(oracle, None)
        self._write()

    @property
    def last_finished_s(self) -> float | None:
        """End of the last run on a schedule that came to its end, in seconds since 1970."""
        return max((each["finished_unix_s"] for each in self._runs if each.get("finished_unix_s")), default=None)

    def finish(self, run: AttackRun) -> None:
        """Write how a run on a schedule has ended."""
        self._runs = [{"benchmark": "attack", "metric": RUN, **asdict(run), **asdict(self._provenance)}]
        self._write()

    def _write(self) -> None:
        unfinished = [
            {
                "benchmark": "attack",
                "label": mode,
                "metric": UNFINISHED,
                "oracles": list(oracles),
                **asdict(self._provenance),
            }
            for mode, oracles in self._unfinished.items()
            if oracles
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        scratch.write_bytes(orjson.dumps(self._entries + unfinished + self._runs, option=option))
        scratch.replace(self._path)


def _cells(finding: Finding) -> tuple[str, ...]:
    style = STYLES[finding.verdict]
    if finding.is_control:  # an attack that must succeed
        style = "green" if finding.succeeded else "yellow"
    probes = f"{finding.probes}" if finding.probes else ""
    return finding.oracle, probes, _auc(finding.separation), f"[{style}]{finding.verdict.value}[/]", finding.note


def _auc(separation: Separation | None) -> str:
    if separation is None:
        return "–"
    return f"{separation.auc:.3f} \\[{separation.low:.3f}, {separation.high:.3f}]"


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("benchmark", "model", "label", "oracle"))


def _entry(oracle: str, report: AttackReport, finding: Finding, provenance: Provenance) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "benchmark": "attack",
        "model": short_model(report.model),
        "tp": 1,
        "label": report.mode,
        "oracle": oracle,
        "metric": finding.oracle,
        "verdict": finding.verdict.value,
        "probes": finding.probes,
        "note": finding.note,
        **({"control": True} if finding.is_control else {}),
        **asdict(provenance),
    }
    if finding.separation is not None:
        shown = finding.separation
        entry |= {"value": rounded(shown.auc), "unit": "AUC", "low": rounded(shown.low), "high": rounded(shown.high)}
        entry["ks_p"] = rounded(shown.ks)
    return entry
