"""A loaded model: the face of this half of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from services.worker.engine.host_tier.sliced_transfers import SlicedTransfers
from services.worker.engine.host_tier.stream_transfers import StreamTransfers

if TYPE_CHECKING:
    from common.steps import EngineCapacity
    from services.worker.engine.adapters.shelf import AdapterShelf
    from services.worker.engine.execution.interface import Transfers
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.decoder import Decoder
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.recurrent import StatePool
    from services.worker.engine.parallel.group import RankGroup


class ModelRunner:
    """One rank's weights, KV pool and forward pass.

    All methods belong to one thread. With several ranks, each must make the same calls in the same order.
    """

    def __init__(  # noqa: PLR0913  (all that a rank has loaded)
        self, model: Decoder, pool: KvPool, capacity: EngineCapacity, group: RankGroup,
        *, can_overlap: bool = False, host_pool: HostPool | None = None, head: PoolerHead | None = None,
        adapters: AdapterShelf | None = None,
    ) -> None:  # fmt: skip
        """Take over the loaded model, its pools and its group."""
        # None: the model has no slots for adapters.
        self.adapters = adapters
        self.capacity = capacity
        self.device = torch.device(capacity.device)
        # Whether passes may be captured: nothing of the model waits for the device, and there is a page for padding.
        self.can_overlap = can_overlap
        # The model's classification head.
        self.head = head
        self._model = model
        self._pool = pool
        self._group = group
        self.host_pool = host_pool
        self.transfers = None if host_pool is None else make_transfers(pool, host_pool, self.device)
        if host_pool is not None:
            self.capacity = replace(capacity, host_pages=host_pool.pages)

    @property
    def states(self) -> StatePool | None:
        """States of recurrent layers, if there are any."""
        return self._pool.states

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass: store KV of all tokens, return logits of the sampled ones.

        Returns:
            [samples, vocabulary] float32 on rank 0, in the order of `batch.sample_indices`; [0, vocabulary] elsewhere.
        """
        return self._model.forward(batch, self._pool).float()

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass without waiting for it; return logits as `forward` does, but in the model's own type."""
        return self._model.forward(batch, self._pool)

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass; return the final hidden states of `batch.sample_indices`, [samples, hidden]."""
        return self._model.hidden_states(batch, self._pool)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of hidden states [samples, hidden] as `compute` does; all ranks at the same time.

        `adapters` [samples] int32 are the samples' slots, as in `ForwardBatch.adapters`.
        """
        return self._model.logits(hidden, adapters)

    @torch.inference_mode()
    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `token_ids` on every rank.

        The other ranks pass a tensor of the same shape and type, on `device`; its content is replaced.
        """
        return self._group.broadcast(token_ids)

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank; all ask at the same time, and wait."""
        return bool(self._group.minimum(int(holds)))

    def close(self) -> None:
        """Leave the group and drop weights and pools."""
        if self.transfers is not None:
            self.transfers.close()
        self.transfers = self.host_pool = None
        self._group.close()
        self._model.close()
        del self._model, self._pool


def make_transfers(pool: KvPool, host: HostPool, device: torch.device) -> Transfers:
    """Return the transfers between the KV pool and the host tier for this device."""
    return StreamTransfers(pool, host, device) if device.type == "cuda" else SlicedTransfers(pool, host)
