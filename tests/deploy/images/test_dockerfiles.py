"""The images' recipes: what hadolint says, and what every one of them has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")
every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def final_stage(path: Path) -> str:
    return re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)[-1]


def test_there_are_three() -> None:
    assert [path.stem for path in DOCKERFILES] == ["services", "worker-cpu", "worker-cuda"]


@every_image
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python:latest\nRUN cd /tmp && pip install grpcio\n")
    done = subprocess.run([HADOLINT, "-f", "json", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert {"DL3007", "DL3013"} <= {finding["code"] for finding in json.loads(done.stdout)}


@every_image
def test_it_runs_as_nobody_in_particular(path: Path) -> None:
    users = re.findall(r"^USER (.*)$", final_stage(path), flags=re.MULTILINE)
    assert users == ["10001:10001"]


@every_image
def test_bases_and_indexes_are_arguments(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE) == ["${BUILD_BASE}", "${BASE}"]
    assert "ARG PIP_INDEX_URL" in text


@every_image
def test_versions_are_the_locked_ones(path: Path) -> None:
    for command in re.findall(r"pip install ([^\n]*)", path.read_text()):
        assert "-c deploy/locks/constraints.txt" in command or "-r deploy/locks/models.txt" in command
    assert "# syntax=" not in path.read_text()


@every_image
def test_it_says_what_it_is_and_whether_it_works(path: Path) -> None:
    stage = final_stage(path)
    assert {"title", "description", "version", "revision", "licenses"} <= set(
        re.findall(r"org\.opencontainers\.image\.(\w+)=", stage)
    )
    assert '["python", "-m", "deploy.health", ' in stage


@pytest.mark.parametrize("name", ["services", "worker-cpu"])
def test_nothing_is_installed_beside_what_was_built(name: str) -> None:
    stage = final_stage(ROOT / "deploy" / "images" / f"{name}.Dockerfile")
    assert not re.search(r"^RUN", stage, flags=re.MULTILINE)
