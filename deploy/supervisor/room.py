"""Whether this host has memory, processors and GPUs for all processes of a deployment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.host import available_memory
from deploy.supervisor.layout import available_cores, runs_on_gpu
from deploy.supervisor.models import deploy_models

if TYPE_CHECKING:
    from common.settings import Settings
    from deploy.supervisor.layout import Replicas
    from deploy.supervisor.models import DeployedModel

# What a process takes at least, in bytes: a worker with the smallest model, and any other service. The rest is for the
# weights, the KV and the host tier, which workers compare with the free memory themselves.
WORKER_BYTES = 400 << 20
SERVICE_BYTES = 50 << 20
# Workers that compute on one core of a CPU are each slower than one alone by at least this factor.
WORKERS_PER_CORE = 8
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of this host; `gpus` is None where GPUs cannot be counted."""

    cores: int
    memory_bytes: int
    gpus: int | None


def find_host() -> Host:
    """Return the cores, memory and GPUs that this process may use now."""
    return Host(available_cores(), available_memory(), count_gpus())


def count_gpus() -> int | None:
    """Return the number of GPUs that workers may use; None if it is not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in _DEVICES.glob("nvidia*")) or None


def check_room(settings: Settings, ranks: int, replicas: Replicas, host: Host) -> None:
    """Raise ConfigurationError if the host has no room for the processes, with the number of groups that fit."""
    deployed = deploy_models(settings, ranks)
    on_gpus = [model for model in deployed if _computes(model) and runs_on_gpu(model.settings.worker)]
    on_cpus = [model for model in deployed if _computes(model) and model not in on_gpus]
    # Models that take turns on a device all have one worker there for each rank.
    together = max if settings.scheduler.device_turns.enabled else sum
    groups = len(replicas.groups)
    if on_gpus and host.gpus is not None:
        first = settings.worker.device_index
        workers, most = together(_workers(model, replicas) for model in on_gpus), max(host.gpus - first, 0)
        if workers > most:
            there = f"{_number(most, 'GPU')}{f' from {first} on' if first else ''}"
            reason = f"{_number(workers, 'worker')} need a GPU each, and there are {there}"
            raise ConfigurationError(f"{reason}: {_remedy(groups, most / workers)}")
    workers, most = sum(_workers(model, replicas) for model in on_cpus), WORKERS_PER_CORE * host.cores
    if workers > most:
        reason = (
            f"{_number(workers, 'worker')} on {_number(host.cores, 'core')} are too many, {most} make sense at most"
        )
        raise ConfigurationError(f"{reason}: {_remedy(groups, most / workers)}")
    services = len(deployed) * (groups + replicas.tokenizers + replicas.detokenizers) + 1
    needed = services * SERVICE_BYTES
    for model in deployed:
        needed += _workers(model, replicas) * (WORKER_BYTES if _computes(model) else SERVICE_BYTES)
    if needed > host.memory_bytes:
        workers = sum(_workers(model, replicas) for model in deployed)
        reason = (
            f"{_number(workers, 'worker')} and {_number(services, 'other service')} take at least "
            f"{needed / 2**30:.1f} GiB of memory, without KV and most weights, and {host.memory_bytes / 2**30:.1f} GiB "
            "are free"
        )
        raise ConfigurationError(f"{reason}: {_remedy(groups, host.memory_bytes / needed)}")


def _remedy(groups: int, share: float) -> str:
    """Describe what fits if `share` of these groups does."""
    fewer = "start fewer ranks (--tp, --pp), encoders, tokenizers or detokenizers"
    return f"start at most {_number(fit, 'group')} of this size (--roles)" if (fit := int(groups * share)) else fewer


def _computes(model: DeployedModel) -> bool:
    return model.settings.model.load_format != "fake"


def _workers(model: DeployedModel, replicas: Replicas) -> int:
    return sum(replicas.ranks_of(model)) + replicas.total_encoders


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
