"""Copies from host memory to the device that do not wait for it.

From other memory than pinned, a copy waits for all launched passes, and the device for what is launched after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `values` on the device without waiting for it."""
    return upload(torch.from_numpy(np.ascontiguousarray(values)), device)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of host memory on the device without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
