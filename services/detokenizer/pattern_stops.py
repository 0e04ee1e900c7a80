"""Matching of stop patterns, together with stop strings if a choice has both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.patterns import PatternMatcher, compile_pattern
from services.detokenizer.stops import StopAutomaton

if TYPE_CHECKING:
    from collections.abc import Iterable


class PatternStopMatcher:
    """Ends a text as `services.detokenizer.stops.StopMatcher` does: at the earliest end of a match, the longest one."""

    __slots__ = ("_held", "_include_stop_text", "_matchers", "_node", "_strings", "matched")

    def __init__(self, patterns: Iterable[str], strings: Iterable[str], *, include_stop_text: bool) -> None:
        """Compile `patterns`; empty `strings` are ignored.

        Raises:
            InvalidRequestError: a pattern is invalid.
        """
        self._matchers = {pattern: PatternMatcher(compile_pattern(pattern)) for pattern in patterns}
        self._strings = StopAutomaton(strings)
        self._node = 0
        self._include_stop_text = include_stop_text
        # The suffix of the text that may still become a match.
        self._held = ""
        # The stop string that ended the text, or the pattern that did.
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """Add `text` and return the text that became final; unless `armed`, matches that end in it are ignored."""
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            length, pattern = self._step(buffer[position])
            if length and armed:
                return self._end(buffer, position + 1, length, pattern)
        pending = [matcher.pending for matcher in self._matchers.values()]
        shown = len(buffer) - max(self._strings.depths[self._node], *pending)
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return the text that was held back; the text has ended."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> tuple[int, str | None]:
        """Add a character; return the length of the longest match that ends with it (0: none), and its pattern."""
        node = self._strings.step(self._node, character)
        longest = self._strings.matches[node]
        self._node = self._strings.retreat(node) if longest else node
        found: str | None = None
        for pattern, matcher in self._matchers.items():
            match = matcher.step(character)
            if match is not None and match.end - match.start > longest:
                longest, found = match.end - match.start, pattern
        return longest, found

    def _end(self, buffer: str, end: int, length: int, pattern: str | None) -> str:
        self.matched = buffer[end - length : end] if pattern is None else pattern
        self._held = ""
        return buffer[: end if self._include_stop_text else end - length]
