"""Regular expressions as nondeterministic automata, for texts that grow character by character.

Matching takes time proportional to text times states (Thompson 1968; Cox: Regular Expression Matching Can Be Simple And
Fast), whatever the expression: nothing that needs backtracking is accepted. Ready-made linear engines cannot be fed a
growing text, nor tell which end of it may still become a match.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequestError

# Python's own parser of its own syntax: private by name, but unchanged since 3.11, and tests would notice.
from re import _constants as codes  # type: ignore[attr-defined]  # isort: skip
from re import _parser as syntax  # type: ignore[attr-defined]  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_PATTERN_CHARACTERS = 512
# Written out, a pattern has at most so many states: this bounds what a character costs.
MAX_STATES = 256

_CATEGORIES: dict[object, Callable[[str], bool]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    codes.CATEGORY_WORD: lambda character: character.isalnum() or character == "_",
    codes.CATEGORY_NOT_WORD: lambda character: not (character.isalnum() or character == "_"),
}


@dataclass(frozen=True, slots=True)
class Characters:
    """A set of characters."""

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
    """States with a character set and the state behind it, or with states to go on with at once.

    State `accept` has neither: who comes there has matched.
    """

    characters: list[Characters | None] = field(default_factory=list)
    nexts: list[tuple[int, ...]] = field(default_factory=list)
    start: int = 0
    accept: int = 0

    def add(self, characters: Characters | None, nexts: tuple[int, ...]) -> int:
        """Add a state; return its number.

        Raises:
            InvalidRequestError: there are too many.
        """
        if len(self.nexts) >= MAX_STATES:
            raise _refused(f"it is too large: counted repetitions are written out, to {MAX_STATES} states at most")
        self.characters.append(characters)
        self.nexts.append(nexts)
        return len(self.nexts) - 1

    def closure(self, states: Iterable[int]) -> list[int]:
        """Return `states` and all that can be reached from them without a character."""
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
    """Return the automaton of `pattern`, in Python's syntax without what needs to look around or back.

    Raises:
        InvalidRequestError: the syntax is wrong, needs backtracking, matches the empty text, or is too large.
    """
    if not 0 < len(pattern) <= MAX_PATTERN_CHARACTERS:
        raise _refused(f"it should have 1 to {MAX_PATTERN_CHARACTERS} characters", param)
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
    """Builds states from the end to the front: each part is told which state comes behind it."""

    def __init__(self, program: Program, flags: int) -> None:
        if flags & (re.IGNORECASE | re.MULTILINE | re.ASCII | re.LOCALE):
            raise _refused("of the flags only (?s) and (?x) are supported")
        self._program = program
        self._any = ANY if flags & re.DOTALL else NO_LINE_BREAK

    def sequence(self, parts: Iterable[tuple[Any, Any]], behind: int) -> int:  # Any: the parser's nodes are untyped
        for code, argument in reversed(list(parts)):
            behind = self._part(code, argument, behind)
        return behind

    def _part(self, code: object, argument: Any, behind: int) -> int:  # Any: as above
        match code:
            case codes.LITERAL:
                return self._add(Characters(((argument, argument),)), behind)
            case codes.NOT_LITERAL:
                return self._add(Characters(((argument, argument),), is_negated=True), behind)
            case codes.ANY:
                return self._add(self._any, behind)
            case codes.IN:
                return self._add(_characters(argument), behind)
            case codes.BRANCH:
                return self._program.add(None, tuple(self.sequence(option, behind) for option in argument[1]))
            case codes.SUBPATTERN:
                _group, added, removed, inner = argument
                if added or removed:
                    raise _refused("flags inside groups are not supported")
                return self.sequence(inner, behind)
            case codes.MAX_REPEAT | codes.MIN_REPEAT:
                # The shortest match ends the text either way.
                least, most, inner = argument
                return self._repeat(least, most, inner, behind)
            case _:
                raise _refused(f"{str(code).lower()} needs to look around or back, which is not supported")

    def _repeat(self, least: int, most: Any, inner: Any, behind: int) -> int:  # Any: as above
        if most is codes.MAXREPEAT:
            loop = self._program.add(None, ())
            body = self.sequence(inner, loop)
            self._program.nexts[loop] = (body, behind)
            behind = loop
        else:
            end = behind
            for _ in range(most - least):
                behind = self._program.add(None, (self.sequence(inner, behind), end))
        for _ in range(least):
            behind = self.sequence(inner, behind)
        return behind

    def _add(self, characters: Characters, behind: int) -> int:
        return self._program.add(characters, (behind,))


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
