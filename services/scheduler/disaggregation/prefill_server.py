"""Computes prompts for other groups, and keeps their pages, and the states after them, until those have read them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from common.errors import PandoError, RequestFailedError, UnavailableError
from common.logs import get_logger
from common.types import RequestId, SamplingParams, StopConditions
from services.scheduler import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from common.steps import PageIds
    from common.types import Finish, ScheduleRequest, SnapshotSlot, TokenIds
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.sequence import Sequence as EngineSequence
    from services.scheduler.group import WorkerGroup
    from services.scheduler.loop import SchedulerLoop
    from services.scheduler.rank import RankConnection

LEASE_BYTES = 16
# Longest time for which pages are kept after the last of them was offered; reading takes far less.
LEASE_S = 60.0
# Interval of messages while nothing is computed, by which the other group knows that this one is alive.
BEAT_S = 0.5
# Between attempts to end a lease at a rank that does not answer; the group is soon lost then, and its leases with it.
REVOKE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """The pages computed since the part before; see `PrefillResponse` in protos/pando/v1/scheduler.proto."""

    fingerprint: str
    kv_identity: str
    workers: tuple[str, ...]
    lease: bytes
    pages: tuple[int, ...]
    cached_tokens: int
    is_last: bool
    # With the last part: of the recurrent states after all pages.
    snapshot: SnapshotSlot | None = None
    # With the last part: from when the prompt started until it was computed.
    computing_us: int | None = None


@dataclass(slots=True)
class _Progress:
    """Follows a sequence, whose pages are lent under the lease `name`; see `PrefillFollower`."""

    core: SchedulerCore
    name: bytes
    clock: Callable[[], float]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    ended_at: float = 0.0
    finish: Finish | None = None
    # The page that the prompt does not fill, if an image ends there: the lease holds it, as the cache has whole pages.
    tail: tuple[int, ...] = ()

    def on_computed(self) -> None:
        self.changed.set()

    def on_prefilled(self, sequence: EngineSequence, pages: PageIds) -> None:
        page_size = self.core.memory.cache.page_size
        if sequence.has_image_tail(page_size) and not self.tail:
            tail = pages[(sequence.prompt_tokens - 1) // page_size :][:1]
            self.core.exports.keep(self.name, tail)
            self.tail = tuple(tail.tolist())

    def on_ended(self, finish: Finish | None) -> None:
        self.has_ended, self.finish, self.ended_at = True, finish, self.clock()
        self.changed.set()


class PrefillServer:
    """Serves other groups' schedulers, one call for each prompt."""

    def __init__(self, loop: SchedulerLoop, group: WorkerGroup, workers: Sequence[str]) -> None:
        """Compute with `group`, whose ranks other groups' workers reach at the addresses `workers`."""
        self.open_leases = 0
        self.prefills = 0
        self._loop = loop
        self._group = group
        self._workers = tuple(workers)
        self._log = get_logger("prefill")
        # Releases that go on after their call has ended.
        self._releases: set[asyncio.Task[None]] = set()

    async def serve(self, request: ScheduleRequest) -> AsyncGenerator[PrefillPart, None]:
        """Compute a prompt; yield its pages as they are computed, then keep them until this generator is closed.

        Raises:
            PandoError: the request is refused, or fails.
        """
        capacity, core = self._loop.capacity, self._loop.core
        if core is None or capacity is None:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        name = secrets.token_bytes(LEASE_BYTES)
        progress, own = _Progress(core, name, lambda: self._loop.now), _prompt_only(request)
        admission = self._loop.submit_prefill(own, progress)
        if admission.rejected is not None:
            raise RequestFailedError(admission.rejected)
        self.prefills += 1
        lease = _Lease(core, own, name, self._group.ranks)
        self.open_leases += 1
        metrics.PREFILL_LEASES.set(self.open_leases)
        part = PrefillPart(capacity.fingerprint, capacity.kv_identity, self._workers, lease.name, (), 0, is_last=False)
        try:
            yield part
            while not progress.has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await progress.changed.wait()
                progress.changed.clear()
                pages = await lease.extend()
                yield replace(part, pages=pages, cached_tokens=lease.cached_tokens, is_last=False)
            if progress.finish is None or progress.finish.error is not None:
                raise UnavailableError("the prompt was not computed here")
            pages = (*await lease.extend(), *await lease.add(progress.tail))
            snapshot = await lease.add_state()
            computing_us = None if lease.started_at is None else round((progress.ended_at - lease.started_at) * 1e6)
            yield replace(
                part, pages=pages, cached_tokens=lease.cached_tokens, is_last=True, snapshot=snapshot,
                computing_us=computing_us,
            )  # fmt: skip
            await asyncio.sleep(LEASE_S)
            self._log.warning("prefill.lease_expired", request_id=request.request_id)
        finally:
            # In a task of its own: the caller may have been cancelled.
            release = asyncio.create_task(self._release(lease))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _release(self, lease: _Lease) -> None:
        if self._loop.core is lease.core:
            self._loop.abort(lease.request.request_id)
        try:
            await lease.revoke(lambda: self._group.ranks)
        finally:
            self.open_leases -= 1
            metrics.PREFILL_LEASES.set(self.open_leases)
            self._loop.wake()


class _Lease:
    """The pages of one prompt that other groups may read."""

    def __init__(
        self, core: SchedulerCore, request: ScheduleRequest, name: bytes, ranks: Sequence[RankConnection]
    ) -> None:
        self.core = core
        self.request = request
        self.name = name
        self.cached_tokens = 0
        self._sequence = core.leader_of(request.request_id)
        self._ranks = tuple(ranks)
        self._generation = core.exports.generation
        self._pages = 0
        self._has_granted = False

    @property
    def started_at(self) -> float | None:
        """When the prompt first started, by the scheduler's clock; None: it has not."""
        return None if self._sequence is None else self._sequence.started_at

    async def extend(self) -> tuple[int, ...]:
        """Let the pages be read that have been computed since the last call; return them.

        Raises:
            UnavailableError: a worker was lost, and the pages with it.
        """
        self._check_memory()
        end = self._computed_tokens() // self.core.memory.cache.page_size
        if end <= self._pages or self._sequence is None:
            return ()
        # One more id than is wanted, as the cache never matches the last.
        ids = self._sequence.key_of(self.request.token_ids)[: end * self.core.memory.cache.page_size + 1]
        if self.core.memory.states is not None and not self._has_more(ids):
            return ()
        options = self.request.options
        pin = self.core.exports.pin(self.name, self.request.view, ids, options.priority, options.session)
        new = () if pin is None else tuple(pin.pages[self._pages :].tolist())
        self._pages += len(new)
        return await self._grant(new)

    async def add(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """Let the page be read that follows all whole ones of the prompt, if these are; return it, or nothing.

        Raises:
            UnavailableError: a worker was lost, and the page with it.
        """
        whole = (len(self.request.token_ids) - 1) // self.core.memory.cache.page_size
        return await self._grant(tail) if self._pages == whole else ()

    async def add_state(self) -> SnapshotSlot | None:
        """Let the snapshot be read of the states after all pages so far; return it, or None if there is none.

        Raises:
            UnavailableError: a worker was lost, and the snapshot with it.
        """
        slot = self.core.exports.lend_state(self.name)
        if slot is not None:
            await self._grant((), (slot,))
        return slot

    def _has_more(self, ids: TokenIds) -> bool:
        """Whether a row could continue after more pages than are lent; others are of no use."""
        cache = self.core.memory.cache
        return cache.peek(self.request.view, ids) > self._pages * cache.page_size

    def _check_memory(self) -> None:
        if self._generation != self.core.exports.generation:
            raise UnavailableError("a worker was lost", retry_after_ms=1000)

    async def _grant(self, new: tuple[int, ...], snapshots: tuple[SnapshotSlot, ...] = ()) -> tuple[int, ...]:
        if new or snapshots:
            self._check_memory()
            self._has_granted = True
            self.core.exports.lent.lend(self.name, np.array(new, np.int32))
            try:
                await asyncio.gather(*(rank.grant_pages(self.name, new, snapshots) for rank in self._ranks))
            except PandoError as error:
                raise UnavailableError("a worker was lost", retry_after_ms=1000) from error
        return new

    async def revoke(self, current: Callable[[], Sequence[RankConnection]]) -> None:
        """End the lease at all ranks, unless the group has been lost, as then it has ended with the ranks' streams."""
        pending = set(self._ranks) if self._has_granted else set()
        while pending and pending <= set(current()):
            for rank in list(pending):
                with contextlib.suppress(PandoError):
                    await rank.revoke_pages(self.name)
                    pending.discard(rank)
            if pending:
                await asyncio.sleep(REVOKE_RETRY_S)
        self.core.exports.lent.take_back(self.name)
        self.core.exports.release(self.name)

    def _computed_tokens(self) -> int:
        """Return the number of the prompt's tokens that are computed and may be matched."""
        sequence, prompt = self._sequence, len(self.request.token_ids)
        if sequence is None:
            return 0
        self.cached_tokens = sequence.cached_tokens or 0
        if sequence.is_prefilled:
            return prompt - 1
        return 0 if sequence.row is None else min(int(self.core.rows.computed[sequence.row]), prompt - 1)


def _prompt_only(request: ScheduleRequest) -> ScheduleRequest:
    """Return the request of which only the prompt is computed, under a name of its own."""
    options = replace(
        request.options, n=1, sampling=SamplingParams(), stop=StopConditions(max_tokens=0), turn=None,
        prompt_logprobs=None, resume=None,
    )  # fmt: skip
    return replace(
        request,
        request_id=RequestId(f"prefill-{secrets.token_hex(8)}"),
        options=options,
        prefill_group="",
        prefill_group_name="",
    )
