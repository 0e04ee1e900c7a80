"""A cache that records its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.debug.decisions import DecisionRecorder
from services.scheduler.cache.types import scope_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.debug.decisions import Decision, Facts
    from services.scheduler.cache.interface import EventSource, PrefixCache
    from services.scheduler.cache.pages import PageAllocator
    from services.scheduler.cache.sharing.choices import SharingChoices
    from services.scheduler.cache.sharing.fleet import FleetNews, FleetReport
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import (
        CacheUsage,
        CandidateId,
        Insertion,
        NodeSnapshot,
        OwnerSnapshot,
        PrefixLock,
        PromotionCandidate,
        Scope,
    )


class RecordedCache:
    """Implements `PrefixCache`: delegates to an inner cache and records the operations."""

    def __init__(
        self,
        cache: PrefixCache,
        allocator: PageAllocator,
        sink: Callable[[Decision], None],
        choices: SharingChoices | None = None,
    ) -> None:
        """Record `cache`, its reads of `choices`, and the rows' use of `allocator`; all three must be new."""
        self._cache = cache
        self._recorder = DecisionRecorder(sink)
        allocator.observer = self._recorder
        cache.events.subscribe(self._recorder.heard)
        if cache.host is not None:
            cache.host.observer = self._recorder
        if cache.snapshots is not None:
            cache.snapshots.observer = self._recorder
        if choices is not None:
            choices.observer = self._recorder.chose

    @property
    def inner(self) -> PrefixCache:
        """The cache that does the work."""
        return self._cache

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def events(self) -> EventSource:
        return self._cache.events

    @property
    def host(self) -> HostTier | None:
        """The host memory tier, None if there is none; it records its own operations."""
        return self._cache.host

    @property
    def snapshots(self) -> StateSnapshots | None:
        """Snapshots of recurrent states, None if the model has none; they record their own operations."""
        return self._cache.snapshots

    @property
    def epoch(self) -> int:
        return self._cache.epoch

    @property
    def evictable_pages(self) -> int:
        return self._cache.evictable_pages

    @property
    def protected_pages(self) -> int:
        return self._cache.protected_pages

    @property
    def soft_free_pages(self) -> int:
        return self._cache.soft_free_pages

    @property
    def held_references(self) -> int:
        return self._cache.held_references

    def view_of(self, view: View) -> Scope | None:
        """Return a key equal for requests that match all of each other's prefixes; not recorded."""
        return self._cache.view_of(view)

    def continuation(self, view: View, token_ids: TokenIds, most: int) -> TokenIds:
        """Return tokens that followed others in a view; not recorded, as it changes nothing."""
        return self._cache.continuation(view, token_ids, most)

    def peek(self, view: View, token_ids: TokenIds) -> int:
        """Count the leading tokens that are cached in a view; not recorded."""
        return self._cache.peek(view, token_ids)

    def commit(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        repeated: bool = False,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        """Record the request, and the lock."""
        given: Facts = {
            "view": list(scope_of(view)),
            "token_ids": token_ids.copy(),
            "repeated": repeated,
            "may_promote": may_promote,
            "priority": priority,
            "session": session,
        }
        with self._recorder.operation("commit", given) as outcome:
            lock = self._cache.commit(
                view, token_ids, repeated=repeated, may_promote=may_promote, priority=priority, session=session
            )
            outcome.update(lock=lock.lock_id, pages=lock.pages)
            self._recorder.open(lock, len(token_ids))
        return lock

    def commit_pages(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        """Raise an error: caches that are recorded read no pages of other groups."""
        raise NotImplementedError("pages of other groups are not recorded")

    def commit_nothing(self, view: View) -> PrefixLock:
        """Record the view, and the empty lock."""
        given = {"view": list(scope_of(view))}
        with self._recorder.operation("commit_nothing", given) as outcome:
            lock = self._cache.commit_nothing(view)
            outcome.update(lock=lock.lock_id)
            self._recorder.open(lock, 0)
        return lock

    def insert(self, lock: PrefixLock, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Record the inserted tokens and pages, and the duplicates."""
        given = {
            "lock": lock.lock_id,
            "tokens": len(token_ids),
            "new_ids": self._recorder.new_ids(lock, token_ids),
            "table": pages[: len(token_ids) // self.page_size].copy(),
            "prompt_tokens": prompt_tokens,
        }
        with self._recorder.operation("insert", given) as outcome:
            insertion = self._cache.insert(lock, token_ids, pages, prompt_tokens)
            outcome.update(
                lock=insertion.lock.lock_id,
                pages=insertion.pages,
                duplicates=insertion.duplicates,
                canonical=insertion.canonical,
                first_duplicate=insertion.first_duplicate,
            )
            self._recorder.replace(lock, insertion.lock, len(token_ids))
        return insertion

    def release(self, lock: PrefixLock) -> None:
        """Record the release of a lock."""
        with self._recorder.operation("release", {"lock": lock.lock_id}):
            self._cache.release(lock)
            self._recorder.close(lock)

    def evict(self, pages: int) -> int:
        """Record the requested and the freed number of pages."""
        with self._recorder.operation("evict", {"pages": pages}) as outcome:
            outcome["freed"] = self._cache.evict(pages)
        freed: int = outcome["freed"]
        return freed

    def flush(self) -> int:
        """Record the number of freed pages."""
        with self._recorder.operation("flush", {}) as outcome:
            outcome["freed"] = self._cache.flush()
        freed: int = outcome["freed"]
        return freed

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Record the subject and session that are forgotten."""
        given = {"subject": [subject.tenant, subject.name], "session": session}
        with self._recorder.operation("forget", given) as outcome:
            outcome["freed"] = self._cache.forget(subject, session)
        freed: int = outcome["freed"]
        return freed

    def advance(self, epoch: int) -> None:
        """Record an epoch boundary with the totals after it; a call within the same epoch is not recorded."""
        if epoch == self._cache.epoch:
            return
        with self._recorder.operation("advance", {"epoch": epoch}) as outcome:
            self._cache.advance(epoch)
            outcome.update(self._totals())

    def share(self) -> None:
        """Record a boundary within an epoch with the totals after it."""
        with self._recorder.operation("share", {}) as outcome:
            self._cache.share()
            outcome.update(self._totals())

    def _totals(self) -> dict[str, int]:
        return {
            "soft_free": self.soft_free_pages,
            "evictable": self.evictable_pages,
            "protected": self.protected_pages,
            "references": self.held_references,
        }

    def adopt(self, limits: Limits) -> None:
        """Record the new limits."""
        with self._recorder.operation("adopt", {"limits": limits.described()}):
            self._cache.adopt(limits)

    def pin(self, token_ids: TokenIds) -> int:
        """Record a pin."""
        with self._recorder.operation("pin", {"token_ids": token_ids.copy()}) as outcome:
            outcome["tokens"] = self._cache.pin(token_ids)
        tokens: int = outcome["tokens"]
        return tokens

    def unpin(self, token_ids: TokenIds) -> bool:
        """Record the removal of a pin."""
        with self._recorder.operation("unpin", {"token_ids": token_ids.copy()}) as outcome:
            outcome["was_pinned"] = self._cache.unpin(token_ids)
        was_pinned: bool = outcome["was_pinned"]
        return was_pinned

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        """Record the candidates of a content check; an empty result is not recorded."""
        candidates = self._cache.take_candidates()
        if candidates:
            asked = [[candidate.candidate_id, len(candidate.token_ids)] for candidate in candidates]
            with self._recorder.operation("take_candidates", {}) as outcome:
                outcome["candidates"] = asked
        return candidates

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Record a verdict."""
        given = {"candidate": candidate_id, "allowed_tokens": allowed_tokens}
        with self._recorder.operation("resolve", given):
            self._cache.resolve(candidate_id, allowed_tokens)

    def forget_verdicts(self) -> None:
        """Record that the rules of the content check have changed."""
        with self._recorder.operation("forget_verdicts", {}):
            self._cache.forget_verdicts()

    def take_report(self) -> FleetReport:
        """Return the report for other groups; not recorded."""
        return self._cache.take_report()

    def learn(self, news: FleetNews) -> None:
        """Record what other groups have reported."""
        with self._recorder.operation("learn", news.described()):
            self._cache.learn(news)

    @property
    def usage(self) -> CacheUsage:
        """Totals of the tree; not recorded."""
        return self._cache.usage

    def owners(self) -> Iterator[OwnerSnapshot]:
        """Yield the public, the tenants and each view with a node, a snapshot or a lock; not recorded."""
        return self._cache.owners()

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        """Yield the nodes in one view, or all nodes; not recorded."""
        return self._cache.dump(view)
