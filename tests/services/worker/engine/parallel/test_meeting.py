"""How ranks find each other when some of them die meanwhile."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # from a compiled module

from services.worker.engine.parallel.meeting import meet
from tests.waiting import wait_until

RANKS = 3
TIMEOUT = timedelta(seconds=120)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


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
