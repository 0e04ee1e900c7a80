"""`pando bench plots`: draws the results in a folder, one SVG per benchmark."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.report import output_console, print_failure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = dict[str, Any]  # one result as JSON

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
COLOURS = dict(zip(MODES, ("#b3403a", "#8c8c8c", "#c9a24b", "#2f6f4f"), strict=True))
DEFAULT_FOLDER = Path("deploy/evaluation/results")


def add_plots_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando bench plots`."""
    parser.add_argument(
        "folder", type=Path, nargs="?", default=DEFAULT_FOLDER, help="folder with results (%(default)s)"
    )


def run_plots(arguments: argparse.Namespace) -> int:
    """Draw all plots; return the exit code."""
    if importlib.util.find_spec("matplotlib") is None:
        print_failure("pando bench plots", ModuleNotFoundError("matplotlib is not installed: run make install-dev"))
        return 2
    try:
        entries = read_entries(arguments.folder)
    except (OSError, ValueError) as error:
        print_failure("pando bench plots", error)
        return 2
    for path in draw_all(entries, arguments.folder):
        output_console().print(str(path), highlight=False)
    return 0


def read_entries(folder: Path) -> list[Entry]:
    """Return the results of all files in `folder`.

    Raises:
        ValueError: a file is not a list of results.
    """
    entries: list[Entry] = []
    for path in sorted(folder.glob("*.json")):
        found = orjson.loads(path.read_bytes())
        if not isinstance(found, list):
            raise ValueError(f"{path} is not a list of results")
        entries += found
    return entries


def draw_all(entries: Sequence[Entry], folder: Path) -> list[Path]:
    """Draw every benchmark that has entries; return the files written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    by_benchmark: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_benchmark[entry["benchmark"]].append(entry)
    written: list[Path] = []
    for benchmark, found in sorted(by_benchmark.items()):
        draw = _drawing_of(benchmark)
        if draw is None:
            continue
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        draw(figure, found)
        figure.suptitle(benchmark, fontsize=10)
        path = folder / f"{benchmark}.svg"
        # Without dates and random ids, so that equal results give equal files.
        with rc_context({"svg.hashsalt": "pando"}):
            figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


def _drawing_of(benchmark: str) -> Callable[[Figure, Sequence[Entry]], None] | None:
    for start, draw in DRAWINGS.items():
        if benchmark.startswith(start):
            return draw
    return None


def _value(entries: Sequence[Entry], label: str, metric: str) -> float | None:
    found = [entry for entry in entries if entry.get("label") == label and entry["metric"] == metric]
    return found[-1].get("value") if found else None


def _bars(axes: Axes, heights: dict[str, float | None], title: str) -> None:
    shown = {name: height for name, height in heights.items() if height is not None}
    bars = axes.bar(list(shown), list(shown.values()), color=[COLOURS.get(name, "#4a6fa5") for name in shown])
    axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", labelrotation=20, labelsize=7)


def _draw_simulation(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw hit rate, pages, and cost of a simulated cache by mode."""
    panels = figure.subplots(1, 3)
    subjects = (("hit_rate", "share of prompt tokens found"), ("mean_pages", "pages in use, mean"))
    for axes, (metric, title) in zip(panels, subjects, strict=False):
        _bars(axes, {mode: _value(entries, mode, metric) for mode in MODES}, title)
    _bars(panels[2], {mode: _value(entries, mode, "cost_per_request") for mode in MODES}, "cache, µs per request")


def _draw_tenants(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw throughput and time to first token by mode and phase, and the throughput after a cold start."""
    throughput, first, curve = figure.subplots(1, 3)
    names = {f"{mode}, {phase}": (mode, phase) for phase in ("cold", "warm") for mode in MODES}
    for axes, metric, title in (
        (throughput, "request_throughput", "requests/s: cold (pale), warm"),
        (first, "ttft_p50", "time to first token p50, ms"),
    ):
        for place, (label, (mode, phase)) in enumerate(names.items()):
            height = _value(entries, label, metric)
            if height is not None:
                at = place % len(MODES) + (0.0 if phase == "cold" else 0.4)
                axes.bar(at, height, 0.38, color=COLOURS[mode], alpha=0.45 if phase == "cold" else 1)
        axes.set_xticks([place + 0.2 for place in range(len(MODES))], MODES, fontsize=7, rotation=20)
        axes.set_title(title, fontsize=9)
    for mode in MODES:
        points = {
            entry["metric"]: entry["value"]
            for entry in entries
            if entry.get("label") == f"{mode}, cold" and entry["metric"].startswith("curve_")
        }
        if points:
            curve.plot([points[name] for name in sorted(points)], color=COLOURS[mode], label=mode)
    curve.set_title("after a cold start: requests/s, in groups of 8", fontsize=9)
    if curve.lines:
        curve.legend(fontsize=7)


def _draw_costs(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw the cost of a request over the size of the tree."""
    axes = figure.subplots()
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for entry in entries:
        parts = (entry.get("label") or "").split(", ")
        if len(parts) == 3 and entry["metric"].startswith("peek + commit + insert"):
            curves[parts[0]].append((int(parts[1].split()[0]), entry["value"]))
    for mode, points in sorted(curves.items()):
        nodes, costs = zip(*sorted(points), strict=True)
        axes.plot(nodes, costs, marker="o", color=COLOURS.get(mode), label=mode)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("nodes in the tree (a tenth as many users)")
    axes.set_ylabel("µs per peek + commit + insert")
    if curves:
        axes.legend(fontsize=7)


def _draw_attack(figure: Figure, entries: Sequence[Entry]) -> None:
    """Draw the AUC of each oracle by mode, with confidence intervals; controls, which must leak, as circles."""
    figure.set_size_inches(9, 4.8)
    axes = figure.subplots()
    shown = [entry for entry in entries if "value" in entry]
    oracles = list(dict.fromkeys(entry["metric"] for entry in shown))
    for entry in shown:
        mode = entry["label"]
        at = oracles.index(entry["metric"]) + ((MODES.index(mode) - 1.5) * 0.18 if mode in MODES else 0)
        low, high = max(entry["value"] - entry["low"], 0), max(entry["high"] - entry["value"], 0)
        face = "white" if entry.get("control") else COLOURS.get(mode)
        axes.errorbar(
            entry["value"], at, xerr=[[low], [high]], fmt="o", color=COLOURS.get(mode), mfc=face, markersize=4
        )
    axes.axvline(0.5, color="black", linewidth=0.6)
    axes.axvline(0.55, color="black", linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(oracles)), oracles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("AUC (0.5: guessing)")
    for mode in MODES:
        if any(entry["label"] == mode for entry in shown):
            axes.plot([], [], "o", color=COLOURS[mode], label=mode)
    axes.plot([], [], "o", color="black", mfc="white", label="control, must leak")
    axes.legend(fontsize=7, loc="center left")


# By the prefix of the benchmark's name.
DRAWINGS: dict[str, Callable[[Figure, Sequence[Entry]], None]] = {
    "cache-costs": _draw_costs,
    "cache-": _draw_simulation,
    "tenants-": _draw_tenants,
    "attack": _draw_attack,
}
