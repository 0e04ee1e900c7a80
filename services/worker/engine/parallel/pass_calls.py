"""How ranks that share experts find out that one of them begins a pass, in which all of them take part."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from services.worker.engine.execution.interface import ExpertGroupError
from services.worker.engine.parallel.meeting import LEFT, mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store  # type: ignore[attr-defined]  # from a compiled module

_LOADED = b"loaded"
# A rank may be idle as long as there are no requests.
_IDLE = timedelta(days=1000)


class QueuedPassCalls:
    """Numbers the passes of a group, and tells its ranks about those that begin.

    A rank ends pass n only after all ranks have begun it, so every rank knows the same numbers. `next_call` belongs to
    one thread at a time, everything else to the engine's.
    """

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        """Use `store`, which all ranks have in common and which is empty."""
        # Connections of their own: a blocked one serves no other thread.
        self._speaking, self._listening = (store.clone() for _ in range(2))  # type: ignore[attr-defined]  # not in its stubs
        self._listening.set_timeout(_IDLE)
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        self._begun = 0
        self._called = 0
        self._is_closed = False

    def begin(self) -> None:
        """Begin the next pass with tokens of this rank, and call the other ranks to it."""
        self._tell_others(str(self._begun).encode())
        self._begun += 1

    def try_join(self, number: int) -> bool:
        """Begin pass `number` without tokens; return False if this rank has begun it already."""
        if number != self._begun:
            return False
        self._begun += 1
        return True

    def next_call(self) -> int | None:
        """Wait for a call to a pass that this rank has not begun, and return its number; None after `close`.

        Raises:
            ExpertGroupError: the group has ended.
        """
        while True:
            message = self._receive()
            if self._is_closed:
                return None
            if message == _LOADED:
                continue
            number = int(message)
            # Every rank with tokens calls.
            if number >= self._begun and number >= self._called:
                self._called = number + 1
                return number

    def load_together(self, join: Callable[[int], object]) -> None:
        """Wait until all ranks have loaded; `join` takes part in passes by which some of them measure meanwhile.

        Raises:
            ExpertGroupError: the group has ended.
        """
        self._tell_others(_LOADED)
        missing = len(self._others)
        while missing:
            message = self._receive()
            if message == _LOADED:
                missing -= 1
            else:
                join(int(message))

    def close(self) -> None:
        """Leave the group: the other ranks notice, and so does the thread that waits for a call."""
        self._is_closed = True
        try:
            self._tell_others(LEFT)
            self._speaking.queue_push(mailbox(self._rank), LEFT)
        except dist.DistError:
            pass  # the store is gone, so the others have noticed

    def _receive(self) -> bytes:
        try:
            message: bytes = self._listening.queue_pop(mailbox(self._rank))
        except dist.DistError as error:
            message, reason = LEFT, str(error)
        else:
            reason = "a rank has left, or was started again"
        if message == LEFT and not self._is_closed:
            raise ExpertGroupError(f"the ranks that share experts have to meet again: {reason.splitlines()[0]}")
        return message

    def _tell_others(self, message: bytes) -> None:
        for other in self._others:
            self._speaking.queue_push(mailbox(other), message)
