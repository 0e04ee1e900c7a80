"""The image for NVIDIA GPUs as far as it shows without one; it is tens of minutes to build, so tested where it was."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

IMAGE = f"pando-worker-cuda:{os.environ.get('PANDO_TAG', '0.1.0')}"
BUILD = f"docker build -f deploy/images/worker-cuda.Dockerfile -t {IMAGE} ."
pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def labels() -> dict[str, Any]:
    try:
        command = ["docker", "image", "inspect", "--format", "{{json .Config.Labels}}", IMAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no docker here")
    if done.returncode:
        pytest.skip(f"{IMAGE} is not built here: {BUILD}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def inside(program: str) -> Any:
    """Run a Python program in the image, as strictly as compose does; return its output, as JSON."""
    # FlashInfer asks for the GPU, unless it is told which one is meant.
    options = [
        "--rm",
        "--read-only",
        "--cap-drop=ALL",
        "--network=none",
        "--tmpfs=/tmp",
        "--env=FLASHINFER_CUDA_ARCH_LIST=9.0a",
    ]
    command = ["docker", "run", *options, IMAGE, "python", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_has_a_title_label(labels: dict[str, Any]) -> None:
    assert labels["org.opencontainers.image.title"] == "Pando worker (CUDA)"


def test_it_runs_unprivileged_and_has_no_compiler(labels: dict[str, Any]) -> None:
    program = (
        "import json, os, shutil\n"
        "tools = [name for name in ('gcc', 'g++', 'cc', 'nvcc', 'make', 'pip') if shutil.which(name)]\n"
        "print(json.dumps([os.getuid(), tools]))"
    )
    assert inside(program) == [10001, []]


def test_the_image_contains_torch_for_gpus_and_attention_kernels_for_an_h100(labels: dict[str, Any]) -> None:
    program = (
        "import json, torch\n"
        "from services.worker.engine.kernels.gpu.prebuild import attention_specs, is_missing\n"
        "there = not is_missing(64, torch.bfloat16, has_window=False, capability=(9, 0))\n"
        "odd = is_missing(72, torch.bfloat16, has_window=False, capability=(9, 0))\n"
        "[spec] = attention_specs('9.0a', [64], [torch.bfloat16], [False])\n"
        "print(json.dumps([torch.version.cuda, there, odd, b'sm_90a' in spec.aot_path.read_bytes()]))"
    )
    cuda, *kernels = inside(program)
    assert cuda.startswith("13.")
    assert kernels == [True, True, True]


def test_triton_finds_its_c_file_compiled(labels: dict[str, Any]) -> None:
    # Loading the module takes a driver; that the compiler's substitute hands it out does not.
    program = (
        "import json, pathlib, tempfile, triton.backends.nvidia as nvidia\n"
        "from triton.runtime.build import _build\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "source = folder / 'cuda_utils.c'\n"
        "source.write_bytes((pathlib.Path(nvidia.__file__).parent / 'driver.c').read_bytes())\n"
        "built = _build('cuda_utils', str(source), str(folder), [], [], ['libcuda.so.1'], [])\n"
        "print(json.dumps(b'PyInit_cuda_utils' in pathlib.Path(built).read_bytes()))"
    )
    assert inside(program) is True
