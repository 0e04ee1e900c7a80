"""The images' recipes: what hadolint says, and what every one of them has."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
COMPILER = ROOT / "deploy" / "images" / "prebuilt_compiler.py"
HADOLINT = Path(sys.executable).with_name("hadolint")
every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


def final_stage(path: Path) -> str:
    return re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)[-1]


def test_there_are_three_dockerfiles() -> None:
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
def test_it_runs_as_an_unprivileged_user(path: Path) -> None:
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
        assert "-c deploy/locks/" in command or "-r deploy/locks/models.txt" in command
    assert "# syntax=" not in path.read_text()


@every_image
def test_it_has_labels_and_a_health_check(path: Path) -> None:
    stage = final_stage(path)
    assert {"title", "description", "version", "revision", "licenses"} <= set(
        re.findall(r"org\.opencontainers\.image\.(\w+)=", stage)
    )
    assert '["python", "-m", "deploy.health", ' in stage


@every_image
def test_the_final_stage_installs_nothing(path: Path) -> None:
    commands = re.findall(r"^RUN (.*)$", final_stage(path), flags=re.MULTILINE)
    assert commands == (["install -d -o 10001 -g 10001 /cache"] if path.stem == "worker-cuda" else [])


def test_only_the_image_for_gpus_looks_for_a_driver_where_gke_mounts_it() -> None:
    paths = {path.stem: re.findall(r"LD_LIBRARY_PATH=(\S+)", final_stage(path)) for path in DOCKERFILES}
    assert paths == {"services": [], "worker-cpu": [], "worker-cuda": ["/usr/local/nvidia/lib64"]}


def test_gpu_packages_are_locked_in_one_file_only() -> None:
    locks = ROOT / "deploy" / "locks"
    gpu, rest = (
        {line.partition("==")[0].lower().replace("_", "-") for line in (locks / name).read_text().splitlines()}
        for name in ("gpu.txt", "constraints.txt")
    )
    assert {"triton", "nvidia-cuda-nvcc"} <= gpu
    assert {name for name in gpu & rest if not name.startswith("#")} == set()


def test_without_a_compiler_only_prebuilt_objects_are_returned(tmp_path: Path) -> None:
    prebuilt, source, target = tmp_path / "prebuilt", tmp_path / "cuda_utils.c", tmp_path / "cuda_utils.so"
    source.write_text("int answer(void) { return 42; }\n")
    prebuilt.mkdir()
    (prebuilt / f"{hashlib.sha256(source.read_bytes()).hexdigest()}.so").write_bytes(b"compiled")

    def compile_(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(COMPILER), str(path), "-O3", "-shared", "-o", str(target), "-l:libcuda.so.1"]
        environment = {"PANDO_PREBUILT": str(prebuilt)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert compile_(source).returncode == 0
    assert target.read_bytes() == b"compiled"
    source.write_text("int answer(void) { return 43; }\n")
    refused = compile_(source)
    assert refused.returncode == 1
    assert "no compiler" in refused.stderr
