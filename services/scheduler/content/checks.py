"""Checks that distinguish real numbers and secrets from text of the same shape."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter
from math import log2
from typing import TYPE_CHECKING

from stdnum import iban

if TYPE_CHECKING:
    from collections.abc import Callable

STANDARD_NUMBERS = "stdnum."
_ASSIGNMENT = re.compile(r"[\s:=>]+")
IBAN_LENGTHS = range(15, 35)
# The longest number with a few separators after each character.
MAX_IBAN_TEXT = 140


class CheckError(Exception):
    """The named check does not exist."""


def find_check(name: str) -> Callable[[str], bool]:
    """Return a check by name: one of `CHECKS`, or `stdnum.MODULE` for any number that python-stdnum validates.

    Raises:
        CheckError: there is no such check.
    """
    if name in CHECKS:
        return CHECKS[name]
    if name.startswith(STANDARD_NUMBERS):
        try:
            is_valid: Callable[[str], bool] = importlib.import_module(name).is_valid
        except (ImportError, AttributeError) as error:
            raise CheckError(f"python-stdnum knows no {name.removeprefix(STANDARD_NUMBERS)}") from error
        return is_valid
    raise CheckError(f"there is no check {name}; there are {', '.join(CHECKS)} and {STANDARD_NUMBERS}MODULE")


def is_card(text: str) -> bool:
    """Whether a text's digits can be a payment card number: length, issuer and Luhn checksum (ISO/IEC 7812)."""
    digits = [int(letter) for letter in text if letter.isdecimal()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    prefix = int("".join(map(str, digits[:4])))
    if not any(low <= prefix <= high for low, high in _ISSUERS):
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def contains_card(text: str) -> bool:
    """Whether a sequence of digit groups is a card number, or contains one grouped as on a card.

    The sequence may begin and end with a letter.

    Adjacent numbers may look like further groups. A table of numbers has many subsequences, and one in ten has the
    right checksum by chance, so in the middle of a longer sequence only usual groupings count; elsewhere any grouping
    does, if the same character separates all groups. Lines may break anywhere.
    """
    parts = [(match.group(1), match.group(2)) for match in _GROUP.finditer(text)]
    # Digits adjacent to a letter are part of a word.
    parts = parts[parts[0][0].isalpha() : len(parts) - text[-1:].isalpha()]
    groups = [digits for _, digits in parts]
    separators = {kind for separator, _ in parts[1:] if (kind := "".join(separator.split()))}
    has_spaces = any(" " in separator and "\n" not in separator for separator, _ in parts[1:])
    if len(separators) + has_spaces <= 1 and is_card("".join(groups)):
        return not (len(parts) == 2 and _is_fraction(parts, 1))
    return any(
        tuple(map(len, groups[start:end])) in _CARD_GROUPS
        and is_card("".join(groups[start:end]))
        and not (end == start + 1 and _is_fraction(parts, start))
        for start in range(len(groups))
        for end in range(start + 1, min(start + 5, len(groups)) + 1)
    )


def _is_fraction(parts: list[tuple[str, str]], index: int) -> bool:
    """Return whether a group has enough digits for a card number but is the fraction after a decimal point."""
    return index > 0 and parts[index][0] == "." and len(parts[index][1]) >= 10


_GROUP = re.compile(r"([^0-9]*)([0-9]+)")
_DIGITS = re.compile(r"[0-9]+")
# Group lengths on cards of most issuers, of American Express and Diners Club, and without grouping.
_CARD_GROUPS = frozenset({(4, 4, 4, 4), (4, 4, 4, 4, 3), (4, 4, 4, 1), (4, 6, 5), (4, 6, 4), (8, 8)}) | frozenset(
    (length,) for length in range(13, 20)
)
# First four digits: Visa, Mastercard (two ranges), American Express (two), Diners, Discover, JCB, Maestro, UnionPay.
_ISSUERS = (
    (4000, 4999),
    (5100, 5599),
    (2221, 2720),
    (3400, 3499),
    (3700, 3799),
    (3000, 3059),
    (3600, 3699),
    (3800, 3999),
    (6011, 6011),
    (6440, 6599),
    (3528, 3589),
    (5018, 5099),
    (5600, 5899),
    (6300, 6399),
    (6700, 6799),
    (6200, 6299),
)


def starts_with_iban(text: str) -> bool:
    """Whether text begins with an account number whose remainder modulo 97 is 1 (ISO 13616).

    A pattern cannot determine where the number ends and the next word begins, as both are letters and digits.
    """
    letters = [letter for letter in text[:MAX_IBAN_TEXT] if letter.isalnum()]
    return any(iban.is_valid("".join(letters[:length])) for length in IBAN_LENGTHS if length <= len(letters))


def contains_iban(text: str) -> bool:
    """Whether an account number begins anywhere in a sequence of words."""
    return any(starts_with_iban(text[match.start() : match.start() + MAX_IBAN_TEXT]) for match in _IBAN.finditer(text))


_IBAN = re.compile(r"(?i)\b[a-z]{2}[ .-]?[0-9]{2}")


def is_random(text: str) -> bool:
    """Whether text looks machine-generated: high entropy, three kinds of characters, and frequent changes of kind."""
    kinds = [_kind(letter) for letter in text]
    counts = Counter(kinds)
    if any(counts[kind] < 2 for kind in (_UPPER, _LOWER, _DIGIT)):
        return False
    changes = sum(lhs != rhs for lhs, rhs in itertools.pairwise(kinds))
    return changes >= 0.35 * len(text) and entropy(text) >= 3.7


def is_assigned_secret(text: str) -> bool:
    """Whether the value in `name = value` can be a secret and is no placeholder."""
    value = _assigned(text)
    has_digit = any(letter.isdecimal() for letter in value)
    has_letter = any(letter.isalpha() for letter in value)
    return len(value) >= 8 and has_digit and has_letter and entropy(value) >= 2.5 and not _is_placeholder(value)


def is_password(text: str) -> bool:
    """Whether the value in `password: value` can be a password, also a plain word, but no placeholder or expression."""
    value = _assigned(text).rstrip(".!?)*")
    is_plain = value.isalpha() or value.isidentifier()
    if len(set(value)) < 4 or _is_placeholder(value) or (is_plain and _NO_PASSWORD.search(value)):
        return False
    return not _EXPRESSION.search(value)


def is_hex_secret(text: str) -> bool:
    """Whether a text ends in at least 32 hexadecimal digits that are no word and no pattern of few digits."""
    digits = _HEX.search(text)
    return digits is not None and entropy(digits.group()) >= 2.5 and any(map(str.isdecimal, digits.group()))


def _assigned(text: str) -> str:
    return _ASSIGNMENT.split(text.rstrip("\"'`,;=. \n"))[-1].strip("\"'`")


def _is_placeholder(value: str) -> bool:
    return any(mark in value for mark in _PLACEHOLDERS)


_HEX = re.compile(r"[0-9a-fA-F]{32,}$")
_PLACEHOLDERS = ("{", "}", "<", ">", "$", "\u2026", "***", "...", "(", "[", "%s")
# Words in place of a password: its names, types, requirements, and null values.
_NO_PASSWORD = re.compile(
    r"(?i)pass|pwd|secret|token|key|cred|config|setting|option|param|arg|value|field|input|prompt|string|text|char|bytes"
    r"|object|bool|null|none|nil|undefined|true|false|empty|default|required|optional|hidden|redacted|masked|unset"
    r"|missing|must|should|please|enter|minimum|length|between|contain|protect|manager|require|invalid|incorrect|wrong|expired|changed|reset|forgotten|encrypted|hashed|example|placeholder|your|user"
    r"|admin$|name$|type$|self|this|(?-i:^[A-Z_]+$)"
)
# Attributes, calls, paths and URLs: code, not passwords.
_EXPRESSION = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*|::|->)|^[./~]|^https?:|\)$|\|")


def is_phone(text: str) -> bool:
    """Whether text has as many digits as a telephone number may have (ITU-T E.164), more than two of them distinct."""
    return _has_digits(text, 8, 15)


def is_named_phone(text: str) -> bool:
    """Whether text has as many digits as a telephone number may have, possibly without an area code."""
    return _has_digits(text, 7, 15)


def is_local_phone(text: str) -> bool:
    """Whether text has as many digits as a number with area code, and is neither a date nor an arithmetic sequence."""
    digits = "".join(letter for letter in text if letter.isdecimal())
    steps = {(int(rhs) - int(lhs)) % 10 for lhs, rhs in itertools.pairwise(digits)}
    pairs = {int(rhs) - int(lhs) for lhs, rhs in itertools.pairwise(_DIGITS.findall(text))}
    if len(steps) == 1 or pairs == {1} or _DATE.search(text):
        return False
    return _has_digits(text, 9, 13)


def _has_digits(text: str, least: int, most: int) -> bool:
    digits = [letter for letter in text if letter.isdecimal()]
    return least <= len(digits) <= most and len(set(digits)) > 2


_DATE = re.compile(r"\b[0-3]?[0-9]([./-])[01]?[0-9]\1(?:19|20)?[0-9]{2}\b")


def entropy(text: str) -> float:
    """Return the Shannon entropy of the text in bits per character."""
    return -sum(number / len(text) * log2(number / len(text)) for number in Counter(text).values())


_UPPER, _LOWER, _DIGIT, _OTHER = range(4)


def _kind(letter: str) -> int:
    if letter.isupper():
        return _UPPER
    if letter.islower():
        return _LOWER
    return _DIGIT if letter.isdecimal() else _OTHER


CHECKS: dict[str, Callable[[str], bool]] = {
    "card": contains_card,
    "iban": contains_iban,
    "random": is_random,
    "assigned": is_assigned_secret,
    "password": is_password,
    "hex": is_hex_secret,
    "phone": is_phone,
    "named_phone": is_named_phone,
    "local_phone": is_local_phone,
}
