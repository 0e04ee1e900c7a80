"""Interface of prefix caches to the scheduler; all caches in this folder implement it.

References: the page allocator counts one reference per page and holder. A running row holds one for every page in its
page table: `PageAllocator.try_allocate` returns it for new pages, `PrefixCache.commit` for matched ones, and
`PageAllocator.release` takes it back. The cache holds its own, one per page and node. So a page that a row still refers
to cannot become free, whatever happens in the cache; README.md describes the whole protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from services.scheduler.cache.types import CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.sharing.fleet import FleetNews, FleetReport
    from services.scheduler.cache.state_snapshots import StateSnapshots
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import (
        CacheEvent,
        CacheUsage,
        CandidateId,
        Insertion,
        NodeSnapshot,
        OwnerSnapshot,
        PrefixLock,
        PromotionCandidate,
        Scope,
    )


class EventSource(Protocol):
    """Notifies listeners of every change, in order, from within the operation that makes it."""

    @property
    def sequence(self) -> int:
        """Number of the latest event; a dump taken now reflects it."""

    def count(self, kind: CacheEventKind) -> int:
        """Return the number of events of a kind so far."""

    def subscribe(
        self, listener: Callable[[CacheEvent], None], kinds: Iterable[CacheEventKind] = CacheEventKind
    ) -> Callable[[], None]:
        """Call `listener` with every event of `kinds` from now on, until the returned function is called."""


class PrefixCache(Protocol):
    """Matches, keeps and evicts KV pages by the tokens they hold, separately for each view.

    Matching is by whole pages and never covers a whole prompt, as its last token must be computed. The cache reads
    neither a clock nor random numbers: the same calls in the same order give the same tree.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def events(self) -> EventSource:
        """Source of events about changes of the tree."""

    @property
    def host(self) -> HostTier | None:
        """The host memory tier, None if there is none."""

    @property
    def snapshots(self) -> StateSnapshots | None:
        """Snapshots of recurrent states, None if the model has none."""

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could free now, soft-free ones excluded. O(1)."""

    @property
    def protected_pages(self) -> int:
        """Device pages in locked nodes. O(1)."""

    @property
    def soft_free_pages(self) -> int:
        """Device pages that count as free but still hold content that a commit may revive. O(1)."""

    @property
    def held_references(self) -> int:
        """Page references that the cache holds, one per page and node. O(1)."""

    def view_of(self, view: View) -> Scope | None:
        """Return the scope of a view's private nodes, equal for requests that match each other's prefixes.

        None if the cache matches nothing.
        """

    def peek(self, view: View, token_ids: TokenIds) -> int:
        """Count the leading tokens that are cached in a view; changes nothing.

        A multiple of the page size, and at most len(token_ids) - 1.
        """

    def continuation(self, view: View, token_ids: TokenIds, most: int) -> TokenIds:
        """Return up to `most` tokens that followed `token_ids` in cached sequences of a view; changes nothing.

        What it returns, and whether it finds anything, depends only on nodes in the view. [tokens] int32, perhaps none.
        """

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
        """Match, lock and touch the longest cached prefix in a view; called once, when a row is admitted.

        The row gets a reference on each of the lock's pages and releases them with the rest of its table.

        Args:
            view: The view to match in; its subject is credited with the evidence.
            token_ids: [tokens] int32, the row's known ids.
            repeated: A further commit of one request (after a retraction, or of another choice), which counts no new
            hit.
            may_promote: Whether tokens inserted through the lock may be evidence for sharing them.
            priority: The request's priority, used if the eviction order considers it.
            session: The session that the request belongs to, so that the session can be forgotten alone.
        """

    def commit_pages(
        self,
        view: View,
        token_ids: TokenIds,
        *,
        may_promote: bool = True,
        priority: int = 0,
        session: str | None = None,
    ) -> PrefixLock:
        """Do as `commit` for a prompt whose other pages come from another group; it counts no hit.

        The lock also covers pages after which no row can continue, for want of a snapshot or of window pages.
        """

    def commit_nothing(self, view: View) -> PrefixLock:
        """Return a lock for a row that may neither read nor extend the cache; `insert` through it keeps nothing."""

    def insert(self, lock: PrefixLock, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Insert the whole pages of `token_ids` below the lock, which is replaced by one that covers them.

        Args:
            lock: The row's current lock.
            token_ids: [tokens] int32, the row's ids whose KV is computed or planned, from the first on.
            pages: [at least tokens // page_size] int32, the row's page table.
            prompt_tokens: Number of the ids that are the prompt; generated ones are no evidence.
        """

    def release(self, lock: PrefixLock) -> None:
        """Unlock the lock's path. The row must release its page references itself."""

    def evict(self, pages: int) -> int:
        """Free at least `pages` pages of unlocked nodes, or all there are; return the number of freed pages."""

    def flush(self) -> int:
        """Drop everything that is not locked; return the number of pages that became free."""

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Drop all private nodes of a subject, in all of its views, also while its rows run; return the pages freed.

        Its rows continue, but nothing more of them is cached. With `session`, only nodes are dropped that neither
        another session nor a request without a session has used.
        """

    @property
    def epoch(self) -> int:
        """The current epoch, set by the last `advance`."""

    def advance(self, epoch: int) -> None:
        """Start a later epoch: demote, and `share`. Not on the critical path, as it may take milliseconds."""

    def share(self) -> None:
        """Promote what has enough evidence by now, within an epoch. Not on the critical path, as `advance`."""

    def adopt(self, limits: Limits) -> None:
        """Apply other quotas and floors from now on."""

    def pin(self, token_ids: TokenIds) -> int:
        """Make a prompt's whole pages public from the next boundary on; return their tokens."""

    def unpin(self, token_ids: TokenIds) -> bool:
        """Undo `pin`; return whether there was such a pin."""

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        """Return the chains that await a content check, each once."""

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Record the verdict on a candidate: how many of its leading tokens may become public."""

    def forget_verdicts(self) -> None:
        """Drop the content check's verdicts, as its rules have changed; public nodes stay public."""

    def take_report(self) -> FleetReport:
        """Return the evidence, demotions and quarantines that other scheduler groups have to know, each once."""

    def learn(self, news: FleetNews) -> None:
        """Apply what other scheduler groups have reported, from the next boundary on."""

    @property
    def usage(self) -> CacheUsage:
        """Totals of the tree. O(tenants)."""

    def owners(self) -> Iterator[OwnerSnapshot]:
        """Yield the public, the tenants and each view with a node, a snapshot or a lock.

        Consume it before the cache changes.
        """

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        """Yield the nodes in one view, or all nodes: parents before children.

        Consume it before the cache changes.
        """
