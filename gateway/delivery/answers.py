"""The answer to one HTTP request as deliveries read it, and one that a gateway generates for its client alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from gateway.generation.journal import number_choices
from gateway.generation.usage import Usage, usage_of
from gateway.quotas.quotas import Charge, announced_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from common.requests import GenerateRequest
    from gateway.delivery.answer_context import AnswerContext
    from gateway.generation.generation import Generation
    from gateway.generation.journal import ChoiceUpdate, JournalEntry
    from gateway.quotas.meters import ChargeKind
    from gateway.quotas.quotas import Lease


class Answer(Protocol):
    """The output of one HTTP request for one reader."""

    @property
    def entries(self) -> Sequence[JournalEntry]:
        """The requests with their choices."""

    @property
    def usage(self) -> Usage:
        """Token counts so far."""

    @property
    def is_complete(self) -> bool:
        """Whether the end of the answer is known and final."""

    @property
    def keeps_numbers(self) -> bool:
        """Whether other readers get as many updates before the next one, so that events can be counted."""

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        """Submit the requests or find the record; return headers. `cut` ends a reader that is too slow.

        Raises:
            PandoError: the requests are refused.
        """

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        """Wait for updates and return all that are pending; empty at the end, None after a nudge.

        Raises:
            PandoError: the answer failed, and all updates before the failure have been returned.
        """

    def nudge(self) -> None:
        """Wake the reader without an update."""

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Finish after the last update or the failure; await `keep` first if this reader is the one that generated."""

    def close(self, cause: str | None) -> None:
        """Stop reading; what is still generated is aborted, counted in the metrics under `cause`."""


class PlainAnswer:
    """Implements `Answer` without a record: it ends with its client's connection."""

    def __init__(self, answers: AnswerContext, requests: Sequence[GenerateRequest], buffer_bytes: int | None) -> None:
        """At most about `buffer_bytes` of output wait for a slow client."""
        self.entries = number_choices(requests)
        self._run = GenerationRun(answers, buffer_bytes)
        self._has_ended = False

    @property
    def usage(self) -> Usage:
        return usage_of(self.entries)

    @property
    def is_complete(self) -> bool:
        return self._has_ended

    @property
    def keeps_numbers(self) -> bool:
        return True

    async def begin(self, cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        return await self._run.start(self.entries, cut)

    async def next_updates(self) -> Sequence[ChoiceUpdate] | None:
        return await self._run.generation.next_updates()

    def nudge(self) -> None:
        self._run.generation.nudge()

    async def conclude(self, keep: Callable[[], Awaitable[None]]) -> None:
        self._has_ended = True
        await self._run.charge()
        await keep()

    def close(self, cause: str | None) -> None:
        self._run.close(cause, has_ended=True)


class GenerationRun:
    """A generation of this gateway and its share of the quotas, from its start to its end; may be started again."""

    def __init__(self, answers: AnswerContext, buffer_bytes: int | None) -> None:
        self._answers = answers
        self._buffer_bytes = buffer_bytes
        self._generation: Generation | None = None
        self._lease: Lease | None = None
        # Tokens that have been charged for the answer, and those of them that `_lease` has taken.
        self.charged = 0
        self._taken = 0

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the answer is generated here"
        return self._generation

    async def start(self, entries: Sequence[JournalEntry], cut: Callable[[], None]) -> list[tuple[bytes, bytes]]:
        """Charge for new requests and submit them; return headers with what is left of the quotas."""
        self._taken = self.charged = _announced(entries)
        charge = Charge(entries[0].request.view.subject, len(entries), self._taken, uses_model=True)
        return await self._open(entries, cut, charge, 0.0)

    async def resume(
        self,
        entries: Sequence[JournalEntry],
        cut: Callable[[], None],
        kind: ChargeKind,
        created_at: float,
        charged: int | None,
    ) -> None:
        """Submit the rest of requests for which `charged` tokens (None: those announced) have been charged before."""
        self._taken, self.charged = 0, _announced(entries) if charged is None else charged
        charge = Charge(entries[0].request.view.subject, len(entries), 0, kind=kind)
        await self._open(entries, cut, charge, max(time.time() - created_at, 0.0))

    async def charge(self) -> None:
        """Write the use of the answer to the ledger."""
        self._answers.note_use(self.generation.entries, has_ended=True)
        await self._answers.ledger.settle()

    def close(self, cause: str | None, *, settles: bool = True, has_ended: bool = False) -> None:
        """Abort what still runs, counted under `cause`. `has_ended`: nothing continues the answer.

        `settles` charges the difference to the tokens used; without it, another gateway will do that.
        """
        if self._generation is None or self._lease is None:
            return
        excess = self._generation.usage.total - self.charged if settles else 0
        self._answers.generations.close(self._generation, cause)
        self._answers.running.pop(self._generation, None)
        self._answers.note_use(self._generation.entries, has_ended=has_ended)
        self._lease.settle(self._taken + excess)
        self._generation = self._lease = None

    async def _open(
        self, entries: Sequence[JournalEntry], cut: Callable[[], None], charge: Charge, elapsed_s: float
    ) -> list[tuple[bytes, bytes]]:
        lease = await self._answers.quotas.take(charge)
        for entry in entries:
            entry.throttle(tenant=lease.throttles_tenant, subject=lease.throttles_subject)
        try:
            self._generation = self._answers.generations.open(
                entries, buffer_bytes=self._buffer_bytes, elapsed_s=elapsed_s
            )
        except BaseException:
            lease.settle(0)
            raise
        self._generation.on_overflow = cut
        self._answers.running[self._generation] = 0
        self._lease = lease
        return lease.headers()


def _announced(entries: Sequence[JournalEntry]) -> int:
    return sum(announced_tokens(entry.request) for entry in entries)
