"""Content checks before promotion: candidates are sent out, and verdicts arrive later.

Verdicts apply only to the scope that they were requested for: if a tenant's text were allowed at once because another
tenant's equal text had been, this would reveal the other tenant's text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.scheduler.cache.keys import plain_ids, text_tokens
from services.scheduler.cache.types import CandidateId, PromotionCandidate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.types import TokenIds
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.types import Scope


@dataclass(slots=True, eq=False)
class _Review:
    book: _Book
    hashes: Sequence[bytes]
    members: list[Node]
    asked_epoch: int


@dataclass(slots=True, eq=False)
class _Book:
    """Reviews of one scope: pending ones by the hash at the chain's end, and verdicts by chained page hash."""

    asked: dict[bytes, CandidateId] = field(default_factory=dict)
    verdicts: OrderedDict[bytes, bool] = field(default_factory=OrderedDict)


class Reviews:
    """Owns the pending reviews and the verdicts."""

    def __init__(self, config: CacheConfig, page_size: int) -> None:
        self._config = config
        self._page_size = page_size
        self._next = 0
        self._pending: dict[CandidateId, _Review] = {}
        self._books: dict[Scope, _Book] = {}
        self._outgoing: list[PromotionCandidate] = []

    def allowed_pages(self, scope: Scope, hashes: Sequence[bytes], key: bytes, members: list[Node], epoch: int) -> int:
        """Return the number of a chain's leading pages that verdicts allow to be shared; request a review of the rest.

        Args:
            scope: The chain's intended owner: a tenant or the public.
            hashes: The chain's hash at each page.
            key: Its tokens.
            members: Nodes at its end, to be examined again after the verdict.
            epoch: The current epoch.
        """
        book = self._books.setdefault(scope, _Book())
        allowed = 0
        ids = plain_ids(key)
        # Nobody has looked at what images show.
        end = min(len(hashes), text_tokens(ids) // self._page_size)
        for number, chain in enumerate(hashes[:end], 1):
            verdict = book.verdicts.get(chain)
            if verdict:
                allowed = number
            elif verdict is False:
                end = number - 1
                break
        if end <= allowed:
            return allowed
        asked = book.asked.get(hashes[end - 1])
        if asked is not None:
            # The earlier members may have been evicted since.
            self._pending[asked].members = members
        elif len(book.asked) < self._config.profile.remembered_chains:
            review = _Review(book, hashes[:end], members, epoch)
            self._ask(review, ids[: end * self._page_size], scope[0] if scope else "")
        return allowed

    def take(self) -> tuple[PromotionCandidate, ...]:
        """Return the candidates that have not been taken yet."""
        taken, self._outgoing = tuple(self._outgoing), []
        return taken

    def resolve(self, candidate_id: CandidateId, allowed_tokens: int) -> Iterable[Node]:
        """Record a verdict; return the nodes that it concerns. A late or repeated one changes nothing."""
        review = self._pending.pop(candidate_id, None)
        if review is None:
            return ()
        del review.book.asked[review.hashes[-1]]
        pages = min(max(allowed_tokens, 0) // self._page_size, len(review.hashes))
        for chain in review.hashes[:pages]:
            self._remember(review.book, chain, is_allowed=True)
        if pages < len(review.hashes):
            self._remember(review.book, review.hashes[pages], is_allowed=False)
        return review.members

    def expire(self, epoch: int) -> list[Node]:
        """Drop reviews whose verdicts are overdue; return the nodes to be examined again."""
        expired: list[Node] = []
        for candidate_id, review in list(self._pending.items()):
            if epoch - review.asked_epoch > self._config.profile.verdict_epochs:
                del self._pending[candidate_id]
                del review.book.asked[review.hashes[-1]]
                expired.extend(review.members)
        return expired

    def forget_verdicts(self) -> None:
        """Drop all verdicts, as they were given under rules that no longer apply."""
        for book in self._books.values():
            book.verdicts.clear()

    def _ask(self, review: _Review, token_ids: TokenIds, tenant: str) -> None:
        candidate_id = CandidateId(self._next)
        self._next += 1
        self._pending[candidate_id] = review
        review.book.asked[review.hashes[-1]] = candidate_id
        self._outgoing.append(PromotionCandidate(candidate_id, token_ids, tenant))

    def _remember(self, book: _Book, chain: bytes, *, is_allowed: bool) -> None:
        book.verdicts[chain] = is_allowed
        book.verdicts.move_to_end(chain)
        while len(book.verdicts) > self._config.profile.remembered_chains:
            book.verdicts.popitem(last=False)
