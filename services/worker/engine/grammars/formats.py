"""Schemas as XGrammar enforces them: formats as patterns, where its own allow more than JSON Schema does."""

from __future__ import annotations

from typing import Any

from common.json_schemas import are_disjoint

# Without leap days, and with four digits of a year that every calendar knows.
_DATE = r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,14}[a-zA-Z0-9])?"
_REFERENCE = r"[a-zA-Z0-9._~/?@!$&()*+,;=-]"
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "email": rf"^[a-zA-Z0-9_+-]{{1,32}}(\.[a-zA-Z0-9_+-]{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$",
    # Without what JSON would have to escape, nor percent signs.
    "uri": rf"^[a-z][a-z0-9+.-]{{1,15}}:({_REFERENCE}|:)+$",
    "uri-reference": f"^{_REFERENCE}+$",
    "json-pointer": r"^(/[a-zA-Z0-9_.-]*)*$",
    "relative-json-pointer": r"^(0|[1-9]\d{0,3})(#|(/[a-zA-Z0-9_.-]*)*)$",
}
# Values that are no schemas themselves.
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required"})


def as_enforced(schema: Any) -> Any:  # Any: JSON
    """Return a schema with patterns in place of formats, and `anyOf` where that means the same as `oneOf`."""
    if isinstance(schema, list):
        return [as_enforced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: value if name in _DATA else as_enforced(value) for name, value in schema.items()}
    if isinstance(result.get("oneOf"), list) and "anyOf" not in result and are_disjoint(result["oneOf"]):
        # The library cannot see that they are disjoint, and warns.
        result["anyOf"] = result.pop("oneOf")
    format_ = result.get("format")
    if isinstance(format_, str) and format_ in PATTERNS:
        del result["format"]
        result["pattern"] = PATTERNS[format_]
        result.setdefault("type", "string")
    return result
