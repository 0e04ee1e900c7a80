"""How large steps may be: as configured, or less since memory did not suffice for one."""

from __future__ import annotations

# A step of fewer tokens than this saves no memory worth another start of the group.
LEAST_TOKENS = 16


class StepLimits:
    """Owns the limits that the planner keeps to.

    They shrink only when a group of ranks was lost for want of memory: alone, a rank makes a step smaller by itself. A
    group that could not do a step once cannot do it the next time, and starting anew takes long, so they stay small.
    """

    def __init__(self, max_step_tokens: int, max_rows: int, least_tokens: int = LEAST_TOKENS) -> None:
        """Begin with what is configured; steps of `least_tokens` must remain possible."""
        self._least_tokens = least_tokens
        self.tokens = max_step_tokens
        self.rows = max_rows

    def try_shrink(self) -> bool:
        """Allow less than before: a quarter of the tokens, and when that is little, half of the rows.

        Returns:
            Whether anything was left to take away.
        """
        if self.tokens > self._least_tokens:
            self.tokens = max(self.tokens // 4, self._least_tokens)
            return True
        if self.rows > 1:
            self.rows //= 2
            return True
        return False
