"""The recorded campaign is complete: no oracle finds a leak in `user_aware`, and each finds one elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.evaluation.attack.campaign import ORACLES
from deploy.evaluation.attack.findings import COARSEST_HALF_WIDTH, HIGHEST_CLOSED_AUC
from deploy.evaluation.attack.report import UNFINISHED

FOLDER = Path(__file__).resolve().parents[4] / "deploy" / "evaluation" / "results"
ENTRIES: list[dict[str, Any]] = json.loads((FOLDER / "attack.json").read_text())
LEAKS = ("leaks", "unbounded")
# Their one finding has its control in itself: text that was seen before it was revoked, stored pages that were read.
OWN_CONTROL = {"revocation": "lost after", "forgeries": "of untouched pages 64 tokens are found"}


TEXT = (Path(__file__).resolve().parents[4] / "docs" / "privacy.md").read_text()
# An observable, and its AUC with its interval in two modes.
AUC = r"([\d.]+ \[[\d.]+, [\d.]+\])"
ROWS = re.findall(rf"^\| ([^|]+) \| [^|]+ \| {AUC} \| {AUC} \|$", TEXT, re.MULTILINE)


def found(mode: str, oracle: str, *, is_control: bool = False) -> dict[str, dict[str, Any]]:
    chosen = [entry for entry in ENTRIES if (entry["label"], entry.get("oracle")) == (mode, oracle)]
    return {entry["metric"]: entry for entry in chosen if entry.get("control", False) is is_control}


def test_no_oracle_is_missing() -> None:
    assert [entry for entry in ENTRIES if entry["metric"] == UNFINISHED] == []
    assert {entry["oracle"] for entry in ENTRIES} >= set(ORACLES)


@pytest.mark.parametrize("oracle", ORACLES)
def test_each_oracle_finds_nothing_in_user_aware_and_a_leak_elsewhere(oracle: str) -> None:
    closed = found("user_aware", oracle)
    assert closed
    controls = found("user_aware", oracle, is_control=True)
    for metric, entry in closed.items():
        assert entry["verdict"] in ("closed", "bounded"), metric
        if "value" in entry:
            # Less than chance would tell as much as more.
            assert max(entry["value"], 1 - entry["value"]) <= HIGHEST_CLOSED_AUC, metric
            assert (entry["high"] - entry["low"]) / 2 <= COARSEST_HALF_WIDTH, metric
        leaks_when_shared = found("shared", oracle).get(metric, {}).get("verdict") in LEAKS
        assert leaks_when_shared or controls or OWN_CONTROL[oracle] in entry["note"], metric
    assert all(entry["verdict"] in LEAKS for entry in controls.values())


def shown(entry: dict[str, Any]) -> str:
    return f"{entry['value']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


@pytest.mark.parametrize(("observable", "leaking", "closed"), ROWS)
def test_the_documented_figures_are_those_of_the_file(observable: str, leaking: str, closed: str) -> None:
    entries = [entry for entry in ENTRIES if entry["metric"].startswith(observable) and "value" in entry]
    proofs = [shown(entry) for entry in entries if entry["label"] == "shared" or entry.get("control")]
    assert proofs == [leaking]
    own = [shown(each) for each in entries if each["label"] == "user_aware" and not each.get("control")]
    assert own == [closed]


def test_all_observables_of_time_are_documented() -> None:
    assert len(ROWS) == 9
