"""Durations of operations, measured on a sample of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")

# Reading a thread's processor time is a system call, which takes about as long as a peek.
SAMPLED_ONE_IN = 16


@dataclass(slots=True, eq=False)
class OperationCost:
    """Number of calls of one operation, and the duration of the measured ones in seconds."""

    calls: int = 0
    measured_calls: int = 0
    measured_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Estimated duration of all calls."""
        return self.measured_s * self.calls / self.measured_calls if self.measured_calls else 0.0


class OperationTimes:
    """Counts and measures calls of named operations."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Measure with `clock`, in seconds."""
        self._clock = clock
        self._costs: dict[str, OperationCost] = {}

    def __iter__(self) -> Iterator[tuple[str, OperationCost]]:
        """Iterate over the operations and their costs."""
        return iter(self._costs.items())

    def timed(self, name: str, function: Callable[P, R], one_in: int = SAMPLED_ONE_IN) -> Callable[P, R]:
        """Wrap `function` to count its calls as `name` and to measure one in `one_in`, beginning with the first."""
        cost = self._costs.setdefault(name, OperationCost())
        clock = self._clock

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            is_measured = cost.calls % one_in == 0
            cost.calls += 1
            if not is_measured:
                return function(*args, **kwargs)
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                cost.measured_s += clock() - started
                cost.measured_calls += 1

        return call
