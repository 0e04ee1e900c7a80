"""Listeners of changes in the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.cache.types import CacheEvent, CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.scheduler.cache.types import NodeSnapshot

# Decisions about who may read an entry.
DECISIONS = frozenset({CacheEventKind.PROMOTED, CacheEventKind.DEMOTED, CacheEventKind.QUARANTINED})


class CacheEvents:
    """Numbers the changes of one cache and notifies its listeners; without listeners a change costs one addition."""

    def __init__(self) -> None:
        self._sequence = 0
        self._counts = dict.fromkeys(CacheEventKind, 0)
        self._listeners: list[_Listener] = []

    @property
    def sequence(self) -> int:
        """Number of the latest event."""
        return self._sequence

    def subscribe(
        self, listener: Callable[[CacheEvent], None], kinds: Iterable[CacheEventKind] = CacheEventKind
    ) -> Callable[[], None]:
        """Call `listener` with every event of `kinds` from now on, until the returned function is called."""
        added = _Listener(listener, frozenset(kinds))
        self._listeners.append(added)

        def unsubscribe() -> None:
            if added in self._listeners:
                self._listeners.remove(added)

        return unsubscribe

    def is_heard(self, kind: CacheEventKind) -> bool:
        """Whether there are listeners to a kind; otherwise no snapshots of nodes are needed."""
        return any(kind in listener.kinds for listener in self._listeners)

    def count(self, kind: CacheEventKind) -> int:
        """Return the number of events of a kind so far."""
        return self._counts[kind]

    def emit(self, kind: CacheEventKind, node: NodeSnapshot | None = None) -> None:
        """Count a change of `node`, and notify the listeners."""
        self._sequence += 1
        self._counts[kind] += 1
        if not self._listeners:
            return
        event = CacheEvent(self._sequence, kind, node)
        for listener in tuple(self._listeners):
            if kind in listener.kinds:
                listener.call(event)


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    call: Callable[[CacheEvent], None]
    kinds: frozenset[CacheEventKind]
