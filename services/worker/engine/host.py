"""Cores and memory of this host that the process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def available_cores() -> int:
    """Return physical cores this process may keep busy: its CPU set without hyperthread siblings, within its CPU quota.

    Matrix products fill a core's vector units, so a second thread on the same core only adds contention.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    quota = _cpu_quota()
    return max(1, len(cores) if quota is None else min(len(cores), round(quota)))


def available_memory() -> int:
    """Return bytes this process may still take: free and reclaimable memory, within its control group's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def limit_spinning() -> None:
    """Have threads that wait for each other go to sleep soon, unless the operator says otherwise.

    Call it before torch is loaded. Threads of an OpenMP region wait for each other by spinning, for as long as it
    takes. If the system puts two of them on one core, or another process takes the core, each region then costs a
    whole time slice; so spin briefly (1,000 iterations of GNU's runtime take about 0.1 ms), then sleep.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _siblings(cpu: int) -> str:
    return _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)


def _cpu_quota() -> float | None:
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
