"""Stop patterns on the text of one choice, with its stop strings if it has both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.patterns.matcher import PatternMatcher
from common.patterns.program import compile_pattern, literal_program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.patterns.matcher import Match


class PatternStopMatcher:
    """Ends a text like `services.detokenizer.stops.StopMatcher`: whatever match ends first, the longest of those."""

    __slots__ = ("_held", "_include_stop_text", "_matchers", "matched")

    def __init__(self, patterns: Iterable[str], strings: Iterable[str], *, include_stop_text: bool) -> None:
        """Begin with an empty text.

        Raises:
            InvalidRequestError: a pattern cannot be used.
        """
        programs = [*map(compile_pattern, patterns), *(literal_program(text) for text in strings if text)]
        self._matchers = [PatternMatcher(program) for program in programs]
        self._include_stop_text = include_stop_text
        # The end of the text that may become a match.
        self._held = ""
        # The text that ended it.
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """Add `text` and return what may be shown; unless `armed`, matches that end in it are passed over."""
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            matches = [match for matcher in self._matchers if (match := matcher.step(buffer[position])) is not None]
            if matches and armed:
                return self._end(buffer, position + 1, matches)
        shown = len(buffer) - max(matcher.pending for matcher in self._matchers)
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        return held

    def _end(self, buffer: str, end: int, matches: list[Match]) -> str:
        length = max(match.end - match.start for match in matches)
        self.matched = buffer[end - length : end]
        self._held = ""
        return buffer[: end if self._include_stop_text else end - length]
