"""Incremental search for stop strings and patterns, which holds back text that may still become one.

Of several stop strings, the one with the earliest end ends the text; of those with the same end, the longest. So the
result does not depend on token boundaries, and a match is final as soon as its last character arrives.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from common.patterns import PatternMatcher, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopAutomaton:
    """All stop strings of a request as one automaton (Aho and Corasick 1975), with constant cost per character.

    Node 0 is the root. The current node represents the longest suffix of the text that is a prefix of a stop string.
    """

    __slots__ = ("depths", "fallbacks", "firsts", "matches", "nexts")

    def __init__(self, stop_strings: Iterable[str]) -> None:
        """Build the automaton; empty strings are ignored."""
        # Per node: the next node for each character that continues a stop string; the node to continue from with any
        # other character; characters from the root; length of the longest stop string that ends here, 0 if none does.
        self.nexts: list[dict[str, int]] = [{}]
        self.fallbacks: list[int] = [0]
        self.depths: list[int] = [0]
        self.matches: list[int] = [0]
        for stop in stop_strings:
            self._add(stop)
        self._link()
        self.firsts = frozenset(self.nexts[0])

    def step(self, node: int, character: str) -> int:
        """Return the node after `character`."""
        nexts, fallbacks = self.nexts, self.fallbacks
        while node and character not in nexts[node]:
            node = fallbacks[node]
        return nexts[node].get(character, 0)

    def retreat(self, node: int) -> int:
        """Return the node for the longest suffix of the text that may still become a stop string."""
        while node and not self.nexts[node]:
            node = self.fallbacks[node]
        return node

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            following = self.nexts[node].get(character)
            if following is None:
                following = len(self.nexts)
                self.nexts[node][character] = following
                self.nexts.append({})
                self.fallbacks.append(0)
                self.depths.append(self.depths[node] + 1)
                self.matches.append(0)
            node = following
        self.matches[node] = self.depths[node]

    def _link(self) -> None:
        """Set fallbacks and matches, parents before children."""
        queue = deque(self.nexts[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self.nexts[node].items():
                self.fallbacks[child] = self.step(self.fallbacks[node], character)
                self.matches[child] = self.matches[child] or self.matches[self.fallbacks[child]]
                queue.append(child)


class StopMatcher:
    """Filters the text of one choice: ends it at a stop string and holds back possible beginnings of one."""

    __slots__ = ("_automaton", "_held", "_include_stop_text", "_node", "matched")

    def __init__(self, automaton: StopAutomaton, *, include_stop_text: bool) -> None:
        self._automaton = automaton
        self._include_stop_text = include_stop_text
        self._node = 0
        # The suffix of the text that may still become a stop string; its length is the node's depth.
        self._held = ""
        # The stop string that ended the text.
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool) -> str:
        """Add `text` and return the text that became final; unless `armed`, stop strings that end in it are ignored.

        Once `matched` is set, the text has ended and nothing may be fed.
        """
        automaton, node = self._automaton, self._node
        if node == 0 and automaton.firsts.isdisjoint(text):
            return text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            node = automaton.step(node, buffer[position])
            length = automaton.matches[node]
            if length and armed:
                return self._end(buffer, position + 1, length)
            if length:
                node = automaton.retreat(node)
        shown = len(buffer) - automaton.depths[node]
        self._node, self._held = node, buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return the text that was held back; the text has ended."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _end(self, buffer: str, end: int, length: int) -> str:
        self.matched = buffer[end - length : end]
        self._held = ""
        return buffer[: end if self._include_stop_text else end - length]


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
