"""The states of a rank, and a snapshot of one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.steps import EngineCapacity, EngineSpec, SleepLevel


class WorkerState(Enum):
    """Life of a rank, as `GetState` names it."""

    IDLE = "IDLE"
    CONFIGURING = "CONFIGURING"
    READY = "READY"
    SLEEPING = "SLEEPING"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of a rank. `heartbeat_age_s` counts from the last heartbeat of the engine's thread."""

    state: WorkerState
    spec: EngineSpec | None
    capacity: EngineCapacity | None
    open_rows: int
    finished_passes: int
    heartbeat_age_s: float
    open_plans: int
    # None: it does not sleep.
    sleep_level: SleepLevel | None
