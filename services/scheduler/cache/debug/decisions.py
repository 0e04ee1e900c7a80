"""Records the operations of a cache and their outcomes; `replay.py` finds where two runs diverge.

All operations that change the tree or the pages are recorded. `peek` is not: it changes nothing, and is called in every
round.
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

# Names to numbers, strings, lists of them and numpy arrays: the arguments of an operation, or its outcome.
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """One operation. `events` are the changes of nodes that it made, in order, each in the form of `_event`."""

    operation: str
    given: Facts
    outcome: Facts
    events: tuple[Facts, ...] = ()


class DecisionRecorder:
    """Records the operations of one cache and its allocator; the cache's own use of pages follows from its operations.

    Token ids are recorded once per row: an insertion records those that neither its commit nor an earlier insertion
    had.
    """

    def __init__(self, sink: Callable[[Decision], None]) -> None:
        """Pass each decision to `sink`, from within the operation."""
        self._sink = sink
        self._depth = 0
        self._events: list[Facts] = []
        self._known: dict[LockId, int] = {}
        self._choices: dict[str, str] = {}
        self._new_choices: Facts = {}

    # --- PageObserver: rows ---

    def allocated(self, count: int, pages: PageIds | None) -> None:
        """Record an allocation for a row; an empty one is not recorded."""
        if count:
            self._note("allocate", {"count": count}, {"pages": pages})

    def released(self, pages: PageIds, freed: int) -> None:
        """Record the pages that a row released."""
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
        """Add a change of the tree to the current operation."""
        self._events.append(_event(event))

    def chose(self, tenant: str, sharing: Sharing) -> None:
        """Add a tenant's sharing choice to the current operation, unless it is unchanged since the last read."""
        if self._choices.get(tenant, Sharing.TENANT.value) != sharing.value:
            self._choices[tenant] = self._new_choices[tenant] = sharing.value

    @contextmanager
    def operation(self, name: str, given: Facts) -> Iterator[Facts]:
        """Record an operation of the cache, whose outcome the caller puts into the yielded facts.

        Nested operations are not recorded, as they follow from the outer one.
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
        """Continue a row with a lock that replaces another."""
        self._known[renewed.lock_id] = max(self._known.pop(lock.lock_id), tokens)

    def close(self, lock: PrefixLock) -> None:
        """Drop a row."""
        del self._known[lock.lock_id]


def _event(event: CacheEvent) -> Facts:
    """Describe a change by the node's position, size, owner and state after it."""
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
