"""Formats of structural tags, as JSON: XGrammar's (`xgrammar.structural_tag`), and two of our own.

`marked_string` is a text in which a model's special tokens occur; `text_with_calls` is a text in which a mark, which
may be such a token, begins calls. Only the compiler of grammars has the vocabulary, and replaces both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Format: TypeAlias = dict[str, Any]  # Any: JSON
Schema: TypeAlias = dict[str, Any]  # Any: a JSON schema

MARKED_STRING = "marked_string"
TEXT_WITH_CALLS = "text_with_calls"
ANY_TEXT: Format = {"type": "any_text"}
# All tokens, special ones included.
ANY_TOKENS: Format = {"type": "any_tokens"}


def marked(text: str) -> list[Format]:
    """Return the format of a constant text in which special tokens may occur; nothing for an empty text."""
    return [{"type": MARKED_STRING, "value": text}] if text else []


def const(text: str) -> list[Format]:
    """Return the format of a constant text without special tokens; nothing for an empty text."""
    return [{"type": "const_string", "value": text}] if text else []


def sequence(*parts: Format) -> Format:
    """Return the format of `parts`, one after the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(parts: Sequence[Format]) -> Format:
    """Return the format of any of `parts`."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(format_: Format) -> Format:
    """Return the format of nothing or `format_`."""
    return {"type": "optional", "content": format_}


def star(format_: Format) -> Format:
    """Return the format of any number of `format_`."""
    return {"type": "star", "content": format_}


def regex(pattern: str) -> Format:
    """Return the format of texts that match `pattern`."""
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Schema | bool) -> Format:
    """Return the format of JSON values that match `schema`."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def text_without(*excludes: str) -> Format:
    """Return the format of texts in which none of `excludes` occurs."""
    return {"type": "any_text", "excludes": list(excludes)}


def text_with_calls(mark: str, calls: Format, *, excludes: Iterable[str], repeats: bool) -> Format:
    """Return the format of a text in which `mark` is followed by `calls`, again and again if it `repeats`."""
    return {"type": TEXT_WITH_CALLS, "mark": mark, "content": calls, "excludes": list(excludes), "repeats": repeats}


def separated(required: Sequence[Format], others: Sequence[Format], separator: str) -> Format | None:
    """Return the format of a list of all `required` parts and some of `others`, in their order; None if it is empty."""

    def after(parts: Sequence[Format]) -> list[Format]:
        return [optional(sequence(*const(separator), part)) for part in parts]

    if required:
        first, *rest = required
        joined = [part for value in rest for part in (*const(separator), value)]
        return sequence(first, *joined, *after(others))
    if not others:
        return None
    return optional(either([sequence(part, *after(others[index + 1 :])) for index, part in enumerate(others)]))
