"""Traffic between the tiers, counted for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler import metrics

if TYPE_CHECKING:
    from services.scheduler.core.load_back import LoadBack, Moved


class TierMeter:
    """Exports one core's tier traffic to Prometheus as increments."""

    def __init__(self, bytes_per_page: int) -> None:
        """Start with nothing exported; a page has `bytes_per_page` bytes on each rank."""
        self._bytes_per_page = bytes_per_page
        self._exported: dict[str, Moved] = {}
        self._skipped_tokens = 0

    def export(self, loads: LoadBack) -> None:
        """Update the Prometheus metrics."""
        for direction, moved in loads.moved.items():
            name = direction.value
            before = self._exported.get(name)
            pages = moved.pages - (before.pages if before else 0)
            metrics.TRANSFERS_TOTAL.labels(name).inc(moved.transfers - (before.transfers if before else 0))
            metrics.TRANSFER_BYTES_TOTAL.labels(name).inc(pages * self._bytes_per_page)
            metrics.TRANSFER_SECONDS_TOTAL.labels(name).inc(moved.seconds - (before.seconds if before else 0.0))
            self._exported[name] = moved
        metrics.TRANSFERS_OPEN.set(len(loads.host.ledger))
        metrics.LOAD_SKIPPED_TOKENS_TOTAL.inc(loads.skipped_tokens - self._skipped_tokens)
        self._skipped_tokens = loads.skipped_tokens
