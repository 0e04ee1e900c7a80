"""The parts of a gateway that all its answers share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from common.errors import PandoError, UnavailableError
from common.logs import get_logger
from common.room import SharedRoom
from gateway.answer_records.records import NO_CHUNKS
from gateway.generation.generations import original_id
from gateway.generation.usage import Usage, usage_of
from gateway.ledger.entries import Tokens, Work, cached_amount

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from gateway.answer_records.recorder import Recorder
    from gateway.answer_records.records import AnswerRecords, RecordReading
    from gateway.generation.generation import Generation
    from gateway.generation.generations import Generations
    from gateway.generation.journal import JournalEntry
    from gateway.ledger.ledger import Ledger
    from gateway.quotas.quotas import Quotas

RETRY_S = 0.5
MAX_FOLLOWERS = 4096
# Answers whose use is noted in one turn of the event loop, which takes a fraction of a millisecond.
NOTED_AT_ONCE = 16


class AnswerContext:
    """The parts that answers share: generations, quotas, ledger, and the records with their background work."""

    def __init__(self, generations: Generations, records: AnswerRecords, quotas: Quotas, ledger: Ledger) -> None:
        self.generations = generations
        self.records = records
        self.quotas = quotas
        self.ledger = ledger
        # The generations of answers that are open here, and how often each had changed when its use was last noted.
        self.running: dict[Generation, int] = {}
        self.followers = SharedRoom(MAX_FOLLOWERS, "following recorded answers", 1000)
        self.recorders: set[Recorder] = set()
        self._numbers = itertools.count()
        self._owners: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("answers")

    def new_owner(self) -> str:
        """Return a name of an owner that has not been used before, for use until `forget_owner`."""
        owner = f"{self.records.gateway_id}:{next(self._numbers)}"
        self._owners.add(owner)
        return owner

    def forget_owner(self, owner: str) -> None:
        """Let records that say that they have this owner be taken over."""
        self._owners.discard(owner)

    def is_owned(self, reading: RecordReading) -> bool:
        """Whether a living reader owns the record.

        Gateways know their own owners: another name of theirs is that of a reader that has ended, or that was told that
        it did not get the record; or it is damaged.
        """
        return reading.is_owned and reading.owner is not None and not self._is_stray(reading.owner)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` independently of a client; its failure is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_done)

    def insist(self, write: Callable[[], Awaitable[object]], then: Callable[[], None] = lambda: None) -> None:
        """Repeat `write` until the records are available, for as long as records are kept; call `then` at the end."""
        self.spawn(self._insist(write, then))

    async def give_up(self, name: str, owner: str, charged: int | None) -> None:
        """Leave a record that `owner` has, or may have, to its next reader; see `AnswerRecords.release`.

        A record must not keep the name of an owner of this gateway that has left it: other gateways would wait for it.
        So a refusal, which may be due to a damaged message or name, is compared with the record.

        Raises:
            UnavailableError: the records are unavailable; this may be repeated.
        """
        while not await self.records.release(name, owner, charged):
            reading = await self.records.read(name, NO_CHUNKS)
            if reading is None or reading.end is not None or reading.owner is None:
                return
            if reading.owner != owner:
                if not self._is_stray(reading.owner):
                    return
                owner = reading.owner

    async def run(self) -> None:
        """Prolong the records of answers that are generated here, until cancelled."""
        while True:
            await asyncio.sleep(max(self.records.lifetime_s / 4, 1.0))
            with contextlib.suppress(UnavailableError):
                await self.records.keep([recorder.name for recorder in self.recorders])

    async def keep_ledger(self) -> None:
        """Write the use of open answers to the ledger when it has changed, until cancelled."""
        await self.ledger.run(self._note_running)

    def note_use(self, entries: Sequence[JournalEntry], *, has_ended: bool = False) -> None:
        """Note in the ledger what requests have used so far; `has_ended`: the whole answer has."""
        for entry in entries:
            usage, request = usage_of((entry,)), entry.request
            if usage.total:
                options = request.options
                work = Work(request.model, options.adapter, request.operation, options.is_batch)
                subject, tokens = request.view.subject, tokens_of(usage)
                self.ledger.note(original_id(request), subject, work, tokens, has_ended=has_ended)

    def _is_stray(self, owner: str) -> bool:
        return owner.startswith(f"{self.records.gateway_id}:") and owner not in self._owners

    async def _note_running(self) -> None:
        """Note the use that has changed, in slices between which the event loop delivers tokens."""
        changed = [generation for generation, noted in self.running.items() if generation.changes != noted]
        for number, generation in enumerate(changed, start=1):
            if generation in self.running:
                self.running[generation] = generation.changes
                self.note_use(generation.entries)
            if number % NOTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def close(self, limit_s: float = 1.0) -> None:
        """Give the writes that are under way `limit_s` to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        for task in self._tasks:
            task.cancel()

    async def _insist(self, write: Callable[[], Awaitable[object]], then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.records.lifetime_s
        try:
            while loop.time() < until:
                try:
                    await write()
                except UnavailableError:
                    await asyncio.sleep(RETRY_S)
                else:
                    return
        finally:
            then()

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, PandoError):
            self._log.warning("answer.failed", reason=error.message)
        else:
            self._log.error("answer.failed", exc_info=error)


def tokens_of(usage: Usage) -> Tokens:
    """Return the ledger's charge for one request."""
    cached = {cached_amount(part.tier, part.level): part.tokens for prompt in usage.prompts for part in prompt.cached}
    return Tokens(
        1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.forced_tokens, usage.drafted_tokens
    )._replace(**cached)
