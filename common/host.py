"""Cores and memory of this host that the process may use, and memory that it keeps."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
# `mallopt` of glibc: parameters, and the largest threshold it accepts.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 1024**2
# Twice the above, to which glibc raises the limit by itself once a process has freed as large a block.
KEPT_BYTES = 64 * 1024**2


def available_processors() -> int:
    """Return logical processors this process may keep busy: its CPU set, within its CPU quota."""
    return _within_quota(len(_allowed()))


def available_cores() -> int:
    """Return physical cores this process may keep busy: its CPU set without hyperthread siblings, within its CPU quota.

    Matrix products fill a core's vector units, so a second thread on the same core only adds contention.
    """
    return _within_quota(len({_siblings(cpu) for cpu in _allowed()}))


def available_memory() -> int:
    """Return bytes this process may still take: free and reclaimable memory, within its control group's limit."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used) + _reclaimable()))
    return available


def keep_freed_memory(most_bytes: int = KEPT_BYTES) -> None:
    """Let this process keep up to `most_bytes` of freed memory for the next use, where the C library is glibc.

    Otherwise blocks of more than 128 KiB are often mapped, filled with zeros by the system and unmapped for each use,
    which takes longer than what is done with them where they are only copied.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, most_bytes)


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _within_quota(count: int) -> int:
    quota = _cpu_quota()
    return max(1, count if quota is None else min(count, round(quota)))


def _siblings(cpu: int) -> str:
    return _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)


def _cpu_quota() -> float | None:
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _reclaimable() -> int:
    """Return bytes of files that the control group has cached and not used lately; they count as used by it."""
    statistics = dict(line.split(maxsplit=1) for line in _read(_CGROUP / "memory.stat").splitlines())
    return int(statistics.get("inactive_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
