from __future__ import annotations

import pytest

from services.worker.engine.kernels.cpu.build import BuildError, build_library, find_openmp
from services.worker.engine.kernels.cpu.library import CpuLibrary


@pytest.fixture(scope="session")
def library() -> CpuLibrary:
    """The compiled operators; without a compiler their tests say so instead of passing."""
    import torch  # noqa: F401  # loads the OpenMP runtime that the operators share

    try:
        return CpuLibrary(build_library(find_openmp()))
    except BuildError as error:
        pytest.skip(f"the CPU operators cannot be compiled here: {error}")
