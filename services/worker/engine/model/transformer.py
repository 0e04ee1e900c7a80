"""The forward pass of a decoder; `kernels/` has the implementations of its operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from services.worker.engine.kernels.even import evenly
from services.worker.engine.kernels.interface import FollowsNorm, LayerStates
from services.worker.engine.model.feed_forward import DenseFeedForward
from services.worker.engine.model.recurrent import GatedDeltaNet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.kernels.interface import (
        AttentionBackend,
        Kernels,
        KvLayer,
        KvLayout,
        Linear,
        Norms,
        QkNorm,
    )
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.config import ModelConfig, QueryTemperature
    from services.worker.engine.model.embedding import Embedding
    from services.worker.engine.model.feed_forward import ExpertsBesideDense, FeedForward
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.rotary import AxisAngles
    from services.worker.engine.parallel.expert_exchange import ExpertExchange
    from services.worker.engine.parallel.expert_load import ExpertCounts
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.parallel.shards import Span


class LayerStack(Protocol):
    """Consecutive layers that run in one call."""

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Update the residual stream `hidden` [tokens, hidden] in place; return it, normalised for the next layer."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights, on this rank.

    `attention_output` and `feed_forward` give partial sums when ranks share the model. What they add up to is
    normalised by `post_norms` [hidden], where the model has them, and scaled before it joins the residual stream.
    """

    input_norm: torch.Tensor | None  # [hidden]
    qkv: Callable[[torch.Tensor], torch.Tensor] | GatedDeltaNet
    """Makes the input of `AttentionBackend.store` from the layer's; or a recurrence takes the place of attention."""
    qk_norm: QkNorm | None
    attention_output: Linear
    feed_forward_norm: torch.Tensor | None  # [hidden]
    feed_forward: FeedForward
    sinks: torch.Tensor | None = None  # [query_heads] float32, see `AttentionBackend.attend`
    post_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    projection_norm: ProjectionNorm | None = None
    temperature: TemperedQueries | None = None
    value_norm: ValueNorm | None = None
    residual_scale: float = 1.0
    gate: Linear | None = None
    """Attention's output is multiplied by the sigmoid of this product with the layer's input."""
    experts: ExpertsBesideDense | None = None
    output_scale: float = 1.0
    """Factor of the residual stream after the layer."""


@dataclass(frozen=True, slots=True)
class ProjectionNorm:
    """RMS norms over all queries of a token, and over all of its keys, which ranks share (OLMo 2)."""

    queries: torch.Tensor  # [queries of this rank] float32
    keys: torch.Tensor  # [keys of this rank] float32
    widths: torch.Tensor  # [2] float32
    """Numbers of queries and of keys of all ranks."""
    key_share: float
    """Of a rank in the sum over keys: several ranks may hold the same ones."""
    epsilon: float

    def __call__(self, qkv: torch.Tensor, group: RankGroup) -> torch.Tensor:
        """Normalise projections [tokens, queries + keys + values] in place; return them."""
        count = len(self.queries)
        queries, keys = qkv[:, :count].float(), qkv[:, count : count + len(self.keys)].float()
        squares = torch.stack((queries.square().sum(dim=1), keys.square().sum(dim=1) * self.key_share), dim=1)
        means = group.sum(squares) / self.widths
        scales = torch.rsqrt(means + self.epsilon)
        qkv[:, :count] = queries * scales[:, :1] * self.queries
        qkv[:, count : count + len(self.keys)] = keys * scales[:, 1:] * self.keys
        return qkv


@dataclass(frozen=True, slots=True)
class TemperedQueries:
    """Scales queries by their positions, so that attention stays as sharp over many keys."""

    width: int
    """Queries of this rank, times their components."""
    temperature: QueryTemperature

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scale the queries of projections [tokens, queries + keys + values] in place; return all of them."""
        temperature = self.temperature
        steps = torch.floor((positions.float() + 1.0) / temperature.step)
        qkv[:, : self.width] *= (1.0 + temperature.weight * evenly(torch.log1p, steps))[:, None]
        return qkv


@dataclass(frozen=True, slots=True)
class ValueNorm:
    """RMS norm of single value heads."""

    first: int
    """The first column of values in projections."""
    weight: torch.Tensor  # [head_dim]
    epsilon: float

    def __call__(self, qkv: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """Normalise the values of projections [tokens, queries + keys + values] in place; return all of them."""
        values = qkv[:, self.first :]
        heads = values.contiguous().view(-1, self.weight.shape[0])
        values.copy_(kernels.rms_norm(heads, self.weight, self.epsilon).view(values.shape))
        return qkv


@dataclass(frozen=True, slots=True)
class TransformerWeights:
    """All weights on this rank: some rows of embedding and head, and its share of each layer of its stage."""

    embedding: Embedding | None
    """None: an earlier stage has it."""
    layers: Sequence[DecoderLayer]
    output_norm: torch.Tensor | None  # [hidden]
    """None: a later stage has it."""
    head: Linear | None
    """None: the model computes no logits of its vocabulary, or a later stage does."""
    joined: LayerStack | None = None
    """All layers but the last in one call, where the kernels can."""
    expert_counts: ExpertCounts | None = None
    """With expert parallelism, the tokens that each expert gets."""
    exchange: ExpertExchange | None = None
    """With experts that groups share, the exchange of tokens with their ranks."""


class _Norm(NamedTuple):
    """The norm of the residual stream before a product."""

    weight: torch.Tensor | None  # [hidden]
    """None: the residual stream is taken as it is."""
    norms: Norms
    epsilon: float

    def of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden` [tokens, hidden], normalised."""
        return hidden if self.weight is None else self.norms.rms_norm(hidden, self.weight, self.epsilon)

    def of_sum(self, hidden: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Add `added` to `hidden`, both [tokens, hidden], in place; return the sums, normalised."""
        if self.weight is None:
            return hidden.add_(added)
        return self.norms.add_rms_norm(hidden, added, self.weight, self.epsilon)


class _LayerNorms(NamedTuple):
    """The norms within a layer and after it."""

    feed_forward: _Norm
    following: _Norm
    """The next layer's, or the final one."""


class _Change(NamedTuple):
    """The norm and the scale of a part's output before it joins the residual stream."""

    norm: torch.Tensor | None
    scale: float

    @property
    def is_none(self) -> bool:
        return self.norm is None and self.scale == 1.0


class Transformer:
    """The families that have an implementation here; see `Decoder`."""

    def __init__(  # noqa: PLR0913  (all that a pass uses)
        self,
        weights: TransformerWeights,
        config: ModelConfig,
        vocabulary: tuple[Span, ...],
        *,
        kernels: Kernels,
        attention: Sequence[AttentionBackend],
        group: RankGroup,
        adapters: AdapterProducts | None = None,
        angles: AxisAngles | None = None,
    ) -> None:
        """Run `weights`, the share of `group.rank`, with the `attention` of each layer.

        `config` describes the layers of this stage only.

        `vocabulary` [ranks] says which logits each rank computes. `adapters` change products of `weights`.
        """
        self._weights = weights
        self._epsilon = config.norm_epsilon
        self._hidden_size = config.hidden_size
        # Rounded to the activations' type, as the reference rounds it.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=kernels.activation_dtype).item()
        self._logits_divisor = config.logits_divisor
        self._logits_softcap = config.logits_softcap
        self._ends_with_experts = config.moe_of(config.layers - 1) is not None
        self._is_local = [config.window_of(i) is not None for i in range(config.layers)]
        self._vocabulary = vocabulary
        self._kernels = kernels
        self._attention = attention
        self._group = group
        self._adapters = adapters
        # What the next products apply to.
        self._slots: torch.Tensor | None = None
        self._angles = angles
        self._no_norm = self._norm_before(None, None)
        inputs = [self._norm_before(layer.input_norm, layer.qkv) for layer in weights.layers]
        self._first_norm = inputs[0]
        self._norms = [
            _LayerNorms(self._norm_before(layer.feed_forward_norm, _first_product(layer.feed_forward)), following)
            for layer, following in zip(
                weights.layers, (*inputs[1:], self._norm_before(weights.output_norm, None)), strict=True
            )
        ]

    @property
    def kv_layout(self) -> KvLayout:
        """How pages have to lie in memory."""
        return self._attention[0].layout

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The tokens that each expert gets, with expert parallelism."""
        return self._weights.expert_counts

    @property
    def exchange(self) -> ExpertExchange | None:
        """The exchange of tokens with ranks of other groups."""
        return self._weights.exchange

    def close(self) -> None:
        """Do nothing: all that there is goes with the object."""

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return logits [samples, vocabulary] in the type of the activations on the rank that samples.

        On others they are [0, vocabulary].
        """
        return self.logits(self.hidden_states(batch, pool), batch.sampled_adapters)

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of hidden states [samples, hidden], as `forward` does; all ranks call it together.

        Without a vocabulary, one number per sample stands for them: nothing is sampled from it.
        """
        # Those that the pass has used are sorted already.
        if adapters is None or adapters is not self._slots:
            self._use(adapters)
        if not self._group.links.is_last:
            return hidden.new_empty(0, self._vocabulary[-1].stop)
        if self._weights.head is None:
            return hidden[:, :1]
        if hidden.shape[0] == 0:
            return hidden.new_empty(0, self._vocabulary[-1].stop)
        logits = self._group.gather_columns(self._weights.head(hidden), self._vocabulary)
        if self._logits_divisor != 1.0:
            logits = logits / self._logits_divisor
        cap = self._logits_softcap
        return logits if cap is None else evenly(torch.tanh, logits / cap) * cap

    def hidden_states(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Return the final, normalized hidden states of the samples, [samples, hidden]; the same on all ranks.

        A stage that is not the last one sends the hidden states of all tokens on, and returns none.
        """
        self._use(batch.adapters)
        hidden = self._enter(batch)
        if batch.coordinates is not None:
            batch = self._with_angles(batch, batch.coordinates)
        layers = self._weights.layers
        # Sliding-window layers may have pages of their own; they share one object, since kernels plan once per object.
        kinds = (batch, batch.in_window())
        views = [kinds[is_local] for is_local in self._is_local]
        *inner, last = zip(layers, self._attention, self._memories(pool), views, self._norms, strict=True)
        images = batch.images
        deep_layers = 0 if images is None else images.deep_layers
        if self._weights.joined is not None and batch.adapters is None and batch.angles is None and not deep_layers:
            normed = self._weights.joined(hidden, batch, pool)
        else:
            normed = self._first_norm.of(hidden)
            for i, (layer, attention, memory, view, norms) in enumerate(inner):
                if batch.checkpoint is not None:
                    batch.checkpoint()
                attended = self._mix(layer, attention, memory, normed, view)
                if images is not None and i < deep_layers:
                    self._finish_layer(layer, hidden, attended, norms._replace(following=self._no_norm))
                    images.deepen(hidden, i)
                    normed = norms.following.of(hidden)
                else:
                    normed = self._finish_layer(layer, hidden, attended, norms)
        layer, attention, memory, view, norms = last
        if not self._group.links.is_last:
            attended = self._mix(layer, attention, memory, normed, view)
            self._finish_layer(layer, hidden, attended, norms._replace(following=self._no_norm))
            self._leave(hidden, batch)
            return hidden[:0]
        if not isinstance(memory, LayerStates) and batch.sample_indices.shape[0] == 0:
            attention.store(self._project(layer, normed, batch.positions), memory, layer.qk_norm, view)
            return self._without_last(hidden)
        sampled = None if isinstance(memory, LayerStates) else sampled_rows(view)
        if isinstance(memory, LayerStates) or sampled is None:
            attended = self._mix(layer, attention, memory, normed, view)
            normed = self._finish_layer(layer, hidden, attended, norms)
            # A pass that only decodes samples every token.
            return normed if batch.decode_rows == hidden.shape[0] else normed[batch.sample_indices]
        # The last layer's output is needed only at sampled tokens; of the others KV is stored.
        hidden = hidden[batch.sample_indices]
        queries = attention.store(self._project(layer, normed, batch.positions), memory, layer.qk_norm, view)
        attended = attention.attend(queries[batch.sample_indices], memory, sampled, layer.sinks)
        self._use(batch.sampled_adapters)
        attended = _gated(layer, attended, normed[batch.sample_indices])
        return self._finish_layer(layer, hidden, attended, norms)

    def _memories(self, pool: KvPool) -> Iterator[KvLayer | LayerStates]:
        """Yield the part of `pool` that belongs to each layer."""
        kv, states = iter(pool.layers), iter(pool.states.layers if pool.states else ())
        for layer in self._weights.layers:
            yield next(states) if isinstance(layer.qkv, GatedDeltaNet) else next(kv)

    def _mix(
        self,
        layer: DecoderLayer,
        attention: AttentionBackend,
        memory: KvLayer | LayerStates,
        normed: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Return the output of a layer's attention, or of its recurrence, before the last product."""
        if isinstance(memory, LayerStates):
            assert isinstance(layer.qkv, GatedDeltaNet), "only recurrences have states"
            return layer.qkv(normed, memory, batch)
        projected = self._project(layer, normed, batch.positions)
        attended = attention.store_and_attend(projected, memory, layer.qk_norm, batch, layer.sinks)
        return _gated(layer, attended, normed)

    def _use(self, adapters: torch.Tensor | None) -> None:
        """Let the next products be those of tokens with these slots of adapters; see `ForwardBatch.adapters`."""
        self._slots = adapters
        if self._adapters is not None:
            self._adapters.use(adapters)

    def _enter(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the residual stream before this stage's first layer, [tokens, hidden]."""
        links = self._group.links
        if self.exchange is not None:
            self.exchange.begin_pass()
        if links.is_first:
            return self._embed(batch)
        if batch.stage is not None:
            assert batch.stage.entering is not None, "only the first stage has the embedding"
            return batch.stage.entering
        return links.receive((len(batch.token_ids), self._hidden_size), self._kernels.activation_dtype)

    def _leave(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Hand the residual stream after this stage's last layer, [tokens, hidden], to the next stage."""
        if batch.stage is None:
            self._group.links.send(hidden)
            return
        assert batch.stage.leaving is not None, "only the last stage has the head"
        batch.stage.leaving.copy_(hidden)

    def _without_last(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return no hidden states: the last layer's are needed by other groups at most, which share its experts."""
        if self.exchange is not None and self._ends_with_experts:
            self.exchange.skip_last_layer()
        return hidden[:0]

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._look_up(batch.token_ids)
        if self._adapters is not None:
            rows = self._adapters.embed(batch.token_ids, rows)
        if self._embedding_scale != 1.0:
            rows = rows * self._embedding_scale
        if batch.images is not None:
            batch.images.place(rows)
        return rows

    def _with_angles(self, batch: ForwardBatch, coordinates: torch.Tensor) -> ForwardBatch:
        """Return the batch with angles of its own for its tokens."""
        assert self._angles is not None, "positions have one axis"
        numbers = torch.arange(coordinates.shape[1], device=coordinates.device)
        return replace(batch, angles=self._angles(coordinates), positions=numbers)

    def _look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None, "the first stage has it"
        if self._group.world_size == 1:
            return self._weights.embedding.look_up(token_ids).to(self._kernels.activation_dtype)
        mine = self._vocabulary[self._group.rank]
        is_mine = (token_ids >= mine.start) & (token_ids < mine.stop)
        rows = self._weights.embedding.look_up((token_ids - mine.start) * is_mine).to(self._kernels.activation_dtype)
        return self._group.sum(rows * is_mine[:, None])

    def _project(self, layer: DecoderLayer, normed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert not isinstance(layer.qkv, GatedDeltaNet), "it has states instead of keys and values"
        projected = layer.qkv(normed)
        if layer.projection_norm is not None:
            projected = layer.projection_norm(projected, self._group)
        if layer.temperature is not None:
            projected = layer.temperature(projected, positions)
        if layer.value_norm is not None:
            projected = layer.value_norm(projected, self._kernels)
        return projected

    def _norm_before(self, weight: torch.Tensor | None, product: object) -> _Norm:
        """Return the norm [hidden] of what `product` takes."""
        return _Norm(weight, product.norms if isinstance(product, FollowsNorm) else self._kernels, self._epsilon)

    def _normed(self, hidden: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return hidden if norm is None else self._kernels.rms_norm(hidden, norm, self._epsilon)

    def _finish_layer(
        self, layer: DecoderLayer, hidden: torch.Tensor, attended: torch.Tensor, norms: _LayerNorms
    ) -> torch.Tensor:
        """Add the outputs of `layer`'s attention and feed-forward to the residual stream `hidden`, in place.

        Returns it normalised for what follows.
        """
        after_attention, after_feed_forward = layer.post_norms or (None, None)
        scale = layer.residual_scale
        normed = self._add(
            layer.attention_output, attended, hidden, _Change(after_attention, scale), norms.feed_forward
        )
        if layer.experts is not None:
            self._add_both(layer.feed_forward, layer.experts, normed, hidden, after_feed_forward)
        elif layer.output_scale == 1.0:
            return self._add(layer.feed_forward, normed, hidden, _Change(after_feed_forward, scale), norms.following)
        else:
            self._add(layer.feed_forward, normed, hidden, _Change(after_feed_forward, scale), self._no_norm)
        return norms.following.of(hidden.mul_(layer.output_scale))

    def _add_both(
        self, dense: FeedForward, beside: ExpertsBesideDense, normed: torch.Tensor, hidden: torch.Tensor,
        norm: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the outputs of a feed-forward layer and of experts to `hidden`, their sum normalised by `norm`."""
        # One sum after the other: a group may give all of them in the same memory.
        both = self._normed(self._group.sum(dense(normed)), beside.dense_output_norm)
        of_experts = self._group.sum(beside.of_experts(hidden, self._normed))
        both += self._normed(of_experts, beside.experts_output_norm)
        hidden.add_(self._normed(both, norm))

    def _add(
        self, part: Linear | FeedForward, inputs: torch.Tensor, hidden: torch.Tensor, change: _Change, norm: _Norm
    ) -> torch.Tensor:
        """Add `part(inputs)`, changed, to `hidden`; return `hidden` normalised by `norm`."""
        group = self._group
        if change.is_none and group.world_size == 1:
            if norm.weight is not None and not part.adds_within(inputs.shape[0]):
                return norm.of_sum(hidden, part(inputs))
            part.add_to(inputs, hidden)
            return norm.of(hidden)
        joined = group.joined(hidden) if change.is_none and norm.weight is not None else None
        if joined is not None and norm.weight is not None:
            part(inputs, joined.place(hidden))
            return joined.add(hidden, norm.weight, self._epsilon)
        added = group.sum(part(inputs, group.place_for(hidden)))
        if change.norm is not None:
            added = self._kernels.rms_norm(added, change.norm, self._epsilon)
        if change.scale != 1.0:
            added = added * change.scale
        return norm.of_sum(hidden, added)


def _first_product(part: FeedForward) -> object:
    """Return the only product that takes the normalised inputs of a feed-forward layer; None: there are several."""
    return part.gate_up if isinstance(part, DenseFeedForward) else None


def _gated(layer: DecoderLayer, attended: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return attended if layer.gate is None else attended * evenly(torch.sigmoid, layer.gate(inputs))


def sampled_rows(batch: ForwardBatch) -> ForwardBatch | None:
    """Return `batch` with only the sampled tokens, one query per row, or None where that would save nothing.

    On a GPU it would cost a synchronisation, and a prefill there is not bound by one layer.
    """
    if batch.token_ids.device.type != "cpu" or batch.sample_indices.shape[0] == batch.token_ids.shape[0]:
        return None
    last_tokens = batch.query_starts[1:] - 1
    rows = torch.searchsorted(last_tokens, batch.sample_indices)
    if not torch.equal(last_tokens[rows].long(), batch.sample_indices):
        return None  # a row is sampled in its middle: its queries see fewer keys than `key_lengths` says
    samples = rows.shape[0]
    return replace(
        batch,
        token_ids=batch.token_ids[batch.sample_indices],
        positions=batch.positions[batch.sample_indices],
        query_starts=torch.arange(samples + 1, dtype=torch.int32),
        key_lengths=batch.key_lengths[rows],
        page_table=batch.page_table[rows],
        write_slots=batch.write_slots[batch.sample_indices],
        sample_indices=torch.arange(samples),
        decode_rows=samples,
        max_query_length=1,
        # The last tokens of chunks see all keys of their rows.
        blocks=None,
    )
