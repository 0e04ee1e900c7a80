"""Incremental matching of a pattern against text that arrives character by character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.patterns.program import Program

# Longest match in characters. Longer partial matches are dropped, so that at most this much text is held back.
MAX_SPAN = 4096
# Distinct characters whose accepting states are cached; texts have few distinct ones.
MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """The half-open range [start, end) of characters, counted from the beginning of the text."""

    start: int
    end: int


class PatternMatcher:
    """Finds the match with the earliest end; of several with the same end, the longest.

    The cost per character is at most linear in the pattern's states, so that hostile patterns are harmless.
    """

    __slots__ = ("_begin", "_known", "_position", "_program", "_threads")

    def __init__(self, program: Program) -> None:
        self._program = program
        self._begin = [state for state in program.closure([program.start]) if program.characters[state] is not None]
        # The earliest start of a partial match in each current state.
        self._threads: dict[int, int] = {}
        # The states that accept each character.
        self._known: dict[str, frozenset[int]] = {}
        self._position = 0

    @property
    def pending(self) -> int:
        """Number of characters at the end of the text that may still become part of a match."""
        return self._position - min(self._threads.values(), default=self._position)

    def step(self, character: str) -> PatternMatch | None:
        """Append a character; return the match that ends with it, if there is one."""
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

    def _spread(self, moved: dict[int, int]) -> PatternMatch | None:
        """Follow transitions without a character from the states reached, earliest starts first."""
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
                    found = PatternMatch(start, self._position)
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
