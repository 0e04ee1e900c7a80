"""The parts of a rank's host tier, as they fit its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.engine.host_tier.sliced_transfers import SlicedTransfers
from services.worker.engine.host_tier.stream_transfers import StreamTransfers

if TYPE_CHECKING:
    import torch

    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.host_tier.transfers import Transfers
    from services.worker.engine.model.kv_pool import KvPool


def make_transfers(pool: KvPool, host: HostPool, device: torch.device) -> Transfers:
    """Return the transfers between the KV pool and the host tier for this device."""
    return StreamTransfers(pool, host, device) if device.type == "cuda" else SlicedTransfers(pool, host)
