"""Listeners of changes in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.types import CacheEvent, CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.types import NodeSnapshot


class CacheEvents:
    """Numbers the changes of one cache and notifies its listeners; without listeners a change costs one addition."""

    def __init__(self) -> None:
        self._sequence = 0
        self._counts = dict.fromkeys(CacheEventKind, 0)
        self._listeners: list[Callable[[CacheEvent], None]] = []

    @property
    def sequence(self) -> int:
        """Number of the latest event."""
        return self._sequence

    def subscribe(self, listener: Callable[[CacheEvent], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on, until the returned function is called."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    @property
    def is_heard(self) -> bool:
        """Whether there are listeners; otherwise no snapshots of nodes are needed."""
        return bool(self._listeners)

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
            listener(event)
