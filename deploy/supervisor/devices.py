"""Defaults of settings that depend on whether workers run on a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.settings import Settings, WorkerSettings

DRIVER = Path("/dev/nvidiactl")
# A CPU computes 512 tokens of a small model in the time in which a GPU computes 4,096 of a large one.
ON_GPUS = {"max_rows": 256, "max_step_tokens": 4096}


def suited(settings: Settings) -> Settings:
    """Return `settings` with more rows and longer steps if workers run on a GPU and these are not set."""
    chosen = settings.scheduler.model_fields_set
    changes = {name: value for name, value in ON_GPUS.items() if name not in chosen}
    if not changes or not runs_on_gpu(settings.worker):
        return settings
    return settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update=changes)})


def runs_on_gpu(worker: WorkerSettings) -> bool:
    """Whether a worker on this host will probably use a GPU, determined without importing torch."""
    if worker.device != "auto":
        return worker.device == "cuda"
    try:
        return DRIVER.exists() and not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
