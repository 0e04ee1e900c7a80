"""Looking up a prompt's pages in storage, in whose names they may be there, without knowing how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.cache.types import Scope

# A run that came whole is followed by one so many times as long: few round trips where much is there, and where
# nothing is, one page of the host tier was kept free for it.
GROWTH = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Pages [first, first + pages) of a prompt, as stored in the name of `scope`."""

    scope: Scope
    first: int
    pages: int


class Prefetch:
    """How far one prompt has been loaded, and what to ask for next.

    Pages of one prompt may be stored partly as public and partly as its user's own. Where it is not known which, one
    page is asked for under each name; what came is followed up under the same name. It is over when a page is under
    none of the names.
    """

    def __init__(self, scopes: Sequence[Scope], position: int, end: int) -> None:
        """Look for pages [position, end), of which one or more are missing, in the names of `scopes`."""
        assert position < end
        self.first = position
        self.position = position
        self._scopes = scopes
        self._end = end
        self._open = 0
        self._missed: set[Scope] = set()
        self._next = [Run(scope, position, 1) for scope in scopes]

    @property
    def is_done(self) -> bool:
        """Whether nothing more is asked for, and nothing under way."""
        return not self._next and not self._open

    def peek_run(self) -> Run | None:
        """Return what is to be asked for next, if anything is."""
        return self._next[0] if self._next else None

    def take_run(self, pages: int) -> Run:
        """Return what is asked for now: the run of `peek_run`, or as many of its pages as there is room for."""
        run = self._next.pop(0)
        assert 0 < pages <= run.pages
        self._open += 1
        return Run(run.scope, run.first, pages)

    def stop(self) -> None:
        """Ask for nothing more."""
        self._next = []
        self._end = self.position

    def abandon(self) -> None:
        """Be done: nothing that is under way will arrive."""
        self.stop()
        self._open = 0

    def arrive(self, run: Run, done: int) -> int:
        """Take note that the first `done` pages of a run came; return how many of them, its last, are new."""
        self._open -= 1
        new = max(run.first + done - self.position, 0)
        if new:
            self.position += new
            self._missed.clear()
        if done < run.pages:
            if run.first + done == self.position:
                self._missed.add(run.scope)
        elif new and self.position < self._end:
            pages = min(run.pages * GROWTH, self._end - self.position)
            self._next.append(Run(run.scope, self.position, pages))
        if self.is_done and self.position < self._end:
            untried = [scope for scope in self._scopes if scope not in self._missed]
            self._next += [Run(scope, self.position, 1) for scope in untried[:1]]
        return new


class RateLimit:
    """So many units per second, and as many at once as one second allows. Times are seconds of one clock."""

    def __init__(self, per_second: float) -> None:
        """Allow `per_second` units; 0: any number."""
        self._per_second = per_second
        self._level = per_second
        self._updated_at: float | None = None

    def available(self, now: float) -> float:
        """Return how much may be taken now; pure."""
        if not self._per_second:
            return float("inf")
        since = 0.0 if self._updated_at is None else now - self._updated_at
        return min(self._level + since * self._per_second, self._per_second)

    def take(self, amount: float, now: float) -> None:
        """Use some of what is available; a debt is paid off by waiting."""
        if self._per_second:
            self._level, self._updated_at = self.available(now) - amount, now
