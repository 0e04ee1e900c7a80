"""Waiting for conditions that cannot notify, for a limited time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# What takes a second may take a minute on a machine that is slow and busy.
TIMEOUT_S = 180.0


async def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Let other tasks run until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (conditions of all kinds, none of which can notify)
            await asyncio.sleep(0.005)


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = TIMEOUT_S,
    what: Callable[[], str] = lambda: "the condition",
    step_s: float = 0.05,
) -> float:
    """Wait until `condition` holds; return the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what()}"
        time.sleep(step_s)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    """Return whether the process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
