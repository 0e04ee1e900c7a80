"""A measured figure beside what was aimed at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.bench.figures import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the control plane."""

    metric: str
    name: str
    spread: Spread
    unit: str
    target: float | None = None
    """An upper bound, in the same unit; absent: only reported."""

    @classmethod
    def of(cls, metric: str, name: str, values: Sequence[float], unit: str, target: float | None = None) -> Figure:
        """Make a figure of repeats."""
        return cls(metric, name, Spread.of(values), unit, target)

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the target; None without one."""
        return None if self.target is None else self.spread.median <= self.target
