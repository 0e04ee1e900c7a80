from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.worker.engine.parallel.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

if not torch.cuda.is_available():
    # Triton reads it when a program is defined: without a GPU its interpreter runs them, where it is installed.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for tensor-parallel ranks."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or without one the CPU, where Triton's interpreter runs the programs."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
