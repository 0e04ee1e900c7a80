"""The shape of a decoder, read from a config.json or a GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from common.errors import ConfigurationError

if TYPE_CHECKING:
    from services.worker.engine.quantization.formats import StoredFormat


# Of `Activation.CLAMPED_SWIGLU`.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Activation(Enum):
    """The activation function of the gate of a feed-forward layer, which is multiplied with the other half, up."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    """GELU by its approximation with a hyperbolic tangent."""
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), where the gate is at most 7, and up from -7 to 7."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary position embedding (RoFormer, Su et al. 2021), halves of a head rotated against each other.

    `frequency_divisors` [rotated / 2] stretch single frequencies; empty means none is stretched. `amplitude`
    multiplies rotated queries and keys alike (YaRN, Peng et al. 2023).
    """

    theta: float
    frequency_divisors: tuple[float, ...] = ()
    amplitude: float = 1.0
    rotated: int | None = None
    """So many of a head's first components are rotated; None: all."""
    is_interleaved: bool = False
    """Whether checkpoints have rotated pairs side by side; rows of queries and keys are reordered, see `head_order`."""
    long_divisors: tuple[float, ...] = ()
    """Used instead of `frequency_divisors` where the longest context is beyond `original_context` (LongRoPE)."""
    original_context: int = 0

    def within(self, context: int) -> RotaryConfig:
        """Return the embedding for sequences of up to `context` tokens."""
        if not self.long_divisors:
            return self
        divisors = self.long_divisors if context > self.original_context else self.frequency_divisors
        return replace(self, frequency_divisors=divisors, long_divisors=(), original_context=0)


def no_rotation(head_dim: int) -> RotaryConfig:
    """Return a table of rotations by 0: of layers without positions, or where heads already contain them."""
    return RotaryConfig(1.0, (math.inf,) * (head_dim // 2))


class RouterScores(Enum):
    """The function that makes scores of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    """Of each expert by itself (DeepSeek V3)."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of experts, numbered one after the other; a token's experts all come from the best groups."""

    count: int
    chosen: int
    best: int
    """A group is as good as the sum of so many of its highest scores."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """An ordinary feed-forward layer that every token passes through, beside its experts."""

    intermediate_size: int
    is_gated: bool = False
    """Whether its output is multiplied by the sigmoid of a product with the inputs (Qwen2-MoE)."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A feed-forward layer of many experts, of which each token passes through a few."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    """Columns of one expert."""
    normalizes_routing_weights: bool
    """Whether the shares of a token's experts are scaled to add up to one."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have an ordinary feed-forward layer instead."""
    scores: RouterScores = RouterScores.SOFTMAX
    has_correction: bool = False
    """Whether a bias is added to scores to choose experts, but not to weigh them (DeepSeek V3)."""
    groups: ExpertGroups | None = None
    routing_scale: float = 1.0
    """Factor of the routing weights."""
    has_biases: bool = False
    """Whether the router and all experts have biases."""
    routes_in_float32: bool = False
    """Whether the router's matrix is multiplied in float32."""
    shared: SharedExperts | None = None
    weights_inputs: bool = False
    """Whether routing weights multiply what goes into an expert (Llama 4), not what comes out."""
    is_beside_dense: bool = False
    """Whether layers have an ordinary feed-forward layer, too, and both have norms of their own (Gemma 4)."""
    has_expert_scales: bool = False
    """Whether a token's share of an expert is multiplied by a number of the expert (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class KvHeads:
    """Heads of keys and values."""

    count: int
    dim: int
    """Components of a key."""


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries are multiplied by 1 + weight * ln(1 + floor((position + 1) / step)) (Nakanishi 2025)."""

    step: float
    weight: float


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): one compressed row of each token is kept for all heads.

    The row has a latent vector, from which each head's keys and values are products, and a key that is rotated to its
    position and shared by all heads. Products with keys and values are moved into queries and outputs, so attention
    runs over the rows themselves: one KV head of `rank + rotary_dim` components, whose first `rank` are the values.
    """

    rank: int
    """Components of the latent vector."""
    query_rank: int | None
    """Components of the vector that queries are products of; None: they are products of the layer's input."""
    content_dim: int
    """Components of a head's query that are not rotated."""
    rotary_dim: int
    value_dim: int
    """Components of a head's output."""

    @property
    def row_width(self) -> int:
        """Components of the row that is kept."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Components of a head's query."""
        return self.content_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers with a gated delta net instead of attention (Yang et al. 2024): a row keeps one state, however long it is.

    The state of a layer is a matrix [key_dim, value_dim] for each value head, and the last inputs of a convolution.
    Consecutive value heads share a key head.
    """

    layers: tuple[int, ...]
    """The layers that are such, ascending; the others attend."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution covers, the newest one included."""
    is_by_head: bool = False
    """Whether checkpoints have all projections of a key head side by side, in one matrix (Qwen3-Next)."""

    @property
    def values_per_key(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def conv_width(self) -> int:
        """Components of queries, keys and values of one token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that a forward pass needs to know of a model except its weights."""

    family: str
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    """Components of a key; with `latent`, those of a row of the KV pool."""
    max_context: int
    norm_epsilon: float
    rotary: RotaryConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised (Qwen3)."""
    bare_qk_norm: bool = False
    """Whether those of layers that are rotated are normalised without weights (Llama 4)."""
    value_norm: bool = False
    """Whether each head's values are normalised, without weights (Gemma 4)."""
    projection_norm: bool = False
    """Whether all queries of a token are normalised together, and all of its keys (OLMo 2)."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    windows: tuple[int | None, ...] = ()
    """[layers], how many tokens a query sees in each layer, itself included; None: all of them. Empty: all None."""
    has_chunks: bool = False
    """Whether windows are chunks: see `AttentionShape.is_chunked`."""
    unrotated: tuple[int, ...] = ()
    """Layers without rotary embedding (NoPE, Kazemnejad et al. 2023)."""
    temperature: QueryTemperature | None = None
    """Of queries in layers without rotary embedding."""
    local_rotary: RotaryConfig | None = None
    """Rotary embedding of layers with a window, where it differs from that of the others."""
    local_heads: KvHeads | None = None
    """Those of layers with a window, where others have `kv_heads` of `head_dim` (Gemma 4); None: all have these."""
    keys_are_values: bool = False
    """Whether layers without a window have one product for keys and values (Gemma 4)."""
    attention_scale: float | None = None
    """Factor of scores before the softmax; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores are bent into (-cap, cap) by a hyperbolic tangent."""
    has_sinks: bool = False
    """Whether each head has the score of one more key, whose value is zero (gpt-oss)."""
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and feed-forward layers add to the residual stream."""
    has_layer_scales: bool = False
    """Whether the residual stream is multiplied by a number of each layer after it (Gemma 4)."""
    logits_divisor: float = 1.0
    norm_offset: float = 0.0
    """The offset added to the checkpoint's norm weights."""
    pre_norms: bool = True
    """Whether attention and feed-forward input is normalised."""
    post_norms: bool = False
    """Whether attention and feed-forward output are normalised, too, before they are added to the residual stream."""
    logits_softcap: float | None = None
    """Logits are bent into (-cap, cap) by a hyperbolic tangent."""
    overflows_float16: bool = False
    """Whether activations grow beyond 65,504."""
    moe: MoeConfig | None = None
    labels: int = 0
    """Outputs of the classification head; 0: there is none."""
    gated_attention: bool = False
    """Whether attention's output is multiplied by the sigmoid of another product with the layer's input."""
    recurrent: RecurrentConfig | None = None
    """Gated delta nets in some layers; None: all layers attend."""
    latent: LatentConfig | None = None
    """Multi-head latent attention, for which `kv_heads` is 1; None: every KV head has keys and values."""
    stored_format: StoredFormat | None = None
    """How the checkpoint stores quantised matrices; None: it stores none."""

    def __post_init__(self) -> None:
        """Reject shapes that no code here could run."""
        for heads in filter(None, (KvHeads(self.kv_heads, self.head_dim), self.local_heads)):
            if self.query_heads % heads.count:
                raise ConfigurationError(f"{self.query_heads} query heads cannot share {heads.count} KV heads evenly")
            if heads.dim % 2:
                raise ConfigurationError(f"head_dim {heads.dim} is odd: rotary embedding needs two halves")
        if self.latent is not None:
            assert (self.latent.row_width, 1) == (self.head_dim, self.kv_heads), "attention is over the rows"
            assert not self.windows, "latent attention has no windows"
        if self.recurrent is not None and self.recurrent.value_heads % self.recurrent.key_heads:
            raise ConfigurationError(
                f"{self.recurrent.value_heads} value heads cannot share {self.recurrent.key_heads} key heads evenly"
            )
        if self.windows and len(self.windows) != self.layers:
            raise ConfigurationError(f"{len(self.windows)} layers are said to have a window or none, of {self.layers}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def attention_layers(self) -> int:
        """Layers that attend, and so have keys and values."""
        return self.layers - (len(self.recurrent.layers) if self.recurrent else 0)

    @property
    def output_dim(self) -> int:
        """Components of a head's output, after `latent` ones became values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Components of a head that rotary embedding covers, some of which may turn by 0."""
        return self.latent.rotary_dim if self.latent else self.head_dim

    @property
    def kv_width(self) -> int:
        """Components that are kept of a token in each layer."""
        return self.head_dim if self.latent else 2 * self.kv_heads * self.head_dim

    def is_recurrent(self, layer: int) -> bool:
        """Whether `layer` has a recurrent state instead of keys and values."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query of `layer` sees, itself included; None: all of them."""
        return self.windows[layer] if self.windows else None

    def at(self, layer: int) -> ModelConfig:
        """Return the model with the heads of `layer` in all layers."""
        return self.with_heads(is_local=self.window_of(layer) is not None)

    def with_heads(self, *, is_local: bool) -> ModelConfig:
        """Return the model with the heads of layers with a window, or without one, in all layers."""
        local = self.local_heads
        if local is None:
            return self
        kv_heads, head_dim = (local.count, local.dim) if is_local else (self.kv_heads, self.head_dim)
        return replace(self, kv_heads=kv_heads, head_dim=head_dim, local_heads=None)

    def rotary_of(self, layer: int) -> RotaryConfig:
        """Return the rotary embedding of `layer`."""
        if layer in self.unrotated:
            return no_rotation(self.rotary_dim)
        return self.local_rotary if self.local_rotary and self.window_of(layer) is not None else self.rotary

    def within(self, context: int) -> ModelConfig:
        """Return the model as it computes sequences of up to `context` tokens."""
        local = self.local_rotary and self.local_rotary.within(context)
        return replace(self, rotary=self.rotary.within(context), local_rotary=local)

    def part(self, start: int, stop: int) -> ModelConfig:
        """Return the model that consists of the layers in [start, stop), which are numbered from 0 on."""
        if (start, stop) == (0, self.layers):
            return self

        def within(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(layer - start for layer in layers if start <= layer < stop)

        return replace(
            self,
            layers=stop - start,
            windows=self.windows[start:stop],
            unrotated=within(self.unrotated),
            moe=self.moe and replace(self.moe, dense_layers=within(self.moe.dense_layers)),
            recurrent=self.recurrent and replace(self.recurrent, layers=within(self.recurrent.layers)),
        )

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Return the experts of `layer`; None: it has an ordinary feed-forward layer."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe
