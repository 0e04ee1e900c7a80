"""The compute interfaces of the engine: matrix products, norms, and attention over paged KV."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from services.worker.engine.model.batch import ForwardBatch, StateSlots
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.matrices import Matrix


class KvLayout(Enum):
    """Layout of a page of one layer in memory; pages are the outermost dimension in each."""

    TOKEN_MAJOR = "token_major"
    """keys and values [pages, page_size, kv_heads, head_dim]."""
    LANES = "lanes"
    """keys [pages, kv_heads, head_dim, page_size], values [pages, kv_heads, page_size, head_dim]: a vector register
    holds one component of successive keys, so that scores need no sum across lanes."""
    HEAD_MAJOR = "head_major"
    """keys and values [pages, kv_heads, page_size, head_dim]: the part of a page that one head reads is contiguous."""


@dataclass(frozen=True, slots=True)
class KvScales:
    """Factors of the numbers that are stored in FP8, of each KV head of one layer on this rank.

    A number is divided by its factor and limited to the range of e4m3, [-448, 448], before it is rounded.
    """

    keys: torch.Tensor  # [kv_heads] float32
    values: torch.Tensor  # [kv_heads] float32


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's part of the KV pool, on this rank."""

    keys: torch.Tensor
    values: torch.Tensor
    """With latent attention a view of `keys`: the first components of each row."""
    is_latent: bool = field(default=False, kw_only=True)
    scales: KvScales | None = field(default=None, kw_only=True)
    """Of keys and values in FP8; None: they are of another type, as they are."""

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The tensors that hold this memory, each once; pages are their outermost dimension."""
        return (self.keys,) if self.is_latent else (self.keys, self.values)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one recurrent layer on this rank, by slot."""

    matrices: torch.Tensor  # [slots, value_heads, key_dim, value_dim] float32
    inputs: torch.Tensor  # [slots, kernel - 1, conv_width], of the activations' type


@dataclass(frozen=True, slots=True)
class DeltaNetConstants:
    """One gated delta net on this rank, but for its projections."""

    filters: torch.Tensor  # [kernel, conv_width] of the activations' type, oldest token first
    decay_scales: torch.Tensor  # [value_heads] float32
    decay_bias: torch.Tensor  # [value_heads] float32
    norm: torch.Tensor  # [value_dim] float32
    epsilon: float
    key_heads: int
    values_per_key: int
    """Value heads of each key head; query and key heads are as many."""
    key_dim: int
    value_dim: int

    @property
    def value_heads(self) -> int:
        """Their number."""
        return self.key_heads * self.values_per_key

    @property
    def keys(self) -> int:
        """Columns of all keys, or queries, of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all values of a token."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norms of single query and key heads before rotation (Qwen3): weights [head_dim], as `rms_norm` takes them."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of an attention back end."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window_left: int | None = None
    """Number of keys before its own position that a query sees; None: all. Keys before all windows of a row's queries
    are masked, so there its page table may name any page of the pool."""
    score_scale: float | None = None
    """Factor of scores before the softmax; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores are bent into (-cap, cap) by a hyperbolic tangent (Gemma 2); None: they are not."""
    latent_dim: int | None = None
    """With latent attention, how many first components of the one KV head's keys are its values, which have no memory
    of their own. The components after them are rotated. None: values are stored beside keys."""
    has_float8_kv: bool = False
    """Whether keys and values are stored in FP8, with scales."""
    is_chunked: bool = False
    """Whether windows are chunks (Llama 4): sequences are cut after every `window_left + 1` tokens, and a query sees
    the keys of its own chunk up to itself."""

    @property
    def scale(self) -> float:
        """Factor of scores before the softmax."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that queries at `positions` see, which may be below 0; there has to be a window."""
        assert self.window_left is not None, "without a window it is 0"
        return positions - (positions % (self.window_left + 1) if self.is_chunked else self.window_left)

    @property
    def query_width(self) -> int:
        """Columns of the queries of one token."""
        return self.query_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys, or of the values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def stored_width(self) -> int:
        """Components that the KV pool keeps of one token."""
        return 2 * self.kv_width if self.latent_dim is None else self.kv_width

    @property
    def value_dim(self) -> int:
        """Components of a value, and of a head's output."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def output_width(self) -> int:
        """Columns of the outputs of one token."""
        return self.query_heads * self.value_dim


class Linear(Protocol):
    """A matrix product with weights that were laid out for it."""

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        """Return inputs [tokens, in] times the weights, [tokens, out], in `outputs` if given, which is contiguous."""
        ...

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add the product [tokens, out] to `sums` in place."""
        ...

    def adds_within(self, tokens: int) -> bool:
        """Whether `add_to` of so many tokens adds where it multiplies, and not after that."""
        ...


class GatedLinear(Protocol):
    """The first half of a gated feed-forward layer."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gated product of inputs @ gate.T and inputs @ up.T, see `Activation`, [tokens, intermediate]."""
        ...

    def halves(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs @ gate.T beside inputs @ up.T before the activation, [tokens, 2 intermediate]."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One expert: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: Matrix
    up: Matrix
    down: Matrix
    _: KW_ONLY
    gate_up_biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """[intermediate] each; all experts have some, or none has."""
    down_bias: torch.Tensor | None = None  # [hidden]


class Experts(Protocol):
    """Gated feed-forward layers of which each token passes through some."""

    def __call__(self, inputs: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs, weighted by the routing weights, [tokens, hidden].

        Args:
            inputs: [tokens, hidden].
            expert_ids: [tokens, chosen] int64, all different within a token but for those of experts elsewhere, see
                `Kernels.experts`.
            routing_weights: [tokens, chosen], of the inputs' type.
        """
        ...


class DeltaNet(Protocol):
    """The recurrence of one layer, from its input projection up to the output projection."""

    def advance(self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, slots: StateSlots) -> None:
        """Advance states by the tokens of a batch, and fill `outputs`.

        Args:
            states: of the layer, changed in place.
            projected: [tokens, queries, keys, values, output gates, and of each value head a strength and a decay].
            outputs: [tokens, values].
            slots: those of the batch's rows, all different but for that of padding.
        """
        ...


class Norms(Protocol):
    """RMS norms of a layer's activations."""

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return inputs [tokens, hidden] / sqrt(mean of squares + epsilon) * weight, in the inputs' type.

        `weight` is of that type, or float32.
        """
        ...

    def add_rms_norm(
        self, sums: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add `added` to `sums`, both [tokens, hidden], in place; return `rms_norm` of the sums."""
        ...


@runtime_checkable
class FollowsNorm(Protocol):
    """A product that has norms of its own, which prepare their result as its inputs."""

    @property
    def norms(self) -> Norms:
        """The norms for what this product takes next, unchanged and whole; the results are those of `Kernels`."""
        ...


@runtime_checkable
class PrecedesProduct(Protocol):
    """A gated product that can prepare its result as the inputs of another product."""

    def preceding(self, product: Linear) -> GatedLinear:
        """Return this product, with results prepared for `product`, which takes them next, unchanged and whole."""
        ...


class Kernels(Norms, Protocol):
    """Everything in a layer but attention.

    Matrices of one gated layer, or of all experts, are all quantised in one format, or none is.
    """

    activation_dtype: torch.dtype

    def linear(self, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        """Lay out a matrix [out, in] and its bias [out]; `weight` may be dropped afterwards."""
        ...

    def wide_linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Lay out a matrix [out, in] whose products are float32, of inputs as wide, whatever the other types are."""
        ...

    def gated_linear(
        self,
        gate: Matrix,
        up: Matrix,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        activation: Activation,
    ) -> GatedLinear:
        """Lay out the matrices [intermediate, in] of a gated layer and their biases [intermediate]."""
        ...

    def experts(
        self, count: int, matrices: Iterator[ExpertMatrices], activation: Activation, *, are_all: bool = True
    ) -> Experts:
        """Lay out `count` experts, taking one at a time.

        Unless these `are_all`, the id `count` stands for any expert on another rank, and adds nothing to the sum.
        """
        ...

    def delta_net(self, constants: DeltaNetConstants) -> DeltaNet:
        """Return the recurrence of a gated delta net."""
        ...


class AttentionBackend(Protocol):
    """Causal attention of new tokens over the KV in their rows' pages."""

    layout: KvLayout

    def store(self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch) -> torch.Tensor:
        """Rotate queries and keys to their positions, store keys and values, return the queries.

        `qkv` [tokens, (query_heads + 2 kv_heads) * head_dim] may be overwritten, and the queries [tokens, query_heads *
        head_dim] may be a view of it. KV of token i goes to slot `batch.write_slots[i]`. With latent attention `qkv` is
        [tokens, (query_heads + 1) * head_dim], without values, and `norms` is None.
        """
        ...

    def attend(
        self, queries: torch.Tensor, layer: KvLayer, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention output [tokens, query_heads * value_dim] of all of `batch`'s tokens.

        `sinks` [query_heads] float32 are scores of one more key of each head, whose value is zero (gpt-oss).
        """
        ...

    def store_and_attend(
        self, qkv: torch.Tensor, layer: KvLayer, norms: QkNorm | None, batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Do both, in one go where that is faster."""
        ...


class KernelBackend(Protocol):
    """A family of kernels that fit together."""

    name: str
    kernels: Kernels

    def prepare(self, most_tokens: int) -> None:
        """Prepare products of up to `most_tokens` tokens with all weights that were laid out, before any pass.

        Products of more tokens may be slower.
        """
        ...

    def attention(self, shape: AttentionShape, rotary: torch.Tensor) -> AttentionBackend:
        """Return the attention for one model shape; `rotary` is `rotary_table`'s."""
        ...
