"""The shipped detector: regular expressions from a file, with checks for numbers that have a checksum."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import re2
from pydantic import Field, ValidationError

from common.section import Section
from common.settings import explain
from services.scheduler.content.checks import CheckError, find_check
from services.scheduler.content.interface import ContentFinding, RulesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.content.interface import DetectorOptions

SHIPPED_RULES = Path(__file__).with_name("rules.toml")
MAX_FILE_BYTES = 1 << 20
# A program of this size takes milliseconds per prompt; larger ones are refused at compilation.
MAX_PATTERN_BYTES = 8 << 20

_UNUSUAL = re.compile(r"[^\t\n\x20-\x7e]")
_LINE_ENDS = frozenset("\r\v\f\x85\u2028\u2029")
# Invisible letters; U+FFFD replaces a byte that is part of no character.
_INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0\ufffd")
_SIMILAR = {
    "\u2800": " ",  # a braille pattern without dots
    **dict.fromkeys("\u2212\u2043", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    "\u2236": ":",
    **dict.fromkeys("\u00b7\u2022\u2027\u2219\u22c5\u30fb\u3002", "."),
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033", '"'),
}


class PatternDetector:
    """Applies the rules of a file, which may change during use, to the normalised text.

    RE2 matches in time linear in the text for every pattern, so no rule and no prompt can make it hang; in return
    patterns have neither look-around nor back-references.
    """

    def __init__(self, options: DetectorOptions) -> None:
        """Use the rules named by `options`, or the shipped ones; `refresh` reads them."""
        self._path = Path(options.rules) if options.rules else SHIPPED_RULES
        self._rules: tuple[Rule, ...] = ()
        self._in_effect = ""
        # File status at the last successful read: size, times and inode show whether the file has changed.
        self._seen: tuple[int, ...] = ()

    def find(self, text: str) -> Iterable[ContentFinding]:
        """Return the first finding of each rule.

        Raises:
            RulesError: there are no rules.
        """
        if not self._rules:
            raise RulesError(f"{self._path}: no rules are in effect")
        normal = normalise(text)
        starts = ((rule.first(normal.text), rule.name) for rule in self._rules)
        return [ContentFinding(normal.origin(start), name) for start, name in starts if start is not None]

    def refresh(self) -> str:
        """Read the file again if it has changed; see `Detector`."""
        try:
            status = self._path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if seen == self._seen:
                return self._in_effect
            data = self._path.read_bytes()
            rules = parse_rules(data)
        except (OSError, RulesError) as error:
            # Read again at the next call: a file that is being written may be complete then.
            raise RulesError(f"{self._path}: {error}") from error
        self._seen, self._rules = seen, rules
        self._in_effect = blake2b(data, digest_size=8).hexdigest()
        return self._in_effect


class RuleSource(Section):
    """One `[[rules]]` table. Patterns are RE2's: no look-around, no back-references, time linear in the text.

    They match the normalised text (`normalise`): ASCII spaces, digits, hyphens and quotation marks, nothing invisible.
    """

    name: str = Field(min_length=1, max_length=64)
    """Shown in logs and metrics."""
    pattern: str = Field(min_length=1)
    """The pattern to search for."""
    tail: str | None = None
    """The beginnings of a match that count at the end of the text, as the text may end in the middle of a secret."""
    check: str | None = None
    """A check that a match must pass, by name (`checks.py`), such as a checksum."""
    unless: str | None = None
    """Matches that contain this pattern are ignored."""
    alone: bool = False
    """Matches adjacent to another letter or digit are ignored, but ideographs and kana need no space."""


class RuleFile(Section):
    """The whole file."""

    rules: tuple[RuleSource, ...] = Field(min_length=1, max_length=1000)


class Rule:
    """A compiled rule."""

    def __init__(self, source: RuleSource) -> None:
        """Compile the patterns of `source`.

        Raises:
            RulesError: a pattern or the name of a check is invalid.
        """
        self.name = source.name
        self._pattern = _compile(source.name, source.pattern)
        self._tail = _compile(source.name, rf"(?:{source.tail})\z") if source.tail else None
        self._unless = _compile(source.name, source.unless) if source.unless else None
        self._alone = source.alone
        self._check: Callable[[str], bool] | None = None
        if source.check:
            try:
                self._check = find_check(source.check)
            except CheckError as error:
                raise RulesError(f"rule {source.name}: {error}") from error

    def first(self, text: str) -> int | None:
        """Return the start of the first finding, in characters; None if there is none."""
        for match in self._pattern.finditer(text):
            if self._holds(match.group(), text, match.start(), match.end()):
                return int(match.start())
        tail = self._tail.search(text) if self._tail else None
        return int(tail.start()) if tail and not self._excepted(tail.group()) else None

    def _holds(self, found: str, text: str, start: int, end: int) -> bool:
        if self._alone and (_is_word(text[max(0, start - 1) : start]) or _is_word(text[end : end + 1])):
            return False
        return not self._excepted(found) and (self._check is None or self._check(found))

    def _excepted(self, found: str) -> bool:
        return self._unless is not None and self._unless.search(found) is not None


def parse_rules(data: bytes) -> tuple[Rule, ...]:
    """Parse the rules in a TOML file's bytes.

    Raises:
        RulesError: the file or one of its rules is invalid; no rule is used then.
    """
    if len(data) > MAX_FILE_BYTES:
        raise RulesError(f"the file has more than {MAX_FILE_BYTES:,} bytes")
    try:
        file = RuleFile.model_validate(tomllib.loads(data.decode()))
    except ValidationError as error:
        raise RulesError(explain(error)) from error
    except ValueError as error:  # neither TOML nor UTF-8
        raise RulesError(str(error)) from error
    names = [source.name for source in file.rules]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise RulesError(f"several rules are called {', '.join(sorted(repeated))}")
    return tuple(Rule(source) for source in file.rules)


def _is_word(neighbour: str) -> bool:
    """Return whether a character (or `""` at the text's ends) continues a word of a script with spaces."""
    return neighbour.isalnum() and unicodedata.category(neighbour) != "Lo"


def _compile(name: str, pattern: str) -> Any:  # re2 has no types
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise RulesError(f"rule {name}: {pattern}: {text}") from error
    if compiled.search("") is not None:
        raise RulesError(f"rule {name}: {pattern}: matches nothing at all, and so everywhere")
    return compiled


@dataclass(frozen=True, slots=True)
class NormalText:
    """A normalised text as a sequence of runs.

    Run i begins at `starts[i]` and comes from index `origins[i]` of the original: either a copy of the original
    (`steps[i]` is 1), or the expansion of one character (0).
    """

    text: str
    starts: tuple[int, ...]
    origins: tuple[int, ...]
    steps: tuple[int, ...]

    def origin(self, place: int) -> int:
        """Return the index in the original of the character that the one at `place` comes from."""
        run = bisect_right(self.starts, place) - 1
        return self.origins[run] + (place - self.starts[run]) * self.steps[run]


def normalise(original: str) -> NormalText:
    """Return the normalised form of `original`, in time linear in its length.

    Each character is mapped individually: compatibility forms (NFKC), the digits of all scripts, spaces, dashes, dots
    and quotation marks become ASCII; format characters (zero-width spaces, joiners, soft hyphens, direction marks),
    other control characters and combining marks are removed. Letters that merely look alike (Cyrillic `а`) stay
    distinct.
    """
    pieces: list[tuple[str, int, int]] = []
    copied = 0
    for match in _UNUSUAL.finditer(original):
        place = match.start()
        pieces.append((original[copied:place], copied, 1))
        pieces.append((_normal(match.group()), place, 0))
        copied = place + 1
    pieces.append((original[copied:], copied, 1))
    pieces = [piece for piece in pieces if piece[0]]
    starts = accumulate((len(text) for text, _, _ in pieces), initial=0)
    return NormalText(
        "".join(text for text, _, _ in pieces),
        tuple(starts)[:-1],
        tuple(origin for _, origin, _ in pieces),
        tuple(step for _, _, step in pieces),
    )


@lru_cache(maxsize=8192)
def _normal(character: str) -> str:
    return "".join(map(_simple, unicodedata.normalize("NFKC", _SIMILAR.get(character, character))))


def _simple(character: str) -> str:
    if character in _LINE_ENDS:
        return "\n"
    if character in _SIMILAR:
        return _SIMILAR[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "Zs":
        return " "
    if category == "Pd":
        return "-"
    is_removed = category in ("Cf", "Mn", "Me") or character in _INVISIBLE
    return "" if is_removed or (category == "Cc" and character not in "\t\n") else character
