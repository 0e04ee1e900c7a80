"""Lookup of a prompt's pages in storage, under the names of several scopes, without knowing how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.cache.types import Scope

# Factor between a complete run and the next one: few round trips where much is stored, and where nothing is, one page
# of the host tier was reserved in vain.
GROWTH = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Pages [first, first + pages) of a prompt, as stored under the name of `scope`."""

    scope: Scope
    first: int
    pages: int


class Prefetch:
    """Progress of loading one prompt, and the next runs to request.

    Pages of one prompt may be stored partly as public and partly as the user's own. Where this is unknown, one page is
    requested under each name; a hit is continued under the same name. The lookup ends at a page that is under none of
    the names.
    """

    def __init__(self, scopes: Sequence[Scope], position: int, end: int) -> None:
        """Look for pages [position, end), of which at least one is missing, under the names of `scopes`."""
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
        """Whether nothing more is requested or in flight."""
        return not self._next and not self._open

    def peek_run(self) -> Run | None:
        """Return the next run to request, if there is one."""
        return self._next[0] if self._next else None

    def take_run(self, pages: int) -> Run:
        """Take the run of `peek_run`, shortened to `pages`."""
        run = self._next.pop(0)
        assert 0 < pages <= run.pages
        self._open += 1
        return Run(run.scope, run.first, pages)

    def stop(self) -> None:
        """Request nothing more."""
        self._next = []
        self._end = self.position

    def abandon(self) -> None:
        """Finish at once: nothing in flight will arrive."""
        self.stop()
        self._open = 0

    def arrive(self, run: Run, done: int) -> int:
        """Record that the first `done` pages of a run arrived; return how many of these, at its end, are new."""
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
    """A limit of units per second, with a burst of one second's worth. Times are seconds of one clock."""

    def __init__(self, per_second: float) -> None:
        """Allow `per_second` units; 0: unlimited."""
        self._per_second = per_second
        self._level = per_second
        self._updated_at: float | None = None

    def available(self, now: float) -> float:
        """Return how many units may be taken now; changes nothing."""
        if not self._per_second:
            return float("inf")
        since = 0.0 if self._updated_at is None else now - self._updated_at
        return min(self._level + since * self._per_second, self._per_second)

    def take(self, amount: float, now: float) -> None:
        """Take units; a debt is paid off over time."""
        if self._per_second:
            self._level, self._updated_at = self.available(now) - amount, now
