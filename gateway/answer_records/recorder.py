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

    @property
    def is_off(self) -> bool:
        """Whether the answer is no longer recorded, and its record lacks a part of it."""
        return self._is_off

    async def append(self, chunk: bytes) -> Writing:
        """Write a chunk, or keep it until the shared state is back; keep it also if the outcome is not DONE."""
        if self._is_off:
            return Writing.DONE
        self._waiting.append(chunk)
        try:
            return await self.flush()
        except UnavailableError:
            if len(self._waiting) > MAX_WAITING_CHUNKS:
                self.stop()
            return Writing.DONE

    async def finish(self, end: bytes) -> Writing:
        """Write the end; LOST if the record is gone, too.

        Raises:
            UnavailableError: the shared state is away; this may be repeated.
        """
        outcome = await self.flush()
        if outcome is not Writing.DONE:
            return outcome
        return Writing.DONE if await self._records.finish(self.name, self.owner, end) else Writing.LOST

    async def flush(self) -> Writing:
        """Write the chunks that wait; see `finish`."""
        waiting = list(self._waiting)
        if not waiting:
            return Writing.DONE
        outcome = await self._records.append(self.name, self.owner, self.written, waiting)
        if outcome is Writing.DONE:
            self.written += len(waiting)
            del self._waiting[: len(waiting)]
        return outcome

    def stop(self) -> None:
        """Record no more of the answer."""
        self._is_off = True
        self._waiting.clear()

    def continues(self, reading: RecordReading) -> bool:
        """Whether nothing but chunks of this recorder was written after the first `written` ones."""
        new = list(reading.chunks)
        return reading.written == self.written + len(new) and new == self._waiting[: len(new)]
