"""Runs functions as several ranks, each in a process of its own, on GPUs also where these are fewer than ranks."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch

from deploy.supervisor.layout import free_port

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
            self._pool.apply_async(_run, (function, rank, world_size, rendezvous, *arguments))
            for rank in range(world_size)
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


def gpu_of(rank: int) -> int:
    """Return the number of a rank's GPU. Ranks share GPUs where there are fewer."""
    return rank % max(1, torch.cuda.device_count())


def can_capture() -> bool:
    """Return whether passes of ranks can be captured: each has a GPU of its own, or there is none.

    Captured passes of two ranks that shared a GPU were seen to wait for each other for ever (NCCL 2.28, over sockets).
    """
    return torch.cuda.device_count() != 1


def share_gpus(rank: int, world_size: int) -> None:
    """Let this process, which has not met others yet, be a rank that may share its GPU with other ranks.

    NCCL refuses two ranks of one host on one GPU. Told that each is on a host of its own, it connects them by sockets.
    """
    if 0 < torch.cuda.device_count() < world_size:
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def free_address() -> str:
    """Return host:port on which nothing listens, none of those that the system gives to connections meanwhile."""
    return f"127.0.0.1:{free_port('127.0.0.1')}"


def _run(function: Callable[..., object], rank: int, world_size: int, *arguments: object) -> object:
    share_gpus(rank, world_size)
    return function(rank, world_size, *arguments)


def _start() -> Pool:
    # torch and its threads must not be inherited by fork.
    return multiprocessing.get_context("spawn").Pool(MOST_RANKS)
