"""Traffic between the tiers, counted for the state dump and for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler import metrics

if TYPE_CHECKING:
    from services.scheduler.core.costs import CostEstimate
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


def traffic_to_wire(loads: LoadBack) -> scheduler_pb2.HostTierState:
    """Encode the traffic between the tiers, and the cost of loading from the host."""
    message = scheduler_pb2.HostTierState(
        open_transfers=len(loads.host.ledger),
        skipped_load_tokens=loads.skipped_tokens,
        skipped_backup_pages=loads.host.skipped_pages,
        load_cost=_cost_to_wire(loads.costs.estimate()),
    )
    for direction, moved in loads.moved.items():
        message.traffic.add(
            direction=direction.value, transfers=moved.transfers, pages=moved.pages, seconds=moved.seconds
        )
    return message


def _cost_to_wire(estimate: CostEstimate) -> scheduler_pb2.LoadCost:
    return scheduler_pb2.LoadCost(
        prefill_tokens_per_s=estimate.prefill_tokens_per_s,
        load_bytes_per_s=estimate.load_bytes_per_s,
        bytes_per_token=estimate.bytes_per_token,
        load_latency_s=estimate.load_latency_s,
        break_even_tokens=estimate.break_even_tokens,
    )
