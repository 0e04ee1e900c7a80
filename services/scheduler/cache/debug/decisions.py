"""What a cache was asked and what it decided, operation by operation; `replay.py` finds where two runs part.

Everything that changes the tree or the pages is recorded. `peek` is not: it is pure, and is asked in every round.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.types import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from common.steps import PageIds
    from common.types import TokenIds
    from services.scheduler.cache.types import CacheEvent, LockId, PrefixLock

# Names to numbers, strings, lists of them and numpy arrays: what the operation was given, or what came of it.
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """One operation. `events` are the changes of nodes that it made, in order, each as `_event` describes it."""

    operation: str
    given: Facts
    outcome: Facts
    events: tuple[Facts, ...] = ()


class Recorder:
    """Gathers what one cache and its allocator do; what the cache itself does with pages follows from its operations.

    Token ids are recorded once per row: an insert brings those that neither its commit nor an earlier insert had.
    """

    def __init__(self, sink: Callable[[Decision], None]) -> None:
        """Give each decision to `sink`, from within the operation."""
        self._sink = sink
        self._depth = 0
        self._events: list[Facts] = []
        self._known: dict[LockId, int] = {}
        self._choices: dict[str, str] = {}
        self._new_choices: Facts = {}

    # --- PageObserver: rows ---

    def allocated(self, count: int, pages: PageIds | None) -> None:
        """Record what a row was given; nothing, if it asked for nothing."""
        if count:
            self._note("allocate", {"count": count}, {"pages": pages})

    def released(self, pages: PageIds, freed: int) -> None:
        """Record what a row gave back."""
        if len(pages):
            self._note("give_back", {"pages": pages.copy()}, {"freed": freed})

    def exchanged(self, old: PageIds, new: PageIds, freed: int) -> None:
        """Record that a row was repointed."""
        self._note("exchange", {"old": old.copy(), "new": new.copy()}, {"freed": freed})

    def restored(self, counts: NDArray[Any]) -> None:
        """Record a repair."""
        self._note("restore", {"counts": counts.copy()}, {})

    def _note(self, operation: str, given: Facts, outcome: Facts) -> None:
        if not self._depth:
            self._sink(Decision(operation, given, outcome))

    # --- the cache ---

    def heard(self, event: CacheEvent) -> None:
        """Take in a change of the tree."""
        self._events.append(_event(event))

    def chose(self, tenant: str, sharing: Sharing) -> None:
        """Take in how far a tenant shares; what has not changed since it was last asked is not recorded again."""
        if self._choices.get(tenant, Sharing.TENANT.value) != sharing.value:
            self._choices[tenant] = self._new_choices[tenant] = sharing.value

    @contextmanager
    def operation(self, name: str, given: Facts) -> Iterator[Facts]:
        """Record an operation of the cache, whose outcome the caller puts into the yielded facts.

        What another operation asks for on its way follows from that one.
        """
        outcome: Facts = {}
        if self._depth:
            yield outcome
            return
        self._depth += 1
        try:
            yield outcome
        finally:
            self._depth -= 1
            events, self._events = tuple(self._events), []
            choices, self._new_choices = self._new_choices, {}
        if choices:
            given = {**given, "sharing": choices}
        self._sink(Decision(name, given, outcome, events))

    def open(self, lock: PrefixLock, tokens: int) -> None:
        """Remember how many of the row's ids have been recorded."""
        self._known[lock.lock_id] = tokens

    def new_ids(self, lock: PrefixLock, token_ids: TokenIds) -> TokenIds:
        """Return the row's ids that have not been recorded."""
        return token_ids[self._known[lock.lock_id] :].copy()

    def replace(self, lock: PrefixLock, renewed: PrefixLock, tokens: int) -> None:
        """Go on with a lock that stands in for another."""
        self._known[renewed.lock_id] = max(self._known.pop(lock.lock_id), tokens)

    def close(self, lock: PrefixLock) -> None:
        """Forget a row."""
        del self._known[lock.lock_id]


def _event(event: CacheEvent) -> Facts:
    """Describe a change by the node's place, size, class and standing after it."""
    facts: Facts = {"kind": event.kind.value, "sequence": event.sequence}
    if (node := event.node) is not None:
        facts.update(
            node=node.node_id,
            parent=node.parent_id,
            edge_tokens=node.edge_tokens,
            depth_tokens=node.depth_tokens,
            owner=node.tenant if node.owner is None else str(node.owner),
            state=node.state.value,
            generation=node.generation,
            creators=node.creators,
            quarantined=node.quarantined,
            quarantined_tenants=node.quarantined_tenants,
        )
    return facts
