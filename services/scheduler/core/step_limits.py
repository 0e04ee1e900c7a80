"""Limits on steps: as configured, or lower after device memory did not suffice."""

from __future__ import annotations

from dataclasses import dataclass

# Steps smaller than this would not save enough memory to justify a restart of the group.
LEAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class VisionLimits:
    """Limits in embeddings: of what a step encodes beside its other images, and of kept outputs.

    `open_bytes` are those of the pixels of all open requests. An image has its embeddings in runs of `block`, which
    chunks must not cut; 0: they may. Outputs are numbered from `first_output` on.
    """

    step_embeddings: int = 1024
    kept_embeddings: int = 0
    open_bytes: int = 1024 * 1024 * 1024
    block: int = 0
    first_output: int = 1


class StepLimits:
    """Owns the limits that the planner observes.

    They shrink only after a group of ranks was lost to an out-of-memory error; a single rank makes a failing step
    smaller by itself. As a group that failed at a step size would fail again, and a restart takes long, the limits
    never grow.
    """

    def __init__(self, max_step_tokens: int, max_rows: int, least_tokens: int = LEAST_TOKENS) -> None:
        """Start with the configured limits; steps of `least_tokens` must remain possible."""
        self._least_tokens = least_tokens
        self.tokens = max_step_tokens
        self.rows = max_rows

    def try_shrink(self) -> bool:
        """Lower the limits: to a quarter of the tokens, and once that is at its minimum, to half of the rows.

        Returns:
            Whether the limits could be lowered.
        """
        if self.tokens > self._least_tokens:
            self.tokens = max(self.tokens // 4, self._least_tokens)
            return True
        if self.rows > 1:
            self.rows //= 2
            return True
        return False
