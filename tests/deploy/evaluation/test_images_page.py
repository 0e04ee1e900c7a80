"""The tables of `docs/benchmarks/images.md` show what `results/images.json` has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.results import read_results

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "benchmarks" / "images.md").read_text()
RESULTS = read_results(ROOT / "deploy" / "evaluation" / "results" / "images.json")
LARGE, TINY = "qwen2.5-vl-7b", "qwen2.5-vl-tiny"
# The model of each table, and the label of each of its columns.
TABLES: list[tuple[str, tuple[str | None, ...]]] = [
    (LARGE, ("pando", "vllm 0.22.1")),
    (TINY, ("pando, bfloat16", "vllm 0.32.0, bfloat16")),
    (TINY, ("before, Xeon", "overtaking, Xeon")),
    (TINY, (None, "encoders: 1")),
]
# How rows begin, and the metrics of the figures in each of their cells, with N for the number at once; cells may leave
# out the last ones.
METRICS = {
    "new ones, one output token each": ("throughput, N at once",),
    "first token after 1 and after 4 new ones": ("TTFT, 1 image, new", "TTFT, 4 images, new"),
    "… and when the same user asks": ("TTFT, 1 image, again", "TTFT, 4 images, again"),
    "first token of turns 2 to 10": tuple(f"{name}, turns 2 to 10 of a chat" for name in ("TTFT", "cached", "prompt")),
    "time between chunks": ("ITL p50, N streams alone", "ITL p99, N streams alone"),
    "… beside 4 new images": ("ITL p50, N streams beside 4 images/s", "ITL p99, N streams beside 4 images/s"),
    "… beside 4 new texts": ("ITL p50, N streams beside 4 texts/s", "ITL p99, N streams beside 4 texts/s"),
    "first token of these images and": ("TTFT, 1 image, new, beside N streams", "TTFT, text, new, beside N streams"),
    "first token of texts that come beside": ("TTFT, text, new, beside N streams",),
    "first token of images that come beside": ("TTFT, 1 image, new, beside N streams",),
}
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?<!,)")


def tables() -> list[list[list[str]]]:
    """Return the cells of the rows of each table, without its heading."""
    found = re.findall(r"^\|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]


def figures() -> Iterator[tuple[str, str | None, str, str]]:
    """Yield model, label, metric and shown figure of each figure in the tables."""
    for rows, (model, labels) in zip(tables(), TABLES, strict=True):
        for name, *cells in rows:
            (metrics,) = (value for start, value in METRICS.items() if name.startswith(start))
            for label, cell in zip(labels, cells, strict=True):
                shown = FIGURE.findall(cell)
                assert 0 < len(shown) <= len(metrics), cell
                yield from ((model, label, metric, each) for metric, each in zip(metrics, shown, strict=False))


def is_rounded(value: float, shown: str) -> bool:
    """Tell whether `shown` is `value`, rounded to as many decimals."""
    return abs(value - float(shown.replace(",", ""))) <= 0.5001 * 10.0 ** -len(shown.partition(".")[2])


@pytest.mark.parametrize(("model", "label", "metric", "shown"), list(figures()))
def test_figures_in_tables_are_those_of_the_file(model: str, label: str | None, metric: str, shown: str) -> None:
    pattern = re.escape(metric).replace("N", r"\d+")
    of_column = [each for each in RESULTS if (each.model, each.label) == (model, label)]
    values = [each.value for each in of_column if re.fullmatch(pattern, each.metric)]
    assert len(values) == 1
    assert is_rounded(values[0], shown), values


def test_figures_that_are_not_rounded_values_would_be_found() -> None:
    assert all(is_rounded(value, shown) for value, shown in [(2.602, "2.602"), (4.815, "4.82"), (1488.0, "1,488")])
    assert not any(is_rounded(value, shown) for value, shown in [(2.602, "2.599"), (6.02, "6.018"), (25.3, "13.2")])
