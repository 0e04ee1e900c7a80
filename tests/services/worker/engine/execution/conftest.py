from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, where Triton's interpreter runs the programs, and a GPU, for which they are compiled."""
    if request.param == "compiled":
        return torch.device("cuda", 0)
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    return torch.device("cpu")
