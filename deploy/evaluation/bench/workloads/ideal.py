"""Hit rates of an unlimited cache for a workload: per user, and over all users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deploy.evaluation.bench.records import BenchRequest, Segment

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class IdealHit:
    """Tokens of one prompt that were sent before: by its user, by any user, and by enough users to be public."""

    own: int
    shared_by_all: int
    evident: int


@dataclass(frozen=True, slots=True)
class IdealRates:
    """Shares of all prompt tokens that an unlimited cache would find."""

    input_tokens: int
    within: float
    """Found in the user's own earlier requests."""
    across: float
    """Found only in requests of other users."""


class IdealCache:
    """Stores every prefix of whole segments with its users; matches are rounded down to whole pages."""

    def __init__(self, *, keeps_answers: bool, promotion_subjects: int = 3, page_tokens: int = PAGE_TOKENS) -> None:
        """`promotion_subjects`: users that are sufficient evidence; `keeps_answers`: answers are stored, too."""
        self._keeps_answers = keeps_answers
        self._promotion_subjects = promotion_subjects
        self._page_tokens = page_tokens
        # By prefix: the known tokens of its last segment, and its users. Most prefixes have a single user.
        self._known: dict[int, tuple[int, str | set[str]]] = {}

    def ask(self, request: BenchRequest) -> IdealHit:
        """Return the hit of a prompt, then store the prompt."""
        user = request.user or f"anonymous-{len(self._known)}"
        segments = request.segments
        found = [0, 0, 0]
        goes_on = [True, True, True]
        chain = 0
        for place, segment in enumerate((*segments, request.answer) if self._keeps_answers else segments):
            if segment is None:
                break
            known, is_own, users = self._learn(hash((chain, segment.key)), segment, user)
            if place < len(segments):
                shared = min(known, segment.tokens)
                for kind, is_seen in enumerate((is_own, users > 0, users >= self._promotion_subjects)):
                    found[kind] += shared if goes_on[kind] and is_seen else 0
                    goes_on[kind] = goes_on[kind] and is_seen and shared == segment.tokens
            chain = hash((chain, segment.key, segment.tokens))
        limit = max(request.input_tokens - 1, 0)
        own, shared_by_all, evident = (min(tokens, limit) // self._page_tokens * self._page_tokens for tokens in found)
        return IdealHit(own, shared_by_all, evident)

    def _learn(self, prefix: int, segment: Segment, user: str) -> tuple[int, bool, int]:
        """Return a segment's known tokens, whether `user` has sent it, and its number of users; then add `user`."""
        tokens, users = self._known.get(prefix, (0, ""))
        count = len(users) if isinstance(users, set) else bool(users)
        is_own = user in users if isinstance(users, set) else user == users
        if isinstance(users, set):
            users.add(user)
        elif not is_own:
            users = {users, user} if users else user
        if not is_own or segment.tokens > tokens:
            self._known[prefix] = max(tokens, segment.tokens), users
        return tokens, is_own, count


def ideal_rates(requests: Iterable[BenchRequest], *, keeps_answers: bool) -> IdealRates:
    """Return the hit rates of an unlimited cache for requests in this order."""
    cache = IdealCache(keeps_answers=keeps_answers)
    total = own = shared_by_all = 0
    for request in requests:
        hit = cache.ask(request)
        total += request.input_tokens
        own += hit.own
        shared_by_all += hit.shared_by_all
    if not total:
        return IdealRates(0, 0.0, 0.0)
    return IdealRates(total, own / total, (shared_by_all - own) / total)
