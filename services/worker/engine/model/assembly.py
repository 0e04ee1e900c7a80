"""From a checkpoint to one rank's weights, fused and laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.checkpoints.tensor_shapes import block_shape
from services.worker.engine.kernels.interface import ExpertMatrices, HeadNorms
from services.worker.engine.model.feed_forward import DenseFeedForward, MixtureFeedForward
from services.worker.engine.model.transformer import DecoderLayer, TransformerWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.kernels.interface import GatedLinear, Kernels, Linear
    from services.worker.engine.model.config import MixtureConfig
    from services.worker.engine.model.feed_forward import FeedForward
    from services.worker.engine.parallel.shards import ModelShard


@dataclass(frozen=True, slots=True)
class Assembler:
    """Reads a rank's share of one checkpoint, tensor by tensor."""

    checkpoint: Checkpoint
    shard: ModelShard
    kernels: Kernels
    dtype: torch.dtype
    """Of the embedding; matrices are converted by `kernels`."""
    device: torch.device

    def weights(self, report: Callable[[float], None]) -> TransformerWeights:
        """Read everything; `report` gets the share that is done after each layer."""
        config, vocabulary = self.checkpoint.config, self.shard.vocabulary
        rows = vocabulary.scaled(1)
        embedding = self._read("model.embed_tokens.weight", rows)
        head = embedding if config.tied_embeddings else self._read("lm_head.weight", rows)
        # Head and embedding weigh as much as this many layers; the rest of the bar belongs to the layers.
        units = config.layers + 1
        head_linear = self.kernels.linear(head, None)
        report(1 / units)
        layers = []
        for i in range(config.layers):
            layers.append(self._layer(f"model.layers.{i}", config.mixture_of(i)))
            report((i + 2) / units)
        return TransformerWeights(
            # A copy: the checkpoint may have returned a view of the whole file.
            embedding=embedding.to(self.device, self.dtype, copy=True),
            layers=tuple(layers),
            output_norm=self._norm("model.norm.weight"),
            head=head_linear,
        )

    def _layer(self, prefix: str, mixture: MixtureConfig | None) -> DecoderLayer:
        attention, output_norms = f"{prefix}.self_attn", None
        # Where outputs are normalised, too, this name belongs to that of attention.
        feed_forward_norm = f"{prefix}.post_attention_layernorm.weight"
        if self.checkpoint.config.output_norms:
            output_norms = self._norm(feed_forward_norm), self._norm(f"{prefix}.post_feedforward_layernorm.weight")
            feed_forward_norm = f"{prefix}.pre_feedforward_layernorm.weight"
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._qkv(attention),
            head_norms=self._head_norms(attention),
            attention_output=self._row_parallel(
                f"{attention}.o_proj",
                self.shard.query_heads.scaled(self.checkpoint.config.head_dim),
                self.checkpoint.config.output_bias,
            ),
            feed_forward_norm=self._norm(feed_forward_norm),
            feed_forward=self._dense(f"{prefix}.mlp") if mixture is None else self._mixture(f"{prefix}.mlp", mixture),
            output_norms=output_norms,
        )

    def _qkv(self, attention: str) -> Linear:
        config = self.checkpoint.config
        queries, keys = self.shard.query_heads.scaled(config.head_dim), self.shard.kv_heads.scaled(config.head_dim)
        parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        weight = torch.cat([self._read(f"{attention}.{name}.weight", rows) for name, rows in parts])
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self._read(f"{attention}.{name}.bias")[rows] for name, rows in parts])
        return self.kernels.linear(weight, bias)

    def _dense(self, mlp: str) -> FeedForward:
        columns, has_bias = self.shard.intermediate.scaled(1), self.checkpoint.config.mlp_bias
        return DenseFeedForward(self._gate_up(mlp), self._row_parallel(f"{mlp}.down_proj", columns, has_bias))

    def _mixture(self, mlp: str, mixture: MixtureConfig) -> FeedForward:
        router = self.kernels.linear(self._read(f"{mlp}.gate.weight"), None)
        experts = self.kernels.experts(
            mixture.experts, self._experts(mlp, mixture.experts), self.checkpoint.config.activation
        )
        return MixtureFeedForward(router, experts, mixture)

    def _experts(self, mlp: str, count: int) -> Iterator[ExpertMatrices]:
        """Read one expert after the other, so that only one is held twice."""
        assert self.shard.expert_columns is not None, "every rank has columns of every expert"
        part = self.shard.expert_columns.scaled(1)
        for i in range(count):
            expert = f"{mlp}.experts.{i}"
            yield ExpertMatrices(
                gate=self._read(f"{expert}.gate_proj.weight", part),
                up=self._read(f"{expert}.up_proj.weight", part),
                down=self._read(f"{expert}.down_proj.weight", columns=None if self.shard.world_size == 1 else part),
            )

    def _gate_up(self, mlp: str) -> GatedLinear:
        rows = self.shard.intermediate.scaled(1)
        biases = None
        if self.checkpoint.config.mlp_bias:
            biases = (self._read(f"{mlp}.gate_proj.bias")[rows], self._read(f"{mlp}.up_proj.bias")[rows])
        return self.kernels.gated_linear(
            self._read(f"{mlp}.gate_proj.weight", rows),
            self._read(f"{mlp}.up_proj.weight", rows),
            biases,
            self.checkpoint.config.activation,
        )

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> Linear:
        """Lay out a matrix of which every rank holds some input columns; their products add up to the result."""
        whole = self.shard.world_size == 1
        weight = self._read(f"{name}.weight", columns=None if whole else columns)
        bias = self._read(f"{name}.bias") if has_bias and self.shard.is_first else None
        return self.kernels.linear(weight, bias)

    def _head_norms(self, attention: str) -> HeadNorms | None:
        config = self.checkpoint.config
        if not config.head_norms:
            return None
        return HeadNorms(
            query=self._norm(f"{attention}.q_norm.weight"),
            key=self._norm(f"{attention}.k_norm.weight"),
            epsilon=config.norm_epsilon,
        )

    def _norm(self, name: str) -> torch.Tensor:
        offset = self.checkpoint.config.norm_offset
        if offset:
            # In a narrow type, one plus a small number would lose most of the latter.
            return (self._read(name).float() + offset).to(self.device)
        return self._read(name).to(self.device, self.kernels.activation_dtype, copy=True)

    def _read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        # Rows of all ranks are given even where they are all rows: formats check them alike.
        tensor = self.checkpoint.read(name, rows, columns)
        expected = block_shape(name, self.checkpoint.config, rows, columns)
        if tuple(tensor.shape) != expected:
            raise ConfigurationError(
                f"tensor {name!r} has the shape {tuple(tensor.shape)} where the model's configuration says {expected}"
            )
        return tensor
