"""Text normalisation, so that a rule need not list every way to write a space, a digit or a hyphen.

Each character is mapped individually: compatibility forms (NFKC), the digits of all scripts, spaces, dashes, dots and
quotation marks become ASCII; format characters (zero-width spaces, joiners, soft hyphens, direction marks), other
control characters and combining marks are removed. Letters that merely look alike (Cyrillic `а`) stay distinct.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

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
    """Return the normalised form of `original`, in time linear in its length."""
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
