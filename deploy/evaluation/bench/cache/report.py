"""Tables and results of simulated caches."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from deploy.evaluation.bench.cache.tally import OPERATIONS
from deploy.evaluation.bench.results import ResultSheet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.evaluation.bench.cache.tally import CacheFigures
    from deploy.evaluation.bench.results import Provenance

NONE = "–"


def cache_table(figures: Mapping[str, CacheFigures], title: str) -> Table:
    """Return the figures of all modes as a table."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for mode in figures:
        table.add_column(mode, justify="right")
    rows = [_cells(shown, figures.get("shared")) for shown in figures.values()]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def cost_table(figures: Mapping[str, CacheFigures]) -> Table:
    """Return the costs of the operations in each mode as a table."""
    table = Table(title="µs per operation: median (mean)", title_justify="left")
    table.add_column("")
    for mode in figures:
        table.add_column(mode, justify="right")
    for name in OPERATIONS:
        costs = [shown.costs.get(name) for shown in figures.values()]
        table.add_row(name, *(f"{cost.median_us:.1f} ({cost.mean_us:.1f})" if cost else NONE for cost in costs))
    table.add_row("all of them, per request", *(f"{per_request_us(shown):.1f}" for shown in figures.values()))
    return table


def per_request_us(figures: CacheFigures) -> float:
    """Return the time of the cache per request in microseconds, epoch boundaries included."""
    return sum(cost.total_s for cost in figures.costs.values()) / max(figures.requests, 1) * 1e6


def sheet_of(
    mode: str, figures: CacheFigures, shared: CacheFigures | None, benchmark: str, provenance: Provenance
) -> ResultSheet:
    """Return the figures of one mode as results; the label is the mode."""
    sheet = ResultSheet(benchmark, "none", 1, provenance, mode)
    sheet.add("hit_rate", figures.hit_rate, "share")
    sheet.add("ideal_hits_within_users", figures.ideal_own / max(figures.input_tokens, 1), "share")
    across = figures.ideal_shared - figures.ideal_own
    sheet.add("ideal_hits_across_users", across / max(figures.input_tokens, 1), "share")
    sheet.add("crossing_tokens", figures.crossing_tokens, "tokens")
    sheet.add("fairness", figures.fairness, "Jain's index")
    sheet.add("mean_pages", figures.mean_pages, "pages")
    sheet.add("last_pages", figures.last_pages, "pages")
    sheet.add("promotions", figures.promotions, "nodes")
    sheet.add("false_demotions", figures.demotions, "nodes")
    sheet.add("false_quarantines", figures.quarantines, "nodes")
    if figures.promoted_after_s:
        sheet.add("promoted_after_p50", median(figures.promoted_after_s), "s")
    if shared is not None:
        sheet.add("hits_of_shared", figures.hit_tokens / max(shared.hit_tokens, 1), "ratio")
        sheet.add("pages_of_shared", figures.mean_pages / max(shared.mean_pages, 1), "ratio")
    for name, cost in figures.costs.items():
        sheet.add(f"{name}_p50", cost.median_us, "µs")
        sheet.add(f"{name}_mean", cost.mean_us, "µs")
    sheet.add("cost_per_request", per_request_us(figures), "µs")
    return sheet


def _cells(figures: CacheFigures, shared: CacheFigures | None) -> dict[str, str]:
    hits, pages = figures.hit_tokens, figures.mean_pages
    waits = figures.promoted_after_s
    ideal = figures.ideal_shared / max(figures.input_tokens, 1)
    return {
        "requests, of users": f"{figures.requests:,}, {figures.users:,}",
        "prompt tokens": f"{figures.input_tokens:,}",
        "hit tokens": f"{hits:,}",
        "hit rate": f"{figures.hit_rate:.1%}",
        "… of an unlimited cache": f"{ideal:.1%}",
        "hit tokens of shared's": f"{hits / shared.hit_tokens:.3f}" if shared and shared.hit_tokens else NONE,
        "hits across users without evidence": f"{figures.crossing_tokens:,}",
        "Jain's index of hit rates": f"{figures.fairness:.3f}",
        "pages in use, mean": f"{pages:,.0f}",
        "pages in use, of shared's": f"{pages / shared.mean_pages:.3f}" if shared and shared.mean_pages else NONE,
        "nodes at the end": f"{figures.nodes:,}",
        "system prompts public, of seen": f"{len(waits)} of {figures.prompts_seen}",
        "… after, median (longest)": f"{median(waits):.0f} ({max(waits):.0f}) s" if waits else NONE,
        "promotions": f"{figures.promotions:,}",
        "false quarantines, demotions": f"{figures.quarantines:,}, {figures.demotions:,}",
        "too large for memory": f"{figures.refused:,}",
    }
