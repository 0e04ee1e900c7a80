"""The interface of a decoder, for our implementation and for those of `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from services.worker.engine.kernels.interface import KvLayout
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.expert_exchange import ExpertExchange
    from services.worker.engine.parallel.expert_load import ExpertCounts


class Decoder(Protocol):
    """Computes logits and, on the way, fills the KV pool."""

    @property
    def kv_layout(self) -> KvLayout:
        """Layout of pages in memory."""
        ...

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The tokens that each expert gets; None without expert parallelism."""
        ...

    @property
    def exchange(self) -> ExpertExchange | None:
        """The exchange of tokens with ranks of other groups; None unless groups share experts."""
        ...

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return logits [samples, vocabulary] in the type of the activations on the rank that samples.

        On others they are [0, vocabulary].
        """
        ...

    def hidden_states(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return the final, normalized hidden states of the samples, [samples, hidden]; the same on all ranks."""
        ...

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of hidden states [samples, hidden], as `forward` does; all ranks call it together.

        `adapters` [samples] int32 are the samples' slots, as in `ForwardBatch.adapters`.
        """
        ...

    def close(self) -> None:
        """Free resources outside of this object."""
        ...
