from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from deploy.checks.structure import (
    DIALECT,
    circles_of,
    count_settings,
    imported_once,
    imports_of,
    measure,
    python_files,
)
from deploy.checks.structure import ROOT as CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = {
    "common/a.py": "from common.b import thing\nimport json\n",
    "common/b.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from common.a import other\nfrom common import c\n"
    ),
    "common/c.py": "def late():\n    import common.d\n",
    "common/d.py": "from common import c\n",
    "gateway/__init__.py": "",
    "gateway/e.py": "from gateway import e\nfrom common.a import x\n",
}


def test_imports_for_annotations_count_only_if_asked_for() -> None:
    assert imports_of(SOURCES, with_types=False)["common/b.py"] == {"common/c.py"}
    assert imports_of(SOURCES, with_types=True)["common/b.py"] == {"common/a.py", "common/c.py"}


def test_import_cycles_are_found_wherever_the_import_stands() -> None:
    assert circles_of(imports_of(SOURCES, with_types=False)) == [["common/c.py", "common/d.py"]]
    assert circles_of(imports_of(SOURCES, with_types=True)) == [
        ["common/c.py", "common/d.py"],
        ["common/a.py", "common/b.py"],
    ]


def test_files_with_one_importer_in_their_own_folder_are_counted() -> None:
    graph = {"x/a.py": {"x/b.py", "y/c.py"}, "x/b.py": set(), "y/c.py": set(), "y/d.py": {"x/b.py"}}
    assert imported_once(graph) == 0
    graph["y/d.py"] = set()
    assert imported_once(graph) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Return the pages", 0),
        ('"""What the cache holds."""', 1),
        ('"""Return what a row needs."""', 1),
        ("nobody tells whoever waits behind", 4),
        ("a string, rows, release", 0),
    ],
)
def test_dialect_is_counted_by_word(text: str, count: int) -> None:
    assert len(DIALECT.findall(text)) == count


def test_figures_are_those_of_the_checkout_that_is_named(tmp_path: Path) -> None:
    for package in ("common/settings", "deploy", "gateway", "services"):
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "common/settings/__init__.py").write_text(
        "from pydantic import BaseModel\nclass A(BaseModel):\n    x: int = 1\n    y: int = 2\n"
        "class Settings(BaseModel):\n    a: A = A()\n    z: int = 3\n"
    )
    (tmp_path / "common/__init__.py").touch()
    (tmp_path / "services/wire.py").write_text("# nobody\n\n\n")
    (tmp_path / "README.md").write_text("Plain.\n")
    figures = measure(tmp_path)
    assert (figures.files, figures.largest_file, figures.largest_lines) == (3, "common/settings/__init__.py", 7)
    assert (figures.settings, figures.converter_lines, figures.circles) == (3, 3, 0)
    assert figures.dialect_per_thousand_lines == round(1000 / 11, 2)


def test_this_checkout_has_settings() -> None:
    assert count_settings(CHECKOUT) > 50


def test_every_public_class_has_a_name_of_its_own() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path in python_files(CHECKOUT):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.relative_to(CHECKOUT).as_posix())
    assert len(files) > 100
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
