"""Tests that tell a real number or secret from what only has its shape."""

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


class CheckError(Exception):
    """There is no such check."""


def find_check(name: str) -> Callable[[str], bool]:
    """Return the check of that name: one of `CHECKS`, or `stdnum.MODULE` for any number that python-stdnum knows.

    Raises:
        CheckError: there is none.
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
    """Whether digits can be a payment card's: length, issuer and Luhn's sum (ISO/IEC 7812)."""
    digits = [int(letter) for letter in text if letter.isdecimal()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    prefix = int("".join(map(str, digits[:4])))
    if not any(low <= prefix <= high for low, high in _ISSUERS):
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


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

    A pattern cannot tell where the number ends and the next word begins, as both are letters and digits.
    """
    letters = [letter for letter in text if letter.isalnum()]
    return any(iban.is_valid("".join(letters[:length])) for length in IBAN_LENGTHS if length <= len(letters))


def is_random(text: str) -> bool:
    """Whether text looks drawn by a machine: many different letters, of three kinds, that change kind all the time."""
    kinds = [_kind(letter) for letter in text]
    counts = Counter(kinds)
    if any(counts[kind] < 2 for kind in (_UPPER, _LOWER, _DIGIT)):
        return False
    changes = sum(lhs != rhs for lhs, rhs in itertools.pairwise(kinds))
    return changes >= 0.35 * len(text) and entropy(text) >= 3.7


def is_assigned_secret(text: str) -> bool:
    """Whether the value in `name = value` can be a secret and is no placeholder."""
    value = _ASSIGNMENT.split(text.rstrip("\"'`,;=."))[-1].strip("\"'`")
    if any(mark in value for mark in ("{", "}", "<", ">", "$", "…", "***", "...", "(", "[")):
        return False
    has_digit = any(letter.isdecimal() for letter in value)
    has_letter = any(letter.isalpha() for letter in value)
    return len(value) >= 8 and has_digit and has_letter and entropy(value) >= 2.5


def is_phone(text: str) -> bool:
    """Whether text has as many digits as a telephone number may (ITU-T E.164), and not all of them the same."""
    digits = [letter for letter in text if letter.isdecimal()]
    return 8 <= len(digits) <= 15 and len(set(digits)) > 2


def entropy(text: str) -> float:
    """Return Shannon's entropy of the text's letters, in bits per letter."""
    return -sum(number / len(text) * log2(number / len(text)) for number in Counter(text).values())


_UPPER, _LOWER, _DIGIT, _OTHER = range(4)


def _kind(letter: str) -> int:
    if letter.isupper():
        return _UPPER
    if letter.islower():
        return _LOWER
    return _DIGIT if letter.isdecimal() else _OTHER


CHECKS: dict[str, Callable[[str], bool]] = {
    "card": is_card,
    "iban": starts_with_iban,
    "random": is_random,
    "assigned": is_assigned_secret,
    "phone": is_phone,
}
