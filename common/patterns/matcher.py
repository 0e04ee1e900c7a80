"""A pattern on a text that grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.patterns.program import Program

# A match spans at most so many characters: more are not held back, so what began earlier is given up.
MAX_SPAN = 4096
# Characters of which is known where they lead; texts have few different ones.
MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """Half-open range of characters, counted from the beginning of the text."""

    start: int
    end: int


class PatternMatcher:
    """Finds the first place at which a match ends; of those that end there, the longest.

    A character costs at most as much as the pattern has states, which is what makes hostile patterns harmless.
    """

    __slots__ = ("_begin", "_known", "_position", "_program", "_threads")

    def __init__(self, program: Program) -> None:
        """Begin with an empty text."""
        self._program = program
        self._begin = [state for state in program.closure([program.start]) if program.characters[state] is not None]
        # State to the earliest place at which a match that is there now has begun.
        self._threads: dict[int, int] = {}
        # Character to the states that it leads on from.
        self._known: dict[str, frozenset[int]] = {}
        self._position = 0

    @property
    def pending(self) -> int:
        """Characters at the end of the text that may still become (part of) a match."""
        return self._position - min(self._threads.values(), default=self._position)

    def step(self, character: str) -> Match | None:
        """Add a character; return the match that ends behind it."""
        position, accepting = self._position, self._accepting(character)
        self._position = position + 1
        threads = self._threads
        for state in self._begin:
            threads.setdefault(state, position)
        oldest = position + 1 - MAX_SPAN
        nexts = self._program.nexts
        moved: dict[int, int] = {}
        for state, start in threads.items():
            if state in accepting and start >= oldest:
                following = nexts[state][0]
                moved[following] = min(start, moved.get(following, start))
        self._threads = {}
        return self._spread(moved) if moved else None

    def _spread(self, moved: dict[int, int]) -> Match | None:
        """Go on without a character from the states reached; whoever has begun earlier comes first."""
        program, found = self._program, None
        seen: set[int] = set()
        for state, start in sorted(moved.items(), key=lambda item: item[1]):
            stack = [state]
            while stack:
                reached = stack.pop()
                if reached in seen:
                    continue
                seen.add(reached)
                if program.characters[reached] is not None:
                    self._threads[reached] = start
                elif reached == program.accept:
                    found = Match(start, self._position)
                else:
                    stack.extend(program.nexts[reached])
        return found

    def _accepting(self, character: str) -> frozenset[int]:
        known = self._known.get(character)
        if known is None:
            sets = enumerate(self._program.characters)
            known = frozenset(state for state, characters in sets if characters and characters.holds(character))
            if len(self._known) < MAX_KNOWN:
                self._known[character] = known
        return known
