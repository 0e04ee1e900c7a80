"""FlashInfer's wrappers in turns, so that none is planned again before the device has its plan."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Wrapper = TypeVar("Wrapper")

# Plans that may wait for the device. It has begun with a pass before the second one after it is planned.
_TURNS: Final = 2


class Event(Protocol):
    """A point in the device's stream of work, as `torch.cuda.Event` is."""

    def record(self) -> object:
        """Set it behind all that the current stream has to do."""

    def synchronize(self) -> object:
        """Wait until the device has come to it."""


class _Past:
    """An event on a CPU, which does everything at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def event_on(device: torch.device) -> Event:
    """Return an event of a device."""
    return torch.cuda.Event() if device.type == "cuda" else _Past()


@dataclass(frozen=True, slots=True)
class _Turn(Generic[Wrapper]):
    wrapper: Wrapper
    has_copied: Event


class PlanTurns(Generic[Wrapper]):
    """Wrappers of which each keeps its plan in pinned memory, from which the device copies it in stream order.

    The host may be several passes ahead of the device. With only one wrapper, it would overwrite plans that have not
    been copied yet.
    """

    def __init__(
        self, make: Callable[[], Wrapper], device: torch.device, make_event: Callable[[torch.device], Event] = event_on
    ) -> None:
        """Take turns with what `make` returns, on `device`."""
        self._turns = deque(_Turn(make(), make_event(device)) for _ in range(_TURNS))

    def plan(self, run: Callable[[Wrapper], object]) -> Wrapper:
        """Plan with `run` by the wrapper whose turn it is, and return that; wait if its last plan is still needed."""
        turn = self._turns[0]
        turn.has_copied.synchronize()
        run(turn.wrapper)
        turn.has_copied.record()
        self._turns.rotate(-1)
        return turn.wrapper
