"""Records of answers in this process, for a single gateway."""

from __future__ import annotations

import secrets
import sys
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import QueueFullError
from common.room import SharedRoom
from gateway.answer_records.records import RECORD_BYTES, RecordReading, Writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.types import Subject
    from gateway.answer_records.records import NewRecord

RETRY_AFTER_MS = 1000


@dataclass(slots=True)
class _Record:
    """A record. Its parts stand one after another in `content`: the request, the chunks and, after them, the end.

    `lengths` are those of the parts, in bytes. Two buffers take less memory than an object for each part, and
    serialized JSON, which has room to grow, is copied.
    """

    subject: Subject
    claim: str | None
    in_background: bool
    owner: str | None
    expires_at: float = 0.0
    content: bytearray = field(default_factory=bytearray)
    lengths: array[int] = field(default_factory=lambda: array("I"))
    has_ended: bool = False
    charged: int | None = None
    # Bytes of the room that it has taken.
    taken: int = 0

    @property
    def size(self) -> int:
        """Bytes of memory, including what the buffers hold in reserve."""
        return RECORD_BYTES + sys.getsizeof(self.content) + sys.getsizeof(self.lengths)

    @property
    def written(self) -> int:
        """The number of chunks."""
        return len(self.lengths) - 1 - self.has_ended

    def add(self, part: bytes) -> None:
        self.content += part
        self.lengths.append(len(part))

    def finish(self, end: bytes) -> None:
        """Add the end, and free what the buffers hold in reserve."""
        self.add(end)
        self.has_ended = True
        self.content = bytearray(self.content)
        self.lengths = self.lengths[:]

    def parts(self, first: int, stop: int) -> list[bytes]:
        """Return the parts from number `first` up to `stop`, without the latter."""
        # Counted from the end, which is where most readers are.
        parts, begin = [], len(self.content) - sum(self.lengths[first:])
        for length in self.lengths[first:stop]:
            parts.append(bytes(self.content[begin : begin + length]))
            begin += length
        return parts


class MemoryRecords:
    """Implements `gateway.answer_records.records.AnswerRecords`."""

    def __init__(self, lifetime_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep records for `lifetime_s` after their last change, in `max_bytes` together."""
        self.lifetime_s = lifetime_s
        self.gateway_id = secrets.token_hex(8)
        self._clock = clock
        # Ordered by the time of the last change, and so by expiry.
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._claims: dict[str, str] = {}
        self._room = SharedRoom(max_bytes, "recorded", RETRY_AFTER_MS)

    async def open(self, record: NewRecord) -> str | None:
        self._expire()
        if record.claim is not None and record.claim in self._claims:
            return self._claims[record.claim]
        opened = _Record(record.subject, record.claim, record.in_background, record.owner)
        opened.add(record.request)
        self._fit(opened)
        self._records[record.name] = opened
        self._touch(record.name, opened)
        if record.claim is not None:
            self._claims[record.claim] = record.name
        return None

    async def claimed(self, claim: str) -> str | None:
        self._expire()
        return self._claims.get(claim)

    async def request(self, name: str) -> bytes | None:
        self._expire()
        record = self._records.get(name)
        return None if record is None else record.parts(0, 1)[0]

    async def read(self, name: str, first: int = 0) -> RecordReading | None:
        self._expire()
        record = self._records.get(name)
        if record is None:
            return None
        stop = 1 + record.written
        return RecordReading(
            record.parts(1 + first, stop),
            record.written,
            record.owner,
            record.owner is not None,
            record.parts(stop, stop + 1)[0] if record.has_ended else None,
            record.charged,
        )

    async def append(self, name: str, owner: str, first: int, chunks: Sequence[bytes]) -> Writing:
        record = self._records.get(name)
        if record is None:
            return Writing.GONE
        if record.owner != owner or record.has_ended:
            return Writing.LOST
        assert first == len(record.lengths) - 1, "chunks are written in order"
        # Without calls in between, because this runs for every token.
        content, lengths = record.content, record.lengths
        for chunk in chunks:
            content += chunk
            lengths.append(len(chunk))
        if sys.getsizeof(content) + sys.getsizeof(lengths) + RECORD_BYTES != record.taken:
            return Writing.DONE if self._settle(name, record) else Writing.GONE
        record.expires_at = self._clock() + self.lifetime_s
        self._records.move_to_end(name)
        return Writing.DONE

    async def finish(self, name: str, owner: str | None, end: bytes) -> bool:
        record = self._records.get(name)
        if record is None or record.has_ended or (owner is not None and record.owner != owner):
            return False
        record.finish(end)
        self._settle(name, record)
        return True

    async def release(self, name: str, owner: str, charged: int | None) -> bool:
        record = self._records.get(name)
        if record is None or record.owner != owner:
            return False
        record.owner = None
        if charged is not None:
            record.charged = charged
        self._touch(name, record)
        return True

    async def take(self, name: str, previous: str | None, owner: str, chunks: int) -> bool:
        record = self._records.get(name)
        if record is None or record.owner != previous or record.has_ended or record.written != chunks:
            return False
        record.owner = owner
        self._touch(name, record)
        return True

    async def keep(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._records:
                self._touch(name, self._records[name])

    async def drop(self, name: str) -> None:
        self._drop(name)

    async def orphans(self) -> Sequence[str]:
        return [
            name
            for name, record in self._records.items()
            if record.in_background and record.owner is None and not record.has_ended
        ]

    def _settle(self, name: str, record: _Record) -> bool:
        """Account for what was added to a record; drop it if there is no room, as it could not be continued."""
        try:
            self._fit(record)
        except QueueFullError:
            self._drop(name)
            return False
        self._touch(name, record)
        return True

    def _touch(self, name: str, record: _Record) -> None:
        record.expires_at = self._clock() + self.lifetime_s
        self._records.move_to_end(name)

    def _expire(self) -> None:
        now = self._clock()
        while self._records:
            name, record = next(iter(self._records.items()))
            if record.expires_at > now:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        record = self._records.pop(name, None)
        if record is None:
            return
        self._room.give_back(record.subject, record.taken)
        if record.claim is not None:
            del self._claims[record.claim]

    def _fit(self, record: _Record) -> None:
        """Take the room that a record has come to need, or give back what it no longer does.

        Raises:
            QueueFullError: there is no room.
        """
        more = record.size - record.taken
        if more > 0:
            self._room.take(record.subject, more)
        elif more < 0:
            self._room.give_back(record.subject, -more)
        record.taken += more
