"""Turns of lines: how many run in a gateway at a time, and whose line is next."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.batches.files import FileOwner


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    owner: FileOwner
    granted: asyncio.Future[None]


class LineTurns:
    """A number of turns, of which each running line has one.

    A free turn goes to the tenant with the fewest turns, within it to the owner with the fewest, then to the line that
    has waited longest. So neither many batches nor long ones give their owner more of the scheduler's queue.
    """

    def __init__(self, turns: int) -> None:
        self._free = turns
        self._of_tenant: Counter[str] = Counter()
        self._of_owner: Counter[FileOwner] = Counter()
        # In order of arrival; each batch waits with at most one line.
        self._waiting: list[_Waiting] = []

    async def take(self, owner: FileOwner) -> None:
        """Wait for a turn of a line of `owner`."""
        waiting = _Waiting(owner, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting.granted.cancelled():
                with contextlib.suppress(ValueError):  # `_grant` has dropped it
                    self._waiting.remove(waiting)
            else:
                self.give_back(owner)
            raise

    def give_back(self, owner: FileOwner) -> None:
        """End a turn."""
        self._free += 1
        self._of_tenant[owner.tenant] -= 1
        self._of_owner[owner] -= 1
        # Only owners with turns are kept.
        self._of_tenant, self._of_owner = +self._of_tenant, +self._of_owner
        self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            # Of equal ones, `min` returns the first.
            next_one = min(
                self._waiting, key=lambda each: (self._of_tenant[each.owner.tenant], self._of_owner[each.owner])
            )
            self._waiting.remove(next_one)
            if next_one.granted.cancelled():
                continue
            self._free -= 1
            self._of_tenant[next_one.owner.tenant] += 1
            self._of_owner[next_one.owner] += 1
            next_one.granted.set_result(None)
