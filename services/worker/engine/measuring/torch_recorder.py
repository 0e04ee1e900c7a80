"""Records operators and, on a GPU, kernels with torch's profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


class TorchRecorder:
    """See `services.worker.profiles.ProfileRecorder`."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Neither shapes nor stacks: they cost more time than most operators.
        self._profile = profile(activities=activities)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        """Write a trace in Chrome's format, compressed."""
        self._profile.export_chrome_trace(str(path))

    def span(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks a span of time in the trace."""
        return record_function(name)
