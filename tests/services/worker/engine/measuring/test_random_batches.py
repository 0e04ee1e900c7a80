from __future__ import annotations

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.measuring.measurements import measure_peak


def test_a_step_that_does_not_fit_next_to_the_weights_names_the_settings() -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB")

    with pytest.raises(ConfigurationError, match=r"Tried to allocate 40.00 GiB; make scheduler.max_step_tokens"):
        measure_peak(run, torch.device("cpu"))
