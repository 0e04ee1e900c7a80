"""The tables in `deploy/evaluation/README.md` name every experiment, result and plot, and their figures are true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "evaluation"
TEXT = (FOLDER / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and ".json`" in line
]
# `metric`, `qualifier`, …: value. A qualifier is a benchmark, a model or a label.
FIGURE = re.compile(r"((?:`[^`]+`(?:, )?)+): ([\d.,]+)")


def result_files(cell: str) -> list[str]:
    return re.findall(r"`(\w+\.json)`", cell)


def test_each_result_file_answers_one_question() -> None:
    named = [name for row in ROWS for name in result_files(row[2])]
    assert sorted(named) == sorted(path.name for path in (FOLDER / "results").glob("*.json"))


def test_each_result_file_names_the_document_that_discusses_it() -> None:
    named = [re.findall(r"\]\(([^)]+\.md)\)", row[5]) for row in ROWS if row[5] != "here only"]
    assert len(named) > 30
    assert all(len(documents) > 0 for documents in named)
    assert [name for documents in named for name in documents if not (FOLDER / name).is_file()] == []


def test_documents_of_benchmarks_name_the_result_files_that_they_discuss() -> None:
    discussed = [
        (name, document)
        for row in ROWS
        for name in result_files(row[2])
        for document in re.findall(r"\]\(([^)]+/docs/benchmarks/\w+\.md)\)", row[5])
    ]
    assert len(discussed) > 20
    assert [pair for pair in discussed if pair[0] not in (FOLDER / pair[1]).read_text()] == []


def test_each_plot_is_linked() -> None:
    linked = re.findall(r"\]\((results/[^)]+\.svg)\)", TEXT)
    assert len(linked) > 0
    assert sorted(linked) == sorted(f"results/{path.name}" for path in (FOLDER / "results").glob("*.svg"))


def test_each_experiment_is_listed() -> None:
    folder = FOLDER / "experiments"
    programs = [path for path in folder.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    modules = {".".join(path.relative_to(folder).with_suffix("").parts) for path in programs}
    assert len(modules) > 15
    assert modules <= set(re.findall(r"python -m deploy\.evaluation\.experiments\.([\w.]+)", TEXT))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(result_files(row[2])))
def test_figures_are_those_of_the_file(row: list[str]) -> None:
    (name,) = result_files(row[2])
    entries = json.loads((FOLDER / "results" / name).read_text())
    figures = FIGURE.findall(row[4])
    assert len(figures) > 0
    for words, value in figures:
        metric, *qualifiers = re.findall(r"`([^`]+)`", words)
        found = {
            f"{entry['value']:,g}"
            for entry in entries
            if entry["metric"] == metric
            and "value" in entry
            and set(qualifiers) <= {entry["benchmark"], entry["model"], entry.get("label")}
        }
        assert value in found, (metric, qualifiers, found)
