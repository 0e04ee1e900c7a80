"""Responses that clients may ask for again: what is kept, and for whom.

All stores share their room by one rule: while it is exceeded, the tenant that uses most of it, and in it the subject
that uses most, loses its oldest response; of several that use as much, the one with the oldest response. The new
response counts, so a subject pushes out another's only while it uses less itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Subject

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# What a stored response takes beside its text, as far as the room is concerned: names, indexes.
ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose responses: of the credential that made them, and within it of the user that the request named.

    `credential` begins with its kind ("user/ann", "key/k1"), so that no name equals that of another kind.
    """

    tenant: str
    credential: str
    user: str | None = None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the conversation up to and including it (as chat messages), and the items of its own input."""

    response: Json
    messages: Sequence[Json]
    input: Sequence[Json]

    def encode(self) -> tuple[bytes, bytes, bytes]:
        """Return the parts as JSON."""
        return orjson.dumps(self.response), orjson.dumps(self.messages), orjson.dumps(self.input)


def decode(response: bytes, messages: bytes, given: bytes) -> StoredResponse:
    """Return what `StoredResponse.encode` has made JSON of."""
    return StoredResponse(orjson.loads(response), orjson.loads(messages), orjson.loads(given))


def size_of(texts: Sequence[bytes]) -> int:
    """Return how many bytes of the room a response takes: all that is stored of its request, and of itself."""
    return sum(map(len, texts)) + ENTRY_BYTES


class ResponseStore(Protocol):
    """Where responses are kept."""

    def check(self) -> None:
        """Return if responses can be kept and found now.

        Raises:
            UnavailableError: they cannot.
        """

    async def put(self, holder: Holder, subject: Subject, stored: StoredResponse) -> None:
        """Keep a response in the room of `subject`, who is accountable for it.

        Once this returns, `find` finds it, unless it is too large or the store has failed, which is logged.
        """

    async def find(self, holder: Holder, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none.

        Raises:
            UnavailableError: the store is away.
        """

    async def delete(self, holder: Holder, response_id: str) -> bool:
        """Forget a response of `holder`; return whether there was one.

        Raises:
            UnavailableError: the store is away.
        """
