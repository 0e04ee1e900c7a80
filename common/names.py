"""Validation of names that clients choose: of tenants, users and requests."""

from __future__ import annotations

import unicodedata

from common.errors import InvalidRequestError

MAX_NAME_BYTES = 256
# Control characters, surrogates, line and paragraph separators: they could forge a log line or break a peer.
FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def check_name(field: str, value: str) -> str:
    """Return `value` if it is a valid identifier. Error messages do not quote it, as it may have 10 MB.

    Raises:
        InvalidRequestError: it is too long or has control characters.
    """
    # The second test is exact; the first avoids encoding values that cannot pass it.
    if len(value) > MAX_NAME_BYTES or len(value.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise InvalidRequestError(f"'{field}' must have at most {MAX_NAME_BYTES} bytes in UTF-8.", param=field)
    # Fast path: no printable character is in these categories.
    if not value.isprintable() and any(unicodedata.category(character) in FORBIDDEN_CATEGORIES for character in value):
        raise InvalidRequestError(f"'{field}' must not contain control characters.", param=field)
    return value
