"""The libraries that a service loads before it serves: each costs start-up time after a crash, and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Libraries that take tens of milliseconds to seconds to import, by the names of their packages.
HEAVY = {
    "cryptography",
    "fastapi",
    "gguf",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "jwt",
    "llguidance",
    "openai",
    "pandas",
    "pyarrow",
    "redis",
    "requests",
    "safetensors",
    "scipy",
    "tiktoken",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
    "xgrammar",
}
# Those with which a service does its own work. The rest waits until a setting asks for it.
NEEDED = {
    "services.scheduler": {"cryptography"},
    "services.tokenizer": {"jinja2", "tokenizers"},
    "services.detokenizer": {"tokenizers"},
    "gateway": {"cryptography", "fastapi", "httpx", "jwt", "redis", "uvicorn"},
}
_PROGRAM = "import sys, {module}.__main__; print(*{{name.partition('.')[0] for name in sys.modules}})"


@pytest.mark.parametrize("module", NEEDED)
def test_a_service_imports_only_the_heavy_libraries_that_it_needs(module: str) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(module=module)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert "grpc" in loaded
    assert HEAVY & set(loaded) == NEEDED[module]


# Torch's compiler and what it imports, each of which takes about a second.
COMPILER = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers", "triton"}
_LOADED = """
import sys
import services.worker.__main__
from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_model

engine = torch_engine(lambda spec, report: load_model(spec, report, RunnerOptions(device="cpu", threads=1)))
engine.configure(EngineSpec("smollm2-135m-instruct", device_pages=16), lambda share, stage: None)
print(*sys.modules)
"""


def test_a_worker_that_has_loaded_a_model_on_a_cpu_has_not_imported_the_compiler_of_torch() -> None:
    command = [sys.executable, "-c", _LOADED]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert {"torch", "services.worker.engine.encoder.model"} <= set(loaded)
    assert not COMPILER & set(loaded)
