"""Records of answers: each has its request, its output so far and its owner, the gateway that generates it.

A record outlives its gateway and its client's connection, so that an answer can be continued at any gateway. Content is
bytes to its store; `gateway/delivery/answers.py` writes and reads it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.types import Subject

# Room that a record takes in addition to its content.
RECORD_BYTES = 1024
# For readers that need the state alone: a first chunk that no record has.
NO_CHUNKS = 2**31


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to open. `name` and `claim` are made by `record_name` and `claim_name`."""

    name: str
    # Derived from the client's Idempotency-Key; a second record with the same claim is not opened.
    claim: str | None
    # Whose room it takes.
    subject: Subject
    request: bytes
    owner: str
    # Generated also while no client reads it: a gateway without a client takes it over if its owner dies.
    in_background: bool = False


@dataclass(frozen=True, slots=True)
class RecordReading:
    """The state of a record, and its chunks from the requested number on."""

    chunks: Sequence[bytes]
    # The number of all chunks.
    written: int
    # None: the owner has released it.
    owner: str | None
    # Whether the owner is alive.
    is_owned: bool
    # Set once the answer is complete or has failed.
    end: bytes | None
    # Tokens that have been charged to the quotas for it, where its owner has corrected the announced number.
    charged: int | None


class Writing(Enum):
    """The outcome of writing to a record."""

    DONE = "done"
    # Another gateway owns the record, or it has ended.
    LOST = "lost"
    # There is no such record, or no room for more.
    GONE = "gone"


class AnswerRecords(Protocol):
    """Stores records for a time after their last change. Every method may raise UnavailableError."""

    @property
    def lifetime_s(self) -> float:
        """Seconds after its last change for which a record is kept; 0: nothing is recorded."""

    @property
    def gateway_id(self) -> str:
        """The beginning of the names of this gateway's owners."""

    async def open(self, record: NewRecord) -> str | None:
        """Create a record; return the name of the record that has the same claim, if there is one.

        Raises:
            QueueFullError: there is no room.
        """

    async def claimed(self, claim: str) -> str | None:
        """Return the name of the record with a claim."""

    async def request(self, name: str) -> bytes | None:
        """Return the request of a record; None: there is none."""

    async def read(self, name: str, first: int = 0) -> RecordReading | None:
        """Return the state of a record and its chunks from number `first` on; None: there is none.

        Readers that follow a record call this often, so it leaves out the request, which may be large.
        """

    async def append(self, name: str, owner: str, first: int, chunks: Sequence[bytes]) -> Writing:
        """Add chunks, the first of which has number `first`; those that it has already are not added again."""

    async def finish(self, name: str, owner: str | None, end: bytes) -> bool:
        """End the record; only if `owner` owns it, unless that is None. Return whether it was open."""

    async def release(self, name: str, owner: str, charged: int | None) -> bool:
        """Give up the ownership; return False if `owner` does not have it.

        `charged` are the tokens that have been charged to the quotas (None: as recorded before).
        """

    async def take(self, name: str, previous: str | None, owner: str, chunks: int) -> bool:
        """Become the owner, if the owner is still `previous` and the record is open and has `chunks` chunks."""

    async def keep(self, names: Sequence[str]) -> None:
        """Prolong the lifetime of records."""

    async def drop(self, name: str) -> None:
        """Delete a record."""

    async def orphans(self) -> Sequence[str]:
        """Return the open records in the background that no living gateway owns."""


def record_name(tenant: str, credential: str, answer_id: str) -> str:
    """Return the name of an answer's record, which only requests with its credential can derive."""
    return _digest("answer", tenant, credential, answer_id)


def claim_name(tenant: str, credential: str, subject: str, path: str, key: str) -> str:
    """Return the claim of an `Idempotency-Key`, which other subjects' equal keys do not share."""
    return _digest("key", tenant, credential, subject, path, key)


def _digest(*parts: str) -> str:
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:40]
