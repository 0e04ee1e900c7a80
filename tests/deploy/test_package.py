"""What the package says of itself, and what a wheel of it holds."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from deploy.setup.requirements import requirements_of

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("common", "deploy", "gateway", "protos", "services")
CHECKOUT_ONLY = (ROOT / "deploy" / "evaluation" / "experiments", ROOT / "deploy" / "release")
DISTRIBUTIONS = packages_distributions()
OTHER_NAMES = {"flashinfer": "flashinfer-python"}
COPIES = {
    "CITATION.cff": r"^version: (\S+)$",
    "deploy/helm/pando/Chart.yaml": r'^(?:version|appVersion): "?([^"\s]+)"?$',
    "deploy/images/services.Dockerfile": r"^ARG VERSION=(\S+)$",
    "deploy/images/worker-cpu.Dockerfile": r"^ARG VERSION=(\S+)$",
    "deploy/images/worker-cuda.Dockerfile": r"^ARG VERSION=(\S+)$",
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_version_agree_with_pyproject(name: str) -> None:
    found = re.findall(COPIES[name], (ROOT / name).read_text(), flags=re.MULTILINE)
    assert found
    assert set(found) == {PROJECT["version"]}


def test_the_changelog_has_the_version() -> None:
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_licence_is_that_of_the_images() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    for name in COPIES:
        if name.endswith(".Dockerfile"):
            assert 'licenses="Apache-2.0"' in (ROOT / name).read_text()


def test_a_wheel_contains_all_runtime_files_and_no_development_files(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="make install-dev installs hatchling")
    (wheel,) = builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"pando-{PROJECT['version']}.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    needed = {
        "deploy/cli/commands.py",
        "deploy/evaluation/attack/command.py",
        "deploy/evaluation/bench/command.py",
        "deploy/supervisor/command.py",
        "gateway/quotas/meters.lua",
        "protos/pando/v1/common.proto",
        "services/scheduler/content/rules.toml",
    }
    assert needed <= set(names)
    assert len([name for name in names if name.endswith(".cpp")]) > 0
    rooms = "checks|compose|evaluation/(experiments|results|shapes)|helm|images|locks|release|setup"
    unwanted = rf"\.(md|so|svg|yaml|Dockerfile|sh|txt)$|^deploy/({rooms})/|^protos/generate"
    elsewhere = [name for name in names if ".dist-info/" not in name and not name.startswith("gateway/console/static/")]
    assert [name for name in elsewhere if re.search(unwanted, name)] == []
    assert {"gateway/console/static/index.html", "gateway/console/static/vendor/htm.LICENSE.txt"} <= set(names)


# Which extras must provide what a part imports; the third column is what comes in another way: with FastAPI and
# pydantic, or without its dependencies (deploy/locks/grammars.txt).
PARTS = [
    ("common", ["tokenizer", "tracing"], set()),
    ("gateway", ["gateway"], {"starlette", "pydantic-core"}),
    ("services/tokenizer", ["tokenizer", "video"], set()),
    ("services/detokenizer", ["detokenizer"], set()),
    ("services/scheduler", ["scheduler", "kv-events"], set()),
    ("services/worker", ["worker", "gpu", "transformers"], {"xgrammar"}),
    ("deploy", ["all", "analysis"], set()),
]


@pytest.mark.parametrize(("folder", "extras", "apart"), PARTS, ids=[part[0] for part in PARTS])
def test_imports_of_each_part_are_declared_in_its_extras(folder: str, extras: list[str], apart: set[str]) -> None:
    requirements = requirements_of(PROJECT["dependencies"], PROJECT["optional-dependencies"], extras)
    declared = {canonical(re.split(r"[\[<>=~! ]", line, maxsplit=1)[0]) for line in requirements} | apart
    imported = third_party(ROOT / folder)
    assert len(imported) > 0
    # A package that is not installed here, such as FlashInfer, has its distribution's name or is in the table.
    owners = {
        name: {canonical(owner) for owner in DISTRIBUTIONS.get(name, [OTHER_NAMES.get(name, name)])}
        for name in imported
    }
    assert {name: names for name, names in owners.items() if not names & declared} == {}


def third_party(folder: Path) -> set[str]:
    """Return the top-level modules that packaged files below `folder` import, without ours and Python's own."""
    found = set()
    for path in folder.rglob("*.py"):
        if any(path.is_relative_to(folder) for folder in CHECKOUT_ONLY):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - {*PACKAGES, "tests", *sys.stdlib_module_names}


def canonical(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
