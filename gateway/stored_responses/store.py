"""Responses that clients may ask for again: what is kept, and for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Json: TypeAlias = dict[str, Any]  # Any: free JSON

# One holder's responses may take this part of the room; beyond that its oldest go.
HOLDERS_SHARE = 4


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


class ResponseStore(Protocol):
    """Where responses are kept."""

    def check(self) -> None:
        """Return if responses can be kept and found now.

        Raises:
            UnavailableError: they cannot.
        """

    async def put(self, holder: Holder, stored: StoredResponse) -> None:
        """Keep a response; once this returns, `find` finds it, unless the store has failed, which is logged."""

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
