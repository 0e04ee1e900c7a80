"""A measured figure and its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.evaluation.bench.figures import Spread

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
    """Upper bound in the same unit; None: no target."""

    @classmethod
    def of(cls, metric: str, name: str, values: Sequence[float], unit: str, target: float | None = None) -> Figure:
        """Return the figure of repeated measurements."""
        return cls(metric, name, Spread.of(values), unit, target)

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the target; None without a target."""
        return None if self.target is None else self.spread.median <= self.target
