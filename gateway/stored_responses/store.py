"""Responses that clients can retrieve later: their content, their holders and the interface of their stores.

All stores free room by one rule: while it is exceeded, the tenant that uses most of it, and within that tenant the
subject that uses most, loses its oldest response; among equals, the one with the oldest response. The new response
counts, so a subject displaces another's response only while it uses less than that subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Subject

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# The room that a stored response takes in addition to its text, for names and indexes.
ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ResponseOwner:
    """The owner of stored responses: the credential that created them, and the user that the request named, if any.

    `credential` begins with its kind ("user/ann", "key/k1"), so that names of different kinds never coincide.
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
        """Return the three parts as JSON."""
        return orjson.dumps(self.response), orjson.dumps(self.messages), orjson.dumps(self.input)


def decode(response: bytes, messages: bytes, given: bytes) -> StoredResponse:
    """Parse the result of `StoredResponse.encode`."""
    return StoredResponse(orjson.loads(response), orjson.loads(messages), orjson.loads(given))


def size_of(texts: Sequence[bytes]) -> int:
    """Return the bytes of room that a response takes: its stored texts, including its request's, and overhead."""
    return sum(map(len, texts)) + ENTRY_BYTES


class ResponseStore(Protocol):
    """Stores responses."""

    def check(self) -> None:
        """Check that responses can be stored and found now.

        Raises:
            UnavailableError: they cannot.
        """

    async def put(self, holder: ResponseOwner, subject: Subject, stored: StoredResponse) -> None:
        """Store a response in the room of `subject`, which is accountable for it.

        Once this returns, `find` finds it, unless it is too large or the store has failed, which is logged.
        """

    async def find(self, holder: ResponseOwner, response_id: str) -> StoredResponse | None:
        """Return a response of `holder`; of any user of the credential, if `holder` names none.

        Raises:
            UnavailableError: the store is unavailable.
        """

    async def delete(self, holder: ResponseOwner, response_id: str) -> bool:
        """Delete a response of `holder`; return whether it existed.

        Raises:
            UnavailableError: the store is unavailable.
        """
