"""Runs functions as several ranks, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.pool import Pool

MOST_RANKS = 4
_TIMEOUT_SECONDS = 500


class Ranks:
    """Processes that stay for several groups of ranks: starting them takes longest."""

    def __init__(self) -> None:
        self._pool = _start()

    def run(self, function: Callable[..., object], world_size: int, *arguments: object) -> list[Any]:
        """Return what `function(rank, world_size, rendezvous, *arguments)` returned, for each rank in order."""
        assert world_size <= MOST_RANKS, "ranks wait for each other, so each needs a process"
        rendezvous = free_address()
        waiting = [
            self._pool.apply_async(function, (rank, world_size, rendezvous, *arguments)) for rank in range(world_size)
        ]
        try:
            return [result.get(_TIMEOUT_SECONDS) for result in waiting]
        except multiprocessing.TimeoutError:
            # What hangs here must not hold up the tests after this one.
            self.stop()
            self._pool = _start()
            raise

    def stop(self) -> None:
        """End the processes."""
        self._pool.terminate()
        self._pool.join()


def free_address() -> str:
    """Return host:port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _start() -> Pool:
    # torch and its threads must not be inherited by fork.
    return multiprocessing.get_context("spawn").Pool(MOST_RANKS)
