"""Metrics of the experts that a rank holds as a whole, from the engine's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker import metrics

if TYPE_CHECKING:
    from common.steps import ExpertLoad

# Reading the counts waits for the device, so a rank that is never idle reads them this rarely.
_PASSES_PER_READING = 4096


class ExpertMetrics:
    """Follows the counts of one rank."""

    def __init__(self) -> None:
        """Start without counts."""
        self._tokens: dict[int, int] = {}
        self._read_at = 0

    def are_due(self, finished_passes: int, *, is_idle: bool) -> bool:
        """Return whether counts are to be read, and note that they are."""
        if finished_passes == self._read_at or not (is_idle or finished_passes - self._read_at >= _PASSES_PER_READING):
            return False
        self._read_at = finished_passes
        return True

    def update(self, load: ExpertLoad) -> None:
        """Bring the metrics up to `load`, whose counts start from zero again when the engine is configured or wakes."""
        metrics.EXPERT_IMBALANCE.set(load.imbalance)
        for expert, tokens in enumerate(load.tokens, start=load.first):
            before = self._tokens.get(expert, 0)
            metrics.EXPERT_TOKENS_TOTAL.labels(expert).inc(tokens - before if tokens >= before else tokens)
            self._tokens[expert] = tokens
