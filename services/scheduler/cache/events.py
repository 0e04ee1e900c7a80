"""The list of those who want to hear of changes in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.cache.interface import CacheEvent, CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.cache.interface import NodeView


class CacheEvents:
    """Numbers the changes of one cache and tells its listeners; without listeners a change costs one addition."""

    def __init__(self) -> None:
        """Start without listeners, before the first change."""
        self._sequence = 0
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

    def emit(self, kind: CacheEventKind, view: Callable[[], NodeView] | None = None) -> None:
        """Count a change; `view` describes its node, and is called only when somebody listens."""
        self._sequence += 1
        if not self._listeners:
            return
        event = CacheEvent(self._sequence, kind, view() if view else None)
        for listener in tuple(self._listeners):
            listener(event)
