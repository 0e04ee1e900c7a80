from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or without one the CPU, where Triton's interpreter runs the programs."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
