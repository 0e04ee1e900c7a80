"""How ranks find each other, at an address that rank 0 serves, and connect."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # from a compiled module
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

# Long enough for the slowest rank to load a large model, short enough to notice that one never came.
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# Once all ranks are there, they connect at once. One that does not has died since.
CONNECTING_TIMEOUT = timedelta(seconds=60)
_RETRY_S = 0.1
# A rank that does not answer for so long has died since it arrived.
_ANSWER_TIMEOUT = timedelta(seconds=5)
# Under this key is the name of the group that has met in a store last.
_LAST = "last"
# Message to the ranks of a group that has ended.
LEFT = b"left"
# Message to ranks that have arrived and have answered.
_WELCOME = b"welcome"


def connect(
    rank: int, world_size: int, rendezvous: str, device: torch.device, timeout: timedelta = CONNECTING_TIMEOUT
) -> Store:
    """Meet all ranks and make them torch's default group; return a store that they have in common, and that is empty.

    Over gloo, ranks connect within `timeout`, and wait in collectives for `RENDEZVOUS_TIMEOUT`; receiving from one rank
    needs a timeout of its own, or has that of connecting.

    Raises:
        RuntimeError: not all of them came or connected in time, or rank 0 cannot listen at the address. They may meet
            again.
    """
    store = meet(rank, world_size, rendezvous, RENDEZVOUS_TIMEOUT)
    is_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=RENDEZVOUS_TIMEOUT if is_gpu else timeout,
            device_id=device if is_gpu else None,
        )
    except RuntimeError:
        # The next group would have another number than in ranks that have not failed, and not find them.
        _world.group_count = 0
        raise
    _set_pg_timeout(RENDEZVOUS_TIMEOUT)
    return store


def connect_some(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Return a group of some of the connected ranks, None: of all; every rank makes all groups, in the same order.

    Without `backend`, it is that of the default group.

    Raises:
        RuntimeError: a rank has died.
    """
    is_gloo = (backend or dist.get_backend()) == "gloo"
    timeout = CONNECTING_TIMEOUT if is_gloo else RENDEZVOUS_TIMEOUT
    made: Any = dist.new_group(ranks, timeout=timeout, backend=backend)  # Any: a number in ranks outside of it
    if ranks is None or dist.get_rank() in ranks:
        _set_pg_timeout(RENDEZVOUS_TIMEOUT, made)
    group: dist.ProcessGroup = made
    return group


def mailbox(rank: int) -> str:
    """Return the name of the queue of messages to a rank, in the store of its group."""
    return f"to/{rank}"


def meet(rank: int, world_size: int, address: str, timeout: timedelta) -> Store:
    """Return a store of all ranks in which nothing is, once all of them are at `address` (host:port).

    A rank that has arrived may die while others are missing, and another process takes its place. So rank 0 greets them
    only once all have answered it, and asks again if one does not.

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
            name = _greet(store, world_size, deadline) if rank == 0 else _arrive(store, rank, world_size)
        except dist.DistNetworkError:
            if rank == 0 or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return PrefixStore(name, store)


def _greet(store: TCPStore, world_size: int, deadline: float) -> str:
    """Tell each other rank under which name the group's entries are, once all answer, and return it."""
    while True:
        name = uuid.uuid4().hex
        arrivals = [store.get(f"arrived/{rank}").decode() for rank in range(1, world_size)]
        for arrival in arrivals:
            store.queue_push(_waiting(arrival), name)
        try:
            store.wait([_answer(arrival, name) for arrival in arrivals], _ANSWER_TIMEOUT)
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise
            continue
        store.set(_LAST, name)
        for arrival in arrivals:
            store.queue_push(_waiting(arrival), _WELCOME)
        return name


def _arrive(store: TCPStore, rank: int, world_size: int) -> str:
    # Before this rank has arrived, no group can have met in a new store.
    if store.check([_LAST]):
        ended = PrefixStore(store.get(_LAST).decode(), store)
        for other in range(world_size):
            ended.queue_push(mailbox(other), LEFT)
    arrival = uuid.uuid4().hex
    store.set(f"arrived/{rank}", arrival)
    name = ""
    while (message := store.queue_pop(_waiting(arrival))) != _WELCOME:
        name = message.decode()
        store.set(_answer(arrival, name), "here")
    return name


def _waiting(arrival: str) -> str:
    """Return the queue of messages to a rank that has arrived: names of groups, to be answered, then `_WELCOME`."""
    return f"waiting/{arrival}"


def _answer(arrival: str, name: str) -> str:
    return f"answer/{arrival}/{name}"
