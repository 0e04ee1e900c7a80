"""Writes one answer to its record, also when the shared state is away in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from gateway.answer_records.records import Writing

if TYPE_CHECKING:
    from gateway.answer_records.records import AnswerRecords, RecordReading

# Chunks that wait for a shared state that is away; beyond them the answer is no longer recorded.
MAX_WAITING_CHUNKS = 1000


class Recorder:
    """Writes one answer to its record, as its owner."""

    def __init__(self, records: AnswerRecords, name: str, owner: str, written: int = 0) -> None:
        """`written` is the number of chunks that the record has."""
        self.name = name
        self.owner = owner
        self._records = records
        # Chunks that are known to be in the record.
        self.written = written
        # Chunks that are not known to be written, because the shared state was away.
        self._waiting: list[bytes] = []
        self._is_off = False

    async def append(self, chunk: bytes) -> bool:
        """Write a chunk, or keep it until the shared state is back; return False if the record has another owner."""
        if self._is_off:
            return True
        self._waiting.append(chunk)
        try:
            return await self._flush()
        except UnavailableError:
            self._is_off = len(self._waiting) > MAX_WAITING_CHUNKS
            return True

    async def finish(self, end: bytes) -> bool:
        """Write the end; return False if the record has ended before, or has another owner.

        Raises:
            UnavailableError: the shared state is away; this may be repeated.
        """
        if self._is_off:
            return True
        return await self._flush() and await self._records.finish(self.name, self.owner, end)

    def continues(self, reading: RecordReading) -> bool:
        """Whether nothing but chunks of this recorder was written after the first `written` ones."""
        new = list(reading.chunks)
        return reading.written == self.written + len(new) and new == self._waiting[: len(new)]

    async def release(self, charged: int) -> None:
        """Give the record up to the next reader; see `finish`."""
        await self._records.release(self.name, self.owner, charged)

    async def _flush(self) -> bool:
        waiting = list(self._waiting)
        if not waiting:
            return True
        outcome = await self._records.append(self.name, self.owner, self.written, waiting)
        if outcome is Writing.GONE:
            self._is_off = True
            self._waiting.clear()
        elif outcome is Writing.DONE:
            self.written += len(waiting)
            del self._waiting[: len(waiting)]
        return outcome is not Writing.LOST
