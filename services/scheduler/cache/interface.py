"""What the scheduler asks of a prefix cache; every cache of this folder keeps to it.

References: the page allocator counts one reference per page and holder. A running row holds one for every page in its
page table: `PageAllocator.try_allocate` hands it out for new pages, `PrefixCache.commit` for matched ones, and
`PageAllocator.release` takes it back. The cache holds its own, one per page and node. So nothing that a row still
names can become free, whatever happens to the cache; README.md tells the whole protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from common.limits import Limits
    from common.steps import PageIds
    from common.types import Subject, TokenIds, View
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import (
        CacheEvent,
        CacheEventKind,
        CacheUsage,
        CandidateId,
        Insertion,
        NodeSnapshot,
        OwnerSnapshot,
        PrefixLock,
        PromotionCandidate,
    )


class EventSource(Protocol):
    """Tells listeners of every change, in order, from within the operation that makes it."""

    @property
    def sequence(self) -> int:
        """Number of the latest event; a dump taken now reflects it."""

    def count(self, kind: CacheEventKind) -> int:
        """Return how many events of a kind there have been."""

    def subscribe(self, listener: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on, until the returned function is called."""


class PrefixCache(Protocol):
    """Finds, keeps and gives up KV pages by the tokens they hold, in each view.

    Matching is by whole pages, and never covers a prompt wholly, as its last token must be computed. Nothing here
    reads a clock or chance: the same calls in the same order give the same tree.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def events(self) -> EventSource:
        """Where changes of the tree are told."""

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if there is one."""

    @property
    def evictable_pages(self) -> int:
        """Device pages that `evict` could make free now, soft-free ones aside. O(1)."""

    @property
    def protected_pages(self) -> int:
        """Device pages in nodes that a lock holds. O(1)."""

    @property
    def soft_free_pages(self) -> int:
        """Device pages that count as free but still hold content which a commit may revive. O(1)."""

    @property
    def held_references(self) -> int:
        """Page references the cache holds, one per page and node. O(1)."""

    def view_of(self, view: View) -> Hashable | None:
        """Return what is equal for requests that find all of each other's prefixes; None: nothing is found."""

    def peek(self, view: View, token_ids: TokenIds) -> int:
        """Return how many leading tokens a view covers; pure.

        A multiple of the page size, and at most len(token_ids) - 1.
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
        """Match, lock and touch the longest prefix in a view; once, when a row is admitted.

        The row gets a reference on each of the lock's pages and gives them back with the rest of its table.

        Args:
            view: What the request may find, and whose evidence it is.
            token_ids: [tokens] int32, the row's known ids.
            repeated: A further commit of one request (after a retraction, or another of its choices): no new hit.
            may_promote: Whether what is inserted through the lock may be evidence that lets others find it.
            priority: The request's priority, where the order of eviction looks at it.
            session: The conversation that the request belongs to, where its user may want it forgotten.
        """

    def commit_nothing(self, view: View) -> PrefixLock:
        """Return a lock for a row that may neither read the cache nor add to it; `insert` through it keeps nothing."""

    def insert(self, lock: PrefixLock, token_ids: TokenIds, pages: PageIds, prompt_tokens: int) -> Insertion:
        """Add the whole pages of `token_ids` below the lock, which it replaces by one that covers them.

        Args:
            lock: The row's current lock.
            token_ids: [tokens] int32, the row's ids whose KV is computed or planned, from its first on.
            pages: [at least tokens // page_size] int32, the row's page table.
            prompt_tokens: How many of the row's ids are its prompt; generated ones are no evidence of publicness.
        """

    def release(self, lock: PrefixLock) -> None:
        """Unlock the lock's path. The row's page references are the row's to release."""

    def evict(self, pages: int) -> int:
        """Free at least so many pages of unlocked nodes, or all there are; return how many became free."""

    def flush(self) -> int:
        """Drop everything that no lock holds; return how many pages became free."""

    def forget(self, subject: Subject, session: str | None = None) -> int:
        """Drop all that is private to a subject, in all of its views, also while its rows run; return the pages freed.

        Its rows go on, and nothing more of them is kept. With `session`, that goes which no other session and no
        request without one has used.
        """

    @property
    def epoch(self) -> int:
        """The epoch that the last `advance` began."""

    def advance(self, epoch: int) -> None:
        """Begin a later epoch: promote, demote, merge. Off the critical path, as it may take milliseconds."""

    def adopt(self, limits: Limits) -> None:
        """Apply other quotas and floors from now on."""

    def pin(self, token_ids: TokenIds) -> int:
        """Make a prompt's whole pages public from the next epoch on; return how many tokens that are."""

    def unpin(self, token_ids: TokenIds) -> bool:
        """Undo `pin`; return whether there was such a pin."""

    def take_candidates(self) -> tuple[PromotionCandidate, ...]:
        """Return the chains that await a content check, once."""

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> None:
        """Take the verdict on a candidate: how many of its leading tokens may become public."""

    def forget_verdicts(self) -> None:
        """Forget the content check's verdicts, as its rules have changed; what is public stays so."""

    @property
    def usage(self) -> CacheUsage:
        """Totals of the tree. O(tenants)."""

    def owners(self) -> Iterator[OwnerSnapshot]:
        """Yield the public, the tenants and each view with a node or a lock; consume it before the cache changes."""

    def dump(self, view: View | None = None) -> Iterator[NodeSnapshot]:
        """Yield the nodes in one view, or all nodes: parents before children.

        To be consumed before the cache changes.
        """
