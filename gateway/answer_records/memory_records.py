"""Records of answers in this process, for a single gateway."""

from __future__ import annotations

import secrets
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import QueueFullError
from common.room import SharedRoom
from gateway.answer_records.records import RECORD_BYTES, RecordReading, Writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.answer_records.records import NewRecord

RETRY_AFTER_MS = 1000


@dataclass(slots=True)
class _Record:
    """A record; its chunks stand one after another in `text`, and chunk i ends at `ends[i]`."""

    opened: NewRecord
    owner: str | None
    expires_at: float
    size: int
    text: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("Q"))
    end: bytes | None = None
    charged: int | None = None

    def chunks(self, first: int) -> list[bytes]:
        """Return the chunks from number `first` on."""
        starts = [self.ends[first - 1] if first else 0, *self.ends[first:-1]] if first < len(self.ends) else []
        return [bytes(self.text[start:stop]) for start, stop in zip(starts, self.ends[first:], strict=True)]


class MemoryRecords:
    """Implements `gateway.answer_records.records.AnswerRecords`."""

    def __init__(self, lifetime_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep records for `lifetime_s` after their last change, in `max_bytes` together."""
        self.lifetime_s = lifetime_s
        self.gateway_id = secrets.token_hex(8)
        self._clock = clock
        # Ordered by the time of the last change, and so by expiry.
        self._records: dict[str, _Record] = {}
        self._claims: dict[str, str] = {}
        self._room = SharedRoom(max_bytes, "recorded", RETRY_AFTER_MS)

    async def open(self, record: NewRecord) -> str | None:
        self._expire()
        if record.claim is not None and record.claim in self._claims:
            return self._claims[record.claim]
        size = RECORD_BYTES + len(record.request)
        self._room.take(record.subject, size)
        self._records[record.name] = _Record(record, record.owner, self._clock() + self.lifetime_s, size)
        if record.claim is not None:
            self._claims[record.claim] = record.name
        return None

    async def claimed(self, claim: str) -> str | None:
        self._expire()
        return self._claims.get(claim)

    async def read(self, name: str, first: int = 0) -> RecordReading | None:
        self._expire()
        record = self._records.get(name)
        if record is None:
            return None
        is_owned = record.owner is not None
        return RecordReading(
            record.opened.request,
            record.chunks(first),
            len(record.ends),
            record.owner,
            is_owned,
            record.end,
            record.charged,
        )

    async def append(self, name: str, owner: str, first: int, chunks: Sequence[bytes]) -> Writing:
        record = self._records.get(name)
        if record is None:
            return Writing.GONE
        if record.owner != owner or record.end is not None:
            return Writing.LOST
        size = sum(map(len, chunks))
        try:
            self._room.take(record.opened.subject, size)
        except QueueFullError:
            self._drop(name)
            return Writing.GONE
        assert first == len(record.ends), "chunks are written in order"
        record.size += size
        for chunk in chunks:
            record.text += chunk
            record.ends.append(len(record.text))
        self._touch(name, record)
        return Writing.DONE

    async def finish(self, name: str, owner: str | None, end: bytes) -> bool:
        record = self._records.get(name)
        if record is None or record.end is not None or (owner is not None and record.owner != owner):
            return False
        record.end = end
        self._touch(name, record)
        return True

    async def release(self, name: str, owner: str, charged: int) -> None:
        record = self._records.get(name)
        if record is not None and record.owner == owner:
            record.owner, record.charged = None, charged
            self._touch(name, record)

    async def take(self, name: str, previous: str | None, owner: str, chunks: int) -> bool:
        record = self._records.get(name)
        if record is None or record.owner != previous or record.end is not None or len(record.ends) != chunks:
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
            if record.opened.in_background and record.owner is None and record.end is None
        ]

    def _touch(self, name: str, record: _Record) -> None:
        record.expires_at = self._clock() + self.lifetime_s
        self._records[name] = self._records.pop(name)

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
        self._room.give_back(record.opened.subject, record.size)
        if record.opened.claim is not None:
            del self._claims[record.opened.claim]
