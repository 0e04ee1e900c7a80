"""From a checkpoint to one rank's weights, fused and laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from services.worker.engine.kernels.interface import ExpertMatrices, QkNorm
from services.worker.engine.model.feed_forward import DenseFeedForward, MoeFeedForward, Router, SharedFeedForward
from services.worker.engine.model.transformer import DecoderLayer, TransformerWeights
from services.worker.engine.quantization.matrices import above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.kernels.interface import GatedLinear, Kernels, Linear
    from services.worker.engine.model.config import ModelConfig, MoeConfig, SharedExperts
    from services.worker.engine.model.feed_forward import FeedForward
    from services.worker.engine.model.tensors import CheckedTensors
    from services.worker.engine.parallel.shards import ModelShard, Span


@dataclass(frozen=True, slots=True)
class Assembler:
    """Reads a rank's share of one checkpoint, tensor by tensor."""

    tensors: CheckedTensors
    shard: ModelShard
    kernels: Kernels
    dtype: torch.dtype
    """Of the embedding; matrices are converted by `kernels`."""
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return self.tensors.checkpoint.config

    def weights(self, report: Callable[[float], None]) -> TransformerWeights:
        """Read everything; `report` gets the share that is done after each layer."""
        config, vocabulary = self.config, self.shard.vocabulary
        rows = vocabulary.scaled(1)
        embedding = self.tensors.plain("model.embed_tokens.weight", rows)
        head = self.tensors.head("model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight", rows)
        # Head and embedding weigh as much as this many layers; the rest of the bar belongs to the layers.
        units = config.layers + 1
        head_linear = self.kernels.linear(head, None)
        report(1 / units)
        layers = []
        for i in range(config.layers):
            layers.append(self._layer(f"model.layers.{i}", config.moe_of(i)))
            report((i + 2) / units)
        return TransformerWeights(
            # A copy: the checkpoint may have returned a view of the whole file.
            embedding=embedding.to(self.device, self.dtype, copy=True),
            layers=tuple(layers),
            output_norm=self._norm("model.norm.weight"),
            head=head_linear,
        )

    def _layer(self, prefix: str, moe: MoeConfig | None) -> DecoderLayer:
        attention, post_norms = f"{prefix}.self_attn", None
        # In models with post-norms this name belongs to the one after attention.
        feed_forward_norm = f"{prefix}.post_attention_layernorm.weight"
        if self.config.post_norms:
            post_norms = self._norm(feed_forward_norm), self._norm(f"{prefix}.post_feedforward_layernorm.weight")
            feed_forward_norm = f"{prefix}.pre_feedforward_layernorm.weight"
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._qkv(attention),
            qk_norm=self._head_norms(attention),
            attention_output=self._row_parallel(
                f"{attention}.o_proj",
                self.shard.query_heads.scaled(self.config.head_dim),
                self.config.output_bias,
            ),
            feed_forward_norm=self._norm(feed_forward_norm),
            feed_forward=self._dense(f"{prefix}.mlp", self.shard.intermediate)
            if moe is None
            else self._moe(f"{prefix}.mlp", moe),
            post_norms=post_norms,
        )

    def _qkv(self, attention: str) -> Linear:
        config = self.config
        queries, keys = self.shard.query_heads.scaled(config.head_dim), self.shard.kv_heads.scaled(config.head_dim)
        parts = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        matrices = self.tensors.alike([(f"{attention}.{name}.weight", rows, None) for name, rows in parts])
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self.tensors.plain(f"{attention}.{name}.bias")[rows] for name, rows in parts])
        return self.kernels.linear(above(*matrices), bias)

    def _feed_forward(self, mlp: str, moe: MoeConfig | None) -> FeedForward:
        return self._dense(mlp, self.shard.intermediate) if moe is None else self._moe(mlp, moe)

    def _dense(self, mlp: str, columns: Span) -> FeedForward:
        part, has_bias = columns.scaled(1), self.config.mlp_bias
        return DenseFeedForward(self._gate_up(mlp, part), self._row_parallel(f"{mlp}.down_proj", part, has_bias))

    def _moe(self, mlp: str, moe: MoeConfig) -> FeedForward:
        experts = self.kernels.experts(moe.experts, self._experts(mlp, moe.experts), self.config.activation)
        shared = None if moe.shared is None else self._shared(mlp, moe.shared)
        return MoeFeedForward(self._router(f"{mlp}.gate", moe), experts, shared)

    def _router(self, name: str, moe: MoeConfig) -> Router:
        weight, correction = self.tensors.plain(f"{name}.weight"), None
        if moe.has_correction:
            correction = self.tensors.plain(f"{name}.e_score_correction_bias").to(self.device, torch.float32)
        if not moe.routes_in_float32:
            return Router(self.kernels.linear(weight, None), moe, correction)
        wide = weight.to(self.device, torch.float32)
        return Router(lambda inputs: linear(inputs.float(), wide), moe, correction)

    def _shared(self, mlp: str, shared: SharedExperts) -> SharedFeedForward:
        assert self.shard.shared_columns is not None, "every rank has columns of the shared layer"
        gate = (
            self.kernels.linear(self.tensors.plain(f"{mlp}.shared_expert_gate.weight"), None)
            if shared.is_gated
            else None
        )
        return SharedFeedForward(self._dense(f"{mlp}.shared_expert", self.shard.shared_columns), gate)

    def _experts(self, mlp: str, count: int) -> Iterator[ExpertMatrices]:
        """Read one expert after the other, so that only one is held twice."""
        assert self.shard.expert_columns is not None, "every rank has columns of every expert"
        part = self.shard.expert_columns.scaled(1)
        for i in range(count):
            expert = f"{mlp}.experts.{i}"
            yield ExpertMatrices(
                *self.tensors.alike(
                    [
                        (f"{expert}.gate_proj.weight", part, None),
                        (f"{expert}.up_proj.weight", part, None),
                        (f"{expert}.down_proj.weight", None, None if self.shard.world_size == 1 else part),
                    ],
                    together=2,
                )
            )

    def _gate_up(self, mlp: str, rows: slice) -> GatedLinear:
        biases = None
        if self.config.mlp_bias:
            gate_bias, up_bias = (self.tensors.plain(f"{mlp}.{name}_proj.bias")[rows] for name in ("gate", "up"))
            biases = gate_bias, up_bias
        gate, up = self.tensors.alike([(f"{mlp}.{name}_proj.weight", rows, None) for name in ("gate", "up")])
        return self.kernels.gated_linear(gate, up, biases, self.config.activation)

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> Linear:
        """Lay out a matrix of which every rank holds some input columns; their products add up to the result."""
        whole = self.shard.world_size == 1
        weight = self.tensors.matrix(f"{name}.weight", columns=None if whole else columns)
        bias = self.tensors.plain(f"{name}.bias") if has_bias and self.shard.is_first else None
        return self.kernels.linear(weight, bias)

    def _head_norms(self, attention: str) -> QkNorm | None:
        config = self.config
        if not config.qk_norm:
            return None
        return QkNorm(
            query=self._norm(f"{attention}.q_norm.weight"),
            key=self._norm(f"{attention}.k_norm.weight"),
            epsilon=config.norm_epsilon,
        )

    def _norm(self, name: str) -> torch.Tensor:
        offset = self.config.norm_offset
        if offset:
            # In a narrow type, one plus a small number would lose most of the latter.
            return (self.tensors.plain(name).float() + offset).to(self.device)
        return self.tensors.plain(name).to(self.device, self.kernels.activation_dtype, copy=True)
