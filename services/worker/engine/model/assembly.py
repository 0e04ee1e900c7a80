"""From a checkpoint to one rank's weights, fused and laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from services.worker.engine.adapters.active import AdaptedGatedLinear, AdaptedLinear
from services.worker.engine.adapters.sites import Site, SitePart
from services.worker.engine.kernels.composed import PreparedLinear
from services.worker.engine.kernels.interface import ExpertMatrices, QkNorm
from services.worker.engine.model.embedding import PACKED_FROM_BYTES, PackedEmbedding, WideEmbedding
from services.worker.engine.model.feed_forward import (
    DenseFeedForward,
    DividedExperts,
    ExpertsBesideDense,
    MoeFeedForward,
    Router,
    SharedFeedForward,
)
from services.worker.engine.model.latent import LatentReader
from services.worker.engine.model.recurrent import RecurrentReader
from services.worker.engine.model.rotary_config import head_order
from services.worker.engine.model.transformer import (
    DecoderLayer,
    ProjectionNorm,
    TemperedQueries,
    TransformerWeights,
    ValueNorm,
)
from services.worker.engine.parallel.shards import Span
from services.worker.engine.quantization.matrices import above, reordered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.kernels.interface import Experts, GatedLinear, Kernels, Linear
    from services.worker.engine.model.config import ModelConfig, MoeConfig, SharedExperts
    from services.worker.engine.model.embedding import Embedding
    from services.worker.engine.model.feed_forward import FeedForward
    from services.worker.engine.model.recurrent import GatedDeltaNet
    from services.worker.engine.model.tensors import CheckedTensors
    from services.worker.engine.parallel.expert_exchange import ExpertExchange
    from services.worker.engine.parallel.expert_load import ExpertCounts
    from services.worker.engine.parallel.shards import ModelShard


@dataclass(frozen=True, slots=True)
class Assembler:
    """Reads a rank's share of one checkpoint, tensor by tensor."""

    tensors: CheckedTensors
    shard: ModelShard
    kernels: Kernels
    dtype: torch.dtype
    """Of the embedding; matrices are converted by `kernels`."""
    device: torch.device
    has_vocabulary: bool = True
    """Whether the model computes logits of its vocabulary."""
    layers: Span | None = None
    """Those that this rank's stage has, with the embedding if it has the first, and the head if the last; None: all."""
    adapters: AdapterProducts | None = None
    """Changes products for single rows; None: there are no adapters."""
    expert_counts: ExpertCounts | None = None
    """With expert parallelism, the counts of the tokens of each expert."""
    exchange: ExpertExchange | None = None
    """The exchange with ranks of other groups that hold experts; None: this group has all."""
    local_shard: ModelShard | None = None
    """The rank's share of layers with a window, where these have other heads; None: they have not."""
    layer: int | None = None
    """The layer that is read, whose heads `config` has."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        config = self.tensors.checkpoint.config
        return config if self.layer is None else config.at(self.layer)

    def weights(self, report: Callable[[float], None]) -> TransformerWeights:
        """Read everything; `report` gets the share that is done after each layer."""
        config, vocabulary = self.config, self.shard.vocabulary
        rows = vocabulary.scaled(1)
        held = self.layers or Span(0, config.layers)
        is_first, is_last = held.start == 0, held.stop == config.layers
        embedding = head_linear = None
        if is_first:
            embedding = self._embedding("model.embed_tokens.weight", rows)
        if self.has_vocabulary and is_last:
            name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
            product = self.kernels.linear(self.tensors.head(name, rows), None)
            head_linear = self._adapted(product, Site((SitePart("lm_head", rows),)))
        # Head and embedding weigh as much as this many layers; the rest of the bar belongs to the layers.
        units = len(held) + 1
        report(1 / units)
        layers = []
        for i in range(held.start, held.stop):
            layers.append(self._at(i)._layer(i))
            report((i - held.start + 2) / units)
        return TransformerWeights(
            embedding=embedding,
            layers=tuple(layers),
            output_norm=self._norm("model.norm.weight") if is_last else None,
            head=head_linear,
            expert_counts=self.expert_counts,
            exchange=self.exchange,
        )

    def _at(self, layer: int) -> Assembler:
        """Return the reader of one layer."""
        if self.local_shard is None:
            return self
        shard = self.shard if self.config.window_of(layer) is None else self.local_shard
        return replace(self, layer=layer, shard=shard)

    def _embedding(self, name: str, rows: slice) -> Embedding:
        size = (rows.stop - rows.start) * self.config.hidden_size * self.dtype.itemsize
        if self.device.type == "cpu" and size >= PACKED_FROM_BYTES:
            blocks = self.tensors.row_blocks(name, rows)
            if blocks is not None:
                return PackedEmbedding(blocks, self.dtype)
        # A copy: the checkpoint may have returned a view of the whole file.
        return WideEmbedding(self.tensors.plain(name, rows).to(self.device, self.dtype, copy=True))

    def _layer(self, layer: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{layer}"
        attention, post_norms = f"{prefix}.self_attn", None
        # In models with post-norms this name belongs to the one after attention.
        feed_forward_norm = f"{prefix}.post_attention_layernorm.weight"
        if config.post_norms:
            post_norms = self._norm(feed_forward_norm), self._norm(f"{prefix}.post_feedforward_layernorm.weight")
            feed_forward_norm = f"{prefix}.pre_feedforward_layernorm.weight"
        qkv: Callable[[torch.Tensor], torch.Tensor] | GatedDeltaNet
        output, gate, is_recurrent = self._output(layer), None, config.is_recurrent(layer)
        moe = config.moe_of(layer)
        if is_recurrent:
            assert self.shard.state_heads is not None, "every rank has heads of recurrent layers"
            qkv = RecurrentReader(self.tensors, self.kernels, self.device, self.shard.state_heads).read(
                f"{prefix}.linear_attn"
            )
        elif config.gated_attention:
            qkv, gate = self._gated_qkv(attention, head_order(config.rotary, config.head_dim))
        elif config.latent is None:
            values_of = "k_proj" if config.keys_are_values and config.window_of(layer) is None else "v_proj"
            qkv = self._qkv(attention, head_order(config.rotary_of(layer), config.head_dim), values_of)
        else:
            reader = LatentReader(self.tensors, self.kernels, self.device, self.shard.query_heads)
            qkv, values = reader.read(attention)
            output = PreparedLinear(output, values)
        return DecoderLayer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight") if config.pre_norms else None,
            qkv=qkv,
            qk_norm=None if is_recurrent else self._head_norms(attention, layer),
            attention_output=output,
            feed_forward_norm=self._norm(feed_forward_norm) if config.pre_norms else None,
            feed_forward=self._feed_forward(f"{prefix}.mlp", moe),
            sinks=self._sinks(f"{attention}.sinks.weight") if config.has_sinks else None,
            post_norms=post_norms,
            projection_norm=self._projection_norm(attention) if config.projection_norm else None,
            temperature=self._temperature(layer),
            value_norm=self._value_norm() if config.value_norm else None,
            residual_scale=config.residual_scale,
            gate=gate,
            experts=self._experts_beside(f"{prefix}.mlp", moe) if moe is not None and moe.is_beside_dense else None,
            output_scale=self._number(f"{prefix}.layer_scale.weight") if config.has_layer_scales else 1.0,
        )

    def _output(self, layer: int) -> Linear:
        config, prefix = self.config, f"model.layers.{layer}"
        if not config.is_recurrent(layer):
            columns = self.shard.query_heads.scaled(config.output_dim)
            return self._row_parallel(f"{prefix}.self_attn.o_proj", columns, config.output_bias)
        assert config.recurrent is not None, "the layer is recurrent"
        assert self.shard.state_heads is not None, "every rank has heads of recurrent layers"
        width = config.recurrent.values_per_key * config.recurrent.value_dim
        return self._row_parallel(f"{prefix}.linear_attn.out_proj", self.shard.state_heads.scaled(width), False)

    def _gated_qkv(self, attention: str, order: tuple[int, ...] | None) -> tuple[Linear, Linear]:
        """Return the products of queries, keys and values, and of gates, which lie after each head's query."""
        head_dim, keys = self.config.head_dim, self.shard.kv_heads.scaled(self.config.head_dim)
        queries = self.shard.query_heads.scaled(2 * head_dim)
        both, key, value = self.tensors.alike(
            [
                (f"{attention}.{name}_proj.weight", rows, None)
                for name, rows in (("q", queries), ("k", keys), ("v", keys))
            ]
        )
        by_head = torch.arange(both.shape[0]).view(-1, 2 * head_dim)
        of_queries, of_gates = by_head[:, :head_dim].flatten(), by_head[:, head_dim:].flatten()
        matrix = above(reordered(both, of_queries), key, value)
        rows = [of_queries + queries.start, *(torch.arange(keys.start, keys.stop) for _ in range(2))]
        if order is not None:
            rotated = self._rotated_rows(order)
            matrix, rows = reordered(matrix, rotated), _reordered_parts(rows, rotated)
        parts = (SitePart(f"{attention}.{name}_proj", each) for name, each in zip("qkv", rows, strict=True))
        gate_site = Site((SitePart(f"{attention}.q_proj", of_gates + queries.start),), label="gates")
        return (
            self._adapted(self.kernels.linear(matrix, None), Site(tuple(parts))),
            self._adapted(self.kernels.linear(reordered(both, of_gates), None), gate_site),
        )

    def _qkv(self, attention: str, order: tuple[int, ...] | None, values_of: str) -> Linear:
        config = self.config
        queries, keys = self.shard.query_heads.scaled(config.head_dim), self.shard.kv_heads.scaled(config.head_dim)
        parts = (("q_proj", queries), ("k_proj", keys), (values_of, keys))
        matrix = above(*self.tensors.alike([(f"{attention}.{name}.weight", rows, None) for name, rows in parts]))
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self.tensors.plain(f"{attention}.{name}.bias")[rows] for name, rows in parts])
        rows_of = [torch.arange(rows.start, rows.stop) for _, rows in parts]
        if order is not None:
            rotated = self._rotated_rows(order)
            matrix, bias = reordered(matrix, rotated), None if bias is None else bias[rotated]
            rows_of = _reordered_parts(rows_of, rotated)
        site = Site(tuple(SitePart(f"{attention}.{name}", own) for (name, _), own in zip(parts, rows_of, strict=True)))
        return self._adapted(self.kernels.linear(matrix, bias), site)

    def _rotated_rows(self, order: tuple[int, ...]) -> torch.Tensor:
        """Return the order of the rows of queries, keys and values in which each head's are in `order`."""
        head_dim, rotated = len(order), len(self.shard.query_heads) + len(self.shard.kv_heads)
        starts = torch.arange(rotated + len(self.shard.kv_heads))[:, None] * head_dim
        within = torch.arange(head_dim).repeat(starts.shape[0], 1)
        within[:rotated] = torch.tensor(order)
        return (starts + within).flatten()

    def _feed_forward(self, mlp: str, moe: MoeConfig | None) -> FeedForward:
        if moe is None or moe.is_beside_dense:
            return self._dense(mlp, self.shard.intermediate)
        return self._moe(mlp, moe)

    def _dense(self, mlp: str, columns: Span) -> FeedForward:
        part, has_bias = columns.scaled(1), self.config.mlp_bias
        return DenseFeedForward(self._gate_up(mlp, part), self._row_parallel(f"{mlp}.down_proj", part, has_bias))

    def _moe(self, mlp: str, moe: MoeConfig) -> FeedForward:
        experts = self._held_experts(mlp, moe)
        shared = None if moe.shared is None else self._shared(mlp, moe.shared)
        return MoeFeedForward(self._router(f"{mlp}.gate", moe), experts, shared)

    def _experts_beside(self, mlp: str, moe: MoeConfig) -> ExpertsBesideDense:
        # The router's input is divided by the square root of its width.
        router_norm = self._norm(f"{mlp}.gate.input_norm.weight").float() * self.config.hidden_size**-0.5
        return ExpertsBesideDense(
            router_norm=router_norm,
            router=self._router(f"{mlp}.gate", moe),
            experts_norm=self._norm(f"{mlp}.experts_input_norm.weight"),
            experts=self._held_experts(mlp, moe),
            dense_output_norm=self._norm(f"{mlp}.dense_output_norm.weight"),
            experts_output_norm=self._norm(f"{mlp}.experts_output_norm.weight"),
        )

    def _held_experts(self, mlp: str, moe: MoeConfig) -> Experts:
        held, matrices = self.shard.experts, self._experts(mlp, moe)
        assert held is not None, "every rank has columns of experts"
        experts = self.kernels.experts(len(held), matrices, self.config.activation, are_all=len(held) == moe.experts)
        if self.exchange is not None:
            experts = self.exchange.share(experts)
        elif self.expert_counts is not None:
            experts = DividedExperts(experts, held, self.expert_counts.of_next_layer())
        elif self.adapters is not None and self.shard.expert_columns is not None and _has_plain_choices(moe):
            part = self.shard.expert_columns.scaled(1)
            names = [f"{mlp}.experts.{i}" for i in range(moe.experts)]
            sites = [(_gate_up_site(name, part), _down_site(f"{name}.down_proj", part)) for name in names]
            experts = self.adapters.experts(experts, sites, self.config.activation)
        return experts

    def _router(self, name: str, moe: MoeConfig) -> Router:
        weight, correction, scales = self.tensors.plain(f"{name}.weight"), None, None
        if moe.has_correction:
            correction = self.tensors.plain(f"{name}.e_score_correction_bias").to(self.device, torch.float32)
        if moe.has_expert_scales:
            scales = self.tensors.plain(f"{name}.expert_scale.weight").to(self.device, torch.float32)
        if not moe.routes_in_float32:
            bias = self.tensors.plain(f"{name}.bias") if moe.has_biases else None
            return Router(self.kernels.linear(weight, bias), moe, correction, scales)
        return Router(self.kernels.wide_linear(weight), moe, correction, scales)

    def _shared(self, mlp: str, shared: SharedExperts) -> SharedFeedForward:
        assert self.shard.shared_columns is not None, "every rank has columns of the shared layer"
        gate = (
            self.kernels.linear(self.tensors.plain(f"{mlp}.shared_expert_gate.weight"), None)
            if shared.is_gated
            else None
        )
        return SharedFeedForward(self._dense(f"{mlp}.shared_expert", self.shard.shared_columns), gate)

    def _experts(self, mlp: str, moe: MoeConfig) -> Iterator[ExpertMatrices]:
        """Read one expert after the other, so that only one is held twice."""
        columns, held = self.shard.expert_columns, self.shard.experts
        assert columns is not None, "every rank has columns of experts"
        assert held is not None, "every rank has columns of experts"
        part, is_whole = columns.scaled(1), len(columns) == moe.intermediate_size
        for i in range(held.start, held.stop):
            expert = f"{mlp}.experts.{i}"
            matrices = self.tensors.alike(
                [
                    (f"{expert}.gate_proj.weight", part, None),
                    (f"{expert}.up_proj.weight", part, None),
                    (f"{expert}.down_proj.weight", None, None if is_whole else part),
                ],
                together=2,
            )
            if not moe.has_biases:
                yield ExpertMatrices(*matrices)
                continue
            gate, up, down = (self.tensors.plain(f"{expert}.{name}_proj.bias") for name in ("gate", "up", "down"))
            adds_bias = is_whole or self.shard.is_first
            yield ExpertMatrices(
                *matrices, gate_up_biases=(gate[part], up[part]), down_bias=down if adds_bias else None
            )

    def _gate_up(self, mlp: str, rows: slice) -> GatedLinear:
        biases = None
        if self.config.mlp_bias:
            gate_bias, up_bias = (self.tensors.plain(f"{mlp}.{name}_proj.bias")[rows] for name in ("gate", "up"))
            biases = gate_bias, up_bias
        gate, up = self.tensors.alike([(f"{mlp}.{name}_proj.weight", rows, None) for name in ("gate", "up")])
        product = self.kernels.gated_linear(gate, up, biases, self.config.activation)
        if self.adapters is None:
            return product
        return AdaptedGatedLinear(product, _gate_up_site(mlp, rows), self.config.activation, self.adapters)

    def _row_parallel(self, name: str, columns: slice, has_bias: bool) -> Linear:
        """Lay out a matrix of which every rank holds some input columns; their products add up to the result."""
        whole = self.shard.world_size == 1
        weight = self.tensors.matrix(f"{name}.weight", columns=None if whole else columns)
        bias = self.tensors.plain(f"{name}.bias") if has_bias and self.shard.is_first else None
        return self._adapted(self.kernels.linear(weight, bias), _down_site(name, columns))

    def _adapted(self, product: Linear, site: Site) -> Linear:
        return product if self.adapters is None else AdaptedLinear(product, site, self.adapters)

    def _head_norms(self, attention: str, layer: int) -> QkNorm | None:
        config = self.config
        if config.bare_qk_norm and layer not in config.unrotated:
            ones = self._ones(config.head_dim)
            return QkNorm(query=ones, key=ones, epsilon=config.norm_epsilon)
        if not config.qk_norm:
            return None
        order = head_order(config.rotary_of(layer), config.head_dim)
        weights = (self._norm(f"{attention}.{name}.weight") for name in ("q_norm", "k_norm"))
        query, key = (weight if order is None else weight[list(order)] for weight in weights)
        return QkNorm(query=query, key=key, epsilon=config.norm_epsilon)

    def _value_norm(self) -> ValueNorm:
        config, shard = self.config, self.shard
        first = (len(shard.query_heads) + len(shard.kv_heads)) * config.head_dim
        return ValueNorm(first, self._ones(config.head_dim), config.norm_epsilon)

    def _projection_norm(self, attention: str) -> ProjectionNorm:
        config, shard = self.config, self.shard

        def weights(name: str, heads: Span) -> torch.Tensor:
            whole = self.tensors.plain(f"{attention}.{name}.weight")
            return whole[heads.scaled(config.head_dim)].to(self.device, torch.float32)

        return ProjectionNorm(
            weights("q_norm", shard.query_heads),
            weights("k_norm", shard.kv_heads),
            widths=torch.tensor([config.query_heads, config.kv_heads], device=self.device) * float(config.head_dim),
            key_share=1 / shard.ranks_by_kv_head,
            epsilon=config.norm_epsilon,
        )

    def _temperature(self, layer: int) -> TemperedQueries | None:
        config = self.config
        if config.temperature is None or layer not in config.unrotated:
            return None
        return TemperedQueries(len(self.shard.query_heads) * config.head_dim, config.temperature)

    def _sinks(self, name: str) -> torch.Tensor:
        whole = self.tensors.plain(name)
        return whole[self.shard.query_heads.scaled(1)].to(self.device, torch.float32, copy=True)

    def _number(self, name: str) -> float:
        return float(self.tensors.plain(name).item())

    def _ones(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=self.kernels.activation_dtype, device=self.device)

    def _norm(self, name: str) -> torch.Tensor:
        offset = self.config.norm_offset
        if offset:
            # In a narrow type, one plus a small number would lose most of the latter.
            return (self.tensors.plain(name).float() + offset).to(self.device)
        return self.tensors.plain(name).to(self.device, self.kernels.activation_dtype, copy=True)


def _gate_up_site(stem: str, rows: slice) -> Site:
    return Site((SitePart(f"{stem}.gate_proj", rows), SitePart(f"{stem}.up_proj", rows)))


def _down_site(module: str, columns: slice) -> Site:
    """Return the site of a product of which this rank has some input columns."""
    return Site((SitePart(module, slice(None)),), columns)


def _reordered_parts(parts: list[torch.Tensor], order: torch.Tensor) -> list[torch.Tensor]:
    """Return rows of matrices above each other in `order`, which mixes no rows of different matrices."""
    return list(torch.split(torch.cat(parts)[order], [len(part) for part in parts]))


def without_adapters(layer: DecoderLayer) -> DecoderLayer:
    """Return a layer with the base products only."""
    parts = layer.feed_forward
    if isinstance(parts, DenseFeedForward):
        parts = DenseFeedForward(_base(parts.gate_up), _base(parts.down))
    return replace(layer, qkv=_base(layer.qkv), attention_output=_base(layer.attention_output), feed_forward=parts)


def _base(product: Any) -> Any:  # any callable of a layer
    return product.product if isinstance(product, AdaptedLinear | AdaptedGatedLinear) else product


def _has_plain_choices(moe: MoeConfig) -> bool:
    """Whether experts get the tokens as they are: those with several weights each become several, without adapters."""
    return not moe.weights_inputs or moe.experts_per_token == 1
