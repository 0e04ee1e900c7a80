"""Regular expressions as nondeterministic automata, matched against text that arrives character by character.

Matching takes time proportional to text length times states (Thompson 1968; Cox: Regular Expression Matching Can Be
Simple And Fast) for every accepted expression; constructs that need backtracking are refused. Existing linear engines
cannot match incrementally, nor report which suffix of the text may still become a match.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequestError

# Python's parser of its own syntax: a private module, but unchanged since 3.11; tests would detect a change.
from re import _constants as codes  # type: ignore[attr-defined]  # isort: skip
from re import _parser as syntax  # type: ignore[attr-defined]  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_PATTERN_CHARACTERS = 512
# States of a pattern after repetitions are expanded; this bounds the cost per character.
MAX_STATES = 256

_CATEGORIES: dict[object, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    codes.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}

# Longest match in characters. Longer partial matches are dropped, so that at most this much text is held back.
MAX_SPAN = 4096
# Distinct characters whose accepting states are cached; texts have few distinct ones.
MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class Characters:
    """A set of characters: those in `ranges` (code points, both ends included) or `categories`, or all others."""

    ranges: tuple[tuple[int, int], ...] = ()
    categories: tuple[object, ...] = ()
    is_negated: bool = False

    def holds(self, character: str) -> bool:
        """Whether `character` belongs to the set."""
        code = ord(character)
        found = any(low <= code <= high for low, high in self.ranges) or any(
            _CATEGORIES[category](character) for category in self.categories
        )
        return found != self.is_negated


ANY = Characters(is_negated=True)


NO_LINE_BREAK = Characters(((10, 10),), is_negated=True)


@dataclass(slots=True)
class Program:
    """An automaton. A state has a character set and one next state, or only next states, entered without a character.

    State `accept` has neither; reaching it is a match.
    """

    characters: list[Characters | None] = field(default_factory=list)
    nexts: list[tuple[int, ...]] = field(default_factory=list)
    start: int = 0
    accept: int = 0

    def add(self, characters: Characters | None, nexts: tuple[int, ...]) -> int:
        """Add a state; return its number.

        Raises:
            InvalidRequestError: there are already `MAX_STATES` states.
        """
        if len(self.nexts) >= MAX_STATES:
            raise _refused(f"it is too large: with repetitions expanded, it may have at most {MAX_STATES} states")
        self.characters.append(characters)
        self.nexts.append(nexts)
        return len(self.nexts) - 1

    def closure(self, states: Iterable[int]) -> list[int]:
        """Return `states` and all states that can be reached from them without a character."""
        seen: dict[int, None] = {}
        stack = list(states)[::-1]
        while stack:
            state = stack.pop()
            if state not in seen:
                seen[state] = None
                if self.characters[state] is None:
                    stack.extend(reversed(self.nexts[state]))
        return list(seen)


def compile_pattern(pattern: str, param: str = "stop_regex") -> Program:
    """Return the automaton of `pattern`, in Python's syntax without lookaround, anchors and back-references.

    Raises:
        InvalidRequestError: the syntax is wrong, needs backtracking, matches the empty text, or is too large.
    """
    if not 0 < len(pattern) <= MAX_PATTERN_CHARACTERS:
        raise _refused(f"it must have 1 to {MAX_PATTERN_CHARACTERS} characters", param)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = syntax.parse(pattern)
        program = Program()
        program.accept = program.add(None, ())
        program.start = _Builder(program, int(tree.state.flags)).sequence(tree, program.accept)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(str(error), param) from error
    if program.accept in program.closure([program.start]):
        raise _refused("it matches the empty text", param)
    return program


class _Builder:
    """Builds states from the end of the pattern to its start: the state after a part exists before the part's own."""

    def __init__(self, program: Program, flags: int) -> None:
        if flags & (re.IGNORECASE | re.MULTILINE | re.ASCII | re.LOCALE):
            raise _refused("only the flags (?s) and (?x) are supported")
        self._program = program
        self._any = ANY if flags & re.DOTALL else NO_LINE_BREAK

    def sequence(self, parts: Iterable[tuple[Any, Any]], following: int) -> int:  # Any: the parser's nodes are untyped
        for code, argument in reversed(list(parts)):
            following = self._part(code, argument, following)
        return following

    def _part(self, code: object, argument: Any, following: int) -> int:  # Any: as above
        match code:
            case codes.LITERAL:
                return self._add(Characters(((argument, argument),)), following)
            case codes.NOT_LITERAL:
                return self._add(Characters(((argument, argument),), is_negated=True), following)
            case codes.ANY:
                return self._add(self._any, following)
            case codes.IN:
                return self._add(_characters(argument), following)
            case codes.BRANCH:
                return self._program.add(None, tuple(self.sequence(option, following) for option in argument[1]))
            case codes.SUBPATTERN:
                _group, added, removed, inner = argument
                if added or removed:
                    raise _refused("flags inside groups are not supported")
                return self.sequence(inner, following)
            case codes.MAX_REPEAT | codes.MIN_REPEAT:
                # Greediness is irrelevant: the earliest end of a match ends the text.
                least, most, inner = argument
                return self._repeat(least, most, inner, following)
            case _:
                raise _refused(f"{str(code).lower()} requires lookaround or backtracking, which is not supported")

    def _repeat(self, least: int, most: Any, inner: Any, following: int) -> int:  # Any: as above
        if most is codes.MAXREPEAT:
            loop = self._program.add(None, ())
            body = self.sequence(inner, loop)
            self._program.nexts[loop] = (body, following)
            following = loop
        else:
            end = following
            for _ in range(most - least):
                following = self._program.add(None, (self.sequence(inner, following), end))
        for _ in range(least):
            following = self.sequence(inner, following)
        return following

    def _add(self, characters: Characters, following: int) -> int:
        return self._program.add(characters, (following,))


def _characters(items: Iterable[tuple[Any, Any]]) -> Characters:  # Any: the parser's nodes are untyped
    ranges, categories, is_negated = [], [], False
    for code, argument in items:
        match code:
            case codes.NEGATE:
                is_negated = True
            case codes.LITERAL:
                ranges.append((argument, argument))
            case codes.RANGE:
                ranges.append(argument)
            case _:
                categories.append(argument)
    return Characters(tuple(ranges), tuple(categories), is_negated)


def _refused(reason: str, param: str = "stop_regex") -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' cannot be used: {reason}.", param=param)


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
