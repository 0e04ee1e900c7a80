"""A pattern on a text that grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.patterns.program import Program

# A match spans at most so many characters: more are not held back, so what began earlier is given up.
MAX_SPAN = 4096
MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """Half-open range of characters, counted from the beginning of the text."""

    start: int
    end: int


class PatternMatcher:
    """Finds the first place at which a match ends; of those that end there, the longest."""

    __slots__ = ("_begin", "_known", "_position", "_program", "_threads")

    def __init__(self, program: Program) -> None:
        """Begin with an empty text."""
        self._program = program
        self._begin = [state for state in program.closure([program.start]) if program.characters[state] is not None]
        # State to the earliest place at which a match that is there now has begun.
        self._threads: dict[int, int] = {}
        # Whether a match may begin with a character, for those seen so far.
        self._known: dict[str, bool] = {}
        self._position = 0

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may still become (part of) a match."""
        return self._position - min(self._threads.values(), default=self._position)

    def step(self, character: str) -> Match | None:
        """Add a character; return the match that ends behind it."""
        program, position = self._program, self._position
        threads = self._threads
        if not threads and not self._begins(character):
            self._position = position + 1
            return None
        for state in self._begin:
            threads.setdefault(state, position)
        oldest = position + 1 - MAX_SPAN
        moved: dict[int, int] = {}
        for state, start in threads.items():
            characters = program.characters[state]
            if characters is not None and start >= oldest and characters.holds(character):
                following = program.nexts[state][0]
                if start < moved.get(following, position + 1):
                    moved[following] = start
        self._threads, self._position = {}, position + 1
        found = None
        for state, start in sorted(moved.items(), key=lambda item: item[1]):
            for reached in program.closure([state]):
                if program.characters[reached] is not None:
                    self._threads.setdefault(reached, start)
                elif reached == program.accept and found is None:
                    found = Match(start, position + 1)
        return found

    def _begins(self, character: str) -> bool:
        known = self._known.get(character)
        if known is None:
            sets = (self._program.characters[state] for state in self._begin)
            known = any(characters is not None and characters.holds(character) for characters in sets)
            if len(self._known) < MAX_KNOWN:
                self._known[character] = known
        return known
