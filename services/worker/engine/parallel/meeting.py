"""How ranks find each other, at an address that rank 0 serves."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # from a compiled module

_RETRY_S = 0.1
# Under this key is the name of the group that has met in a store last.
_LAST = "last"
# Message to the ranks of a group that has ended.
LEFT = b"left"


def mailbox(rank: int) -> str:
    """Return the name of the queue of messages to a rank, in the store of its group."""
    return f"to/{rank}"


def meet(rank: int, world_size: int, address: str, timeout: timedelta) -> Store:
    """Return a store of all ranks in which nothing is, once all of them are at `address` (host:port).

    Another rank may come while rank 0 still serves the store of a group that has ended, since ranks that are configured
    again do not wait for each other. What it would read there leads nowhere. So it waits until rank 0 greets it, which
    rank 0 does in a new store only, and tries again if the old one goes away. It leaves the message `LEFT` to the ranks
    of that group, which may not know yet that it has ended.

    Raises:
        dist.DistError: not all of them came in time, or rank 0 cannot listen at the address.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            store = TCPStore(
                host.strip("[]"), int(port), world_size, is_master=rank == 0, timeout=left, wait_for_workers=False
            )
            name = _greet(store, world_size) if rank == 0 else _arrive(store, rank, world_size)
        except dist.DistNetworkError:
            if rank == 0 or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return PrefixStore(name, store)


def _greet(store: TCPStore, world_size: int) -> str:
    """Tell each other rank under which name the group's entries are, and return it."""
    name = uuid.uuid4().hex
    for rank in range(1, world_size):
        store.set(f"welcome/{store.get(f'arrived/{rank}').decode()}", name)
    store.set(_LAST, name)
    return name


def _arrive(store: TCPStore, rank: int, world_size: int) -> str:
    # Before this rank has arrived, no group can have met in a new store.
    if store.check([_LAST]):
        ended = PrefixStore(store.get(_LAST).decode(), store)
        for other in range(world_size):
            ended.queue_push(mailbox(other), LEFT)
    arrival = uuid.uuid4().hex
    store.set(f"arrived/{rank}", arrival)
    return store.get(f"welcome/{arrival}").decode()
