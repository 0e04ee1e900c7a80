"""The lowest class: when sequences of batches may run, and how soon they are out of the way of other requests."""

from __future__ import annotations

# For so long after the last interactive sequence, another one is likely, and batches run in short steps.
WATCHFUL_S = 10.0
# Share of a step's tokens that prompts of batches may have then.
WATCHFUL_PART = 8


class BatchClass:
    """Judges by the time since the last interactive sequence what batches may do.

    They pause first, since requests often follow each other. Then they run watchfully: one plan of one step at a time,
    with few prompt tokens, so that a request that arrives waits only for the step under way. On a machine that has
    been idle for longer they use whole steps and plans in advance.
    """

    def __init__(self, pause_s: float) -> None:
        """Batches pause for `pause_s` seconds."""
        self._pause_s = pause_s
        self._interactive_at: float | None = None

    def note_interactive(self, now: float) -> None:
        """Note that an interactive sequence waits or runs."""
        self._interactive_at = now

    def must_pause(self, now: float) -> bool:
        """Whether no sequence of a batch may run yet."""
        return self._interactive_at is not None and now - self._interactive_at < self._pause_s

    def is_watchful(self, now: float) -> bool:
        """Whether sequences of batches run in short steps."""
        return self._interactive_at is not None and now - self._interactive_at < self._pause_s + WATCHFUL_S
