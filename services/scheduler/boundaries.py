"""When the cache's epochs end, and when it shares what has enough evidence, by the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.settings.scheduler import CacheSettings
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.core.costs import OperationTimes


class Boundaries:
    """Lets a cache pass its boundaries; it reads no clock itself."""

    def __init__(self, settings: CacheSettings, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._settings = settings
        self._clock = clock
        self._cache: PrefixCache | None = None
        self._advance: Callable[[int], None] = lambda _epoch: None
        self._share: Callable[[], None] = lambda: None
        # The boundary of sharing that was passed last.
        self._passed = 0

    @property
    def epoch(self) -> int:
        """The epoch by the clock. The cache is in it once boundaries have passed."""
        return int(self._clock() / self._settings.epoch_seconds)

    def follow(self, cache: PrefixCache, times: OperationTimes) -> None:
        """Begin the present epoch in a new cache; measure each boundary, as they are rare and long."""
        cache.advance(self.epoch)
        self._cache = cache
        self._advance = times.timed("advance", cache.advance, one_in=1)
        self._share = times.timed("share", cache.share, one_in=1)

    def pass_due(self) -> None:
        """Pass a boundary, if it is time; the end of an epoch is one of sharing, too."""
        boundary = int(self._clock() / self._settings.sharing_seconds)
        if self._cache is not None and self.epoch != self._cache.epoch:
            self._advance(self.epoch)
        elif boundary != self._passed:
            self._share()
        self._passed = boundary
