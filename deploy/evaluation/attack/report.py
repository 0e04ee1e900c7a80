"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from rich.table import Table

from deploy.evaluation.attack.findings import Verdict
from deploy.evaluation.bench.results import rounded, short_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deploy.evaluation.attack.campaign import Report
    from deploy.evaluation.attack.findings import Finding
    from deploy.evaluation.attack.statistics import Separation
    from deploy.evaluation.bench.results import Provenance

STYLES = {
    Verdict.LEAKS: "red",
    Verdict.UNBOUNDED: "red",
    Verdict.UNDECIDED: "yellow",
    Verdict.CLOSED: "green",
    Verdict.BOUNDED: "green",
    Verdict.NOT_APPLICABLE: "dim",
}


def finding_table(reports: Iterable[Report]) -> Table:
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


def write_findings(path: Path, reports: Iterable[Report], provenance: Provenance) -> None:
    """Write all findings to `path`, as a list in the form of the other results with verdict and note."""
    entries = [_entry(report, finding, provenance) for report in reports for finding in report.findings]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


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


def _entry(report: Report, finding: Finding, provenance: Provenance) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "benchmark": "attack",
        "model": short_model(report.model),
        "tp": 1,
        "label": report.mode,
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
