"""Which build of torch is asked for, by a pip that only writes down what it is asked."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy" / "setup" / "torch.sh"


def asked(folder: Path, flavour: str, failing: str = "nothing") -> tuple[list[str], str]:
    """Return pip's arguments, a line per call, and the script's output; calls with `failing` in them fail."""
    pip, log = folder / "pip", folder / "log"
    pip.write_text(f'#!/usr/bin/env bash\necho "$*" >>"{log}"\n[[ "$*" != *{failing}* ]]\n')
    pip.chmod(0o755)
    environment = os.environ | {"CUDA_HOME": str(folder)}
    run = subprocess.run(
        ["bash", str(SCRIPT), str(pip), "2.13.0", flavour],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return log.read_text().splitlines(), run.stderr


def test_a_gpu_installation_uses_only_the_default_build_with_locked_packages(tmp_path: Path) -> None:
    (call,), _ = asked(tmp_path, "gpu")
    # One that says which build it is, such as 2.13.0+cpu, is another string.
    assert "torch===2.13.0" in call.split()
    constraints = [Path(name).resolve() for name in re.findall(r"-c (\S+)", call)]
    assert constraints == [ROOT / "deploy" / "locks" / name for name in ("constraints.txt", "gpu.txt")]


def test_a_gpu_installation_falls_back_to_the_pytorch_index(tmp_path: Path) -> None:
    (_, call), _ = asked(tmp_path, "gpu", failing="===")
    assert re.search(r"torch==2\.13\.0\+(cu\d+) .*/whl/\1$", call)


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere there is one build only")
def test_without_a_gpu_the_cpu_build_is_asked_for_first_and_the_default_build_announced(tmp_path: Path) -> None:
    calls, said = asked(tmp_path, "cpu", failing="+cpu")
    assert [call.split("torch==")[1].split()[0] for call in calls] == ["2.13.0+cpu", "2.13.0+cpu", "2.13.0"]
    assert "several GB" in said


@pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere there is one build only")
def test_without_a_gpu_one_call_is_enough_where_there_is_a_cpu_build(tmp_path: Path) -> None:
    (call,), said = asked(tmp_path, "cpu")
    assert "torch==2.13.0+cpu" in call.split()
    assert said == ""
