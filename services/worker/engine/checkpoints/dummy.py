"""Random weights, for performance work on any config.json."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig

# A prime, so that rows of a matrix never repeat each other exactly and no two logits tie.
_PERIOD = 1_048_573
_DEVIATION = 0.02


class DummyCheckpoint:
    """Weights that depend on the seed, the tensor's name and an element's place, but not on who reads which part.

    A block of `_PERIOD` normal values is repeated, which keeps reading 8 billion of them a matter of seconds.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | None = None) -> None:
        """Make weights for `config`, the same on any device, where they are spread out."""
        self.config = config
        self.identity = f"dummy-{seed}"
        self._seed = seed
        self._device = device

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Return a tensor or a block of a matrix; see `Checkpoint.read`."""
        shape = tensor_shape(name, self.config)
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        values = self._values(name, shape, rows or slice(0, shape[0]))
        return values if columns is None else values[:, columns].contiguous()

    def _values(self, name: str, shape: tuple[int, ...], rows: slice) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        width = shape[1] if len(shape) > 1 else 1
        block = torch.randn(min(_PERIOD, shape[0] * width), generator=generator).mul_(_DEVIATION).to(self._device)
        start, count = rows.start * width, (rows.stop - rows.start) * width
        offset = start % _PERIOD
        repeated = block.repeat(-(-(offset + count) // len(block)))[offset : offset + count]
        return repeated.reshape(rows.stop - rows.start, *shape[1:])


def tensor_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape that a tensor of `transformers`' Llama family has."""
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "embed_tokens": (config.vocabulary_size, config.hidden_size),
        "lm_head": (config.vocabulary_size, config.hidden_size),
        "q_proj": (queries, config.hidden_size),
        "k_proj": (keys, config.hidden_size),
        "v_proj": (keys, config.hidden_size),
        "o_proj": (config.hidden_size, queries),
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    part, kind = name.split(".")[-2:]
    if part in matrices:
        return matrices[part] if kind == "weight" else matrices[part][:1]
    return (config.head_dim,) if part in ("q_norm", "k_norm") else (config.hidden_size,)
