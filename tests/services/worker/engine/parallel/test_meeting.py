"""How ranks find each other when some of them die meanwhile."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # from a compiled module

from services.worker.engine.parallel.meeting import connect, meet
from tests.services.worker.engine.parallel.ranks import free_address
from tests.waiting import wait_until

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

RANKS = 3
TIMEOUT = timedelta(seconds=120)
# Of the meeting with a rank that is dead; live ones may need several attempts where the machine is busy.
CONNECTING_TIMEOUT = timedelta(seconds=3)


def wait_for(address: str, key: str) -> None:
    """Wait until a key is in the store that rank 0 serves at `address`."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), timeout=TIMEOUT, wait_for_workers=False)
    wait_until(lambda: store.check([key]), TIMEOUT.total_seconds())


def test_a_rank_that_dies_while_others_are_missing_is_met_once_it_has_been_started_again() -> None:
    address = free_address()
    with ThreadPoolExecutor(RANKS) as pool:
        first = pool.submit(meet, 0, RANKS, address, TIMEOUT)
        # Killed, a thread could not be.
        died = multiprocessing.get_context("spawn").Process(target=meet, args=(1, RANKS, address, TIMEOUT))
        died.start()
        wait_for(address, "arrived/1")
        died.kill()
        died.join()
        others = [pool.submit(meet, rank, RANKS, address, TIMEOUT) for rank in (2, 1)]
        stores = [each.result(TIMEOUT.total_seconds()) for each in (first, *others)]
    for rank, store in enumerate(stores):
        store.set(f"{rank}", f"from {rank}")
    assert [stores[0].get(f"{rank}") for rank in range(RANKS)] == [b"from 0", b"from 1", b"from 2"]


def meet_and_die(rank: int, address: str) -> None:
    """Be welcomed, and connect to no other rank."""
    meet(rank, RANKS, address, TIMEOUT)
    os._exit(0)


def connect_at_last(rank: int, address: str, results: Queue[tuple[int, int, float]]) -> None:
    """Connect, as often as it takes; put rank, attempts and the sum of all ranks' numbers into `results`."""
    attempts = 0
    while True:
        attempts += 1
        try:
            connect(rank, RANKS, address, torch.device("cpu"), CONNECTING_TIMEOUT)
            number = torch.tensor([float(rank)])
            dist.all_reduce(number)
        except RuntimeError:
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        results.put((rank, attempts, number.item()))
        dist.destroy_process_group()
        return


def test_a_rank_that_dies_after_the_meeting_is_not_waited_for_and_met_again() -> None:
    address, context = free_address(), multiprocessing.get_context("spawn")
    results: Queue[tuple[int, int, float]] = context.Queue()
    died = context.Process(target=meet_and_die, args=(1, address))
    alive = [context.Process(target=connect_at_last, args=(rank, address, results)) for rank in (0, 2)]
    try:
        for process in (died, *alive):
            process.start()
        died.join(TIMEOUT.total_seconds())
        assert died.exitcode == 0
        again = context.Process(target=connect_at_last, args=(1, address, results))
        alive.append(again)
        again.start()
        found = sorted(results.get(timeout=TIMEOUT.total_seconds()) for _ in range(RANKS))
    finally:
        for process in (died, *alive):
            process.kill()
            process.join()
    assert [(rank, total) for rank, _, total in found] == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert all(attempts > 1 for rank, attempts, _ in found if rank != 1)
