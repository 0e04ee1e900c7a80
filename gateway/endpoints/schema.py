"""The base of request bodies: validation, unsupported fields, and errors that name the field and the expected value.

A field that would change the output and is not supported is refused by its name instead of silently ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import InvalidRequestError
from gateway.server.errors import ErrorStyle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic_core import ErrorDetails

SchemaT = TypeVar("SchemaT", bound="Schema")

MAX_PREVIEW_CHARACTERS = 80
# Suffixes of pydantic's error types that concern a value's type; other errors concern its content.
TYPE_ERRORS = ("_type", "_parsing")
# Error types whose messages would show the names of our classes.
OBJECT_ERRORS = ("model_type", "dict_type")
# What pydantic's messages begin with, where the field is named already.
_SUBJECT = re.compile(r"^(Input|List|Dictionary|Tuple|String) (?=should )")
# What a client can do instead of sending an unsupported field.
LEAVE_OUT = "leave it out"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is accepted only with values that have no effect."""

    field: str
    is_harmless: Callable[[object], bool]
    supported: str


class Schema(BaseModel):
    """Base of request bodies: types are not converted, and unknown fields are ignored, because clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    unsupported: ClassVar[tuple[Refusal, ...]] = ()
    # Whether it may contain images, which makes it large.
    takes_images: ClassVar[bool] = False
    # Of requests with this body; None: as the path says.
    errors: ClassVar[ErrorStyle | None] = None

    @classmethod
    def refuse_unsupported(cls, body: Mapping[str, object]) -> None:
        """Check that `body` has none of the `unsupported` fields, except with a value that has no effect.

        Raises:
            InvalidRequestError: it has one.
        """
        for refusal in cls.unsupported:
            value = body.get(refusal.field)
            if value is not None and not refusal.is_harmless(value):
                message = f"'{refusal.field}' is not supported by this server with this value; {refusal.supported}."
                raise InvalidRequestError(message, param=refusal.field)


def parse(schema: type[SchemaT], body: Mapping[str, object]) -> SchemaT:
    """Validate `body` as `schema`.

    Raises:
        InvalidRequestError: a field is missing, or has a wrong type or value.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_context=False)[0]) from None


def explain(detail: ErrorDetails) -> InvalidRequestError:
    """Convert a validation error of pydantic to an error for the client."""
    param = path(detail["loc"])
    if detail["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: '{param}'.", param=param)
    kind = "type" if detail["type"].endswith(TYPE_ERRORS) else "value"
    message = "should be an object" if detail["type"] in OBJECT_ERRORS else detail["msg"]
    text = _SUBJECT.sub("", message).partition(" after validation")[0].rstrip(".")
    where = f" for '{param}'" if param else ""
    return InvalidRequestError(f"Invalid {kind}{where}: {text}, got {preview(detail['input'])}.", param=param or None)


def path(location: Sequence[int | str]) -> str:
    """Return a location in the notation of clients: `messages[0].content`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def preview(value: object) -> str:
    """Return a value as JSON, cut to MAX_PREVIEW_CHARACTERS."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # nested too deeply for orjson, or not a JSON value
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_PREVIEW_CHARACTERS else f"{text[:MAX_PREVIEW_CHARACTERS]}…"


def to_json(value: object, param: str) -> str:
    """Return a part of the body as JSON text.

    Raises:
        InvalidRequestError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise InvalidRequestError(f"'{param}' cannot be read: {error}", param=param) from error


def never(_value: object) -> bool:
    """Accept no value of an unsupported field."""
    return False


def is_empty(value: object) -> bool:
    """Accept the values of an unsupported field that turn it off."""
    return value in (False, "", 0) or value == [] or value == {}
