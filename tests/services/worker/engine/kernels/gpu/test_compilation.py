"""What Triton's interpreter runs is also what its compiler takes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton", reason="it compiles the programs")


@pytest.mark.slow
def test_programs_compile_without_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.services.worker.engine.kernels.gpu.compiling"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line) for line in done.stdout.splitlines()]
    assert len(sizes) == 188 + 31 + 22
    assert min(sizes) > 0
