"""A model without attention: the logits that follow a token are one line of a table, so any graph can have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from common.steps import EngineCapacity

if TYPE_CHECKING:
    from services.worker.engine.execution.interface import Transfers
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.vision.config import VisionConfig

VOCABULARY = 300
PAGE_SIZE = 4
PAGES = 400


def table(vocabulary: int) -> torch.Tensor:
    """Return [vocabulary, vocabulary] bfloat16: every line the same numbers, all different, in another order."""
    generator = torch.Generator().manual_seed(7)
    values = (torch.arange(vocabulary) - vocabulary // 2) / 16
    return torch.stack([values[torch.randperm(vocabulary, generator=generator)] for _ in range(vocabulary)]).bfloat16()


@dataclass
class MarkovRunner:
    """As `ModelRunner`, for the host's engine and for the GPU's. With `told`, a rank that takes another's tokens."""

    device: torch.device
    told: list[torch.Tensor] | None = None
    # What this rank has told others.
    tells: list[torch.Tensor] = field(default_factory=list)
    host_pool: HostPool | None = None
    transfers: Transfers | None = None
    head: PoolerHead | None = None
    vision_config: VisionConfig | None = None

    def __post_init__(self) -> None:
        self.capacity = EngineCapacity(PAGES, PAGE_SIZE, 64, VOCABULARY, (2,), 8, "markov", str(self.device), 1)
        self._table = table(VOCABULARY).to(self.device)

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        return self.logits(self.hidden_states(batch))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.compute(batch).float()

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.token_ids[batch.sample_indices]

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._table[hidden]
        return logits[:0] if self.told is not None else logits

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.told is None:
            # Whoever captures tells nobody.
            if self.device.type == "cpu":
                self.tells.append(token_ids.clone())
            return token_ids
        told = self.told.pop(0)
        assert (told.shape, told.dtype) == (token_ids.shape, token_ids.dtype), "ranks meet in the same exchange"
        return token_ids.copy_(told)

    def return_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there are no stages before")

    def close(self) -> None:
        pass

    def agree(self, holds: bool) -> bool:
        return holds
