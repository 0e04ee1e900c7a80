"""The same requests of everybody else in two worlds that differ in what some hold or do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from common.types import Sharing
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.types import scope_of
from tests.services.scheduler.cache.driver import Driver, int32

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from common.types import View
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.debug.decisions import Decision, Facts
    from services.scheduler.cache.types import NodeSnapshot
    from tests.services.scheduler.cache.driver import Row

PAGE_SIZE = 2
# No memory pressure: what a principal learns from that is not claimed to be nothing.
CAPACITY = 4_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; `chunks` are the tokens after which its pages go into the cache, `generated` its answer.

    With `stays`, the row runs until the next request of the same user.
    """

    user: View
    ids: tuple[int, ...]
    generated: tuple[int, ...] = ()
    chunk: int = 1_000
    stays: bool = False
    may_promote: bool = True
    may_use_cache: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """Time goes by; without epochs, only until the next boundary of sharing."""

    epochs: int = 1


Deed = Ask | Pass


class World(Driver):
    """Does deeds, and keeps what each user could observe."""

    def __init__(self, name: CacheName, config: CacheConfig, sharing: Mapping[str, Sharing] | None = None) -> None:
        self.allocator = PageAllocator(CAPACITY)
        self.decisions: list[Decision] = []
        chosen = sharing or {}
        choices = SharingChoices(lambda tenant: chosen.get(tenant, Sharing.TENANT))
        cache = make_cache(name, self.allocator, PAGE_SIZE, config, choices=choices)
        self.cache = RecordedCache(cache, self.allocator, self.decisions.append, choices)
        self.running: dict[View, Row] = {}
        self.observed: list[tuple[View, Any]] = []

    def do(self, deeds: Iterable[Deed]) -> World:
        for deed in deeds:
            if isinstance(deed, Pass):
                self.next_epoch(deed.epochs) if deed.epochs else self.cache.share()
            else:
                self.ask(deed)
        return self

    def ask(self, ask: Ask) -> None:
        if ask.user in self.running:
            self.end(self.running.pop(ask.user))
        ids = [*ask.ids, *ask.generated]
        waiting = self.peek(ask.user, list(ask.ids)) if ask.may_use_cache else 0
        row = self.admit(ask.user, ids[: len(ask.ids)], may_use_cache=ask.may_use_cache, **self._options(ask))
        seen: list[Any] = [waiting, row.lock.matched_tokens]
        ends = range(row.lock.matched_tokens + ask.chunk, len(ask.ids), ask.chunk)
        seen += [self._insert(row, end, len(ask.ids)) for end in ends]
        missing = -(-len(ids) // PAGE_SIZE) - len(row.table)
        fresh = self.allocator.try_allocate(missing)
        assert fresh is not None, "there is no memory pressure"
        row.ids, row.table = int32(ids), np.concatenate([row.table, fresh])
        seen.append(self._insert(row, len(ids), len(ask.ids)))
        if ask.may_use_cache:
            # What could be drafted for it at each length.
            known = (int32(ids[:length]) for length in range(len(ids) + 1))
            seen += [tuple(self.cache.continuation(ask.user, start, 9).tolist()) for start in known]
        self.observed.append((ask.user, tuple(seen)))
        if ask.stays:
            self.running[ask.user] = row
        else:
            self.end(row)

    def _options(self, ask: Ask) -> dict[str, Any]:
        return {"may_promote": ask.may_promote} if ask.may_use_cache else {}

    def _insert(self, row: Row, end: int, prompt_tokens: int) -> tuple[Any, ...]:
        insertion = self.insert(row, end, prompt_tokens=prompt_tokens)
        return len(insertion.pages), len(insertion.duplicates), insertion.first_duplicate

    def observations_of(self, users: Container[View]) -> list[tuple[View, Any]]:
        return [seen for seen in self.observed if seen[0] in users]

    # --- what others than one view observe ---

    def observations_but(self, victim: View) -> list[tuple[View, Any]]:
        return [seen for seen in self.observed if seen[0] != victim]

    def log_but(self, victim: View) -> list[Any]:
        """Return the decision log of everybody else: who asked what, and what came of it, but no physical numbers."""
        owners: dict[int, Any] = {}
        lines: list[Any] = []
        for decision in self.decisions:
            given, outcome = decision.given, decision.outcome
            if "view" in given:
                owner = owners[outcome["lock"]] = tuple(given["view"])
            elif decision.operation == "insert":
                owner = owners[outcome["lock"]] = owners.pop(given["lock"])
            elif decision.operation == "release":
                owner = owners.pop(given["lock"])
            elif decision.operation == "advance":
                lines.append(("advance", given["epoch"], public_changes(decision.events)))
                continue
            else:
                continue
            if owner != scope_of(victim):
                lines.append((decision.operation, owner, *_logical(given, outcome)))
        return lines

    def views_of(self, users: Sequence[View]) -> list[dict[tuple[int, ...], Any]]:
        """Return what is in each user's view, page by page."""
        return [pages_of(self.cache.dump(user)) for user in users]


def _logical(given: Facts, outcome: Facts) -> tuple[Any, ...]:
    """Return the parts of a decision that do not number pages, locks or nodes."""
    ids: Any = given.get("token_ids", given.get("new_ids", ()))
    counts = [len(outcome[name]) for name in ("pages", "duplicates", "canonical") if name in outcome]
    return (*map(int, ids), given.get("tokens"), given.get("prompt_tokens"), *counts, outcome.get("first_duplicate"))


def public_changes(events: Sequence[Facts]) -> list[Any]:
    """Return what was shared, demoted or hidden, page by page: it does not matter where nodes are cut."""
    changed = [event for event in events if event["kind"] in ("promoted", "demoted", "quarantined")]
    return sorted(
        (event["kind"], depth, event["generation"], event["quarantined"])
        for event in changed
        for depth in range(event["depth_tokens"], event["depth_tokens"] - event["edge_tokens"], -PAGE_SIZE)
    )


def pages_of(nodes: Iterable[NodeSnapshot]) -> dict[tuple[int, ...], Any]:
    """Return each page's standing by the tokens from the first to its last."""
    above: dict[int, tuple[int, ...]] = {}
    found: dict[tuple[int, ...], Any] = {}
    for node in nodes:
        start = () if node.parent_id is None else above[node.parent_id]
        above[node.node_id] = path = start + tuple(node.token_ids.tolist())
        # How many have computed it is for operators: whoever has, is one of them, whether it was evidence or not.
        standing = (
            node.visibility,
            node.state,
            node.hits,
            node.users,
            node.generation,
            node.quarantined,
        )
        for end in range(len(start) + PAGE_SIZE, len(path) + 1, PAGE_SIZE):
            found[path[:end]] = standing
    return found
