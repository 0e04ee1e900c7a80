"""Gated delta nets: layers that keep one state per row instead of keys and values of all its tokens.

A head's state S [key_dim, value_dim] takes in one token after the other (Gated DeltaNet, Yang et al. 2024):

    S = exp(g) S;  S = S + k (beta (v - S'k))';  output = S'q

Rows that decode compute just that. Chunks of prompts are computed in blocks of tokens, as products of matrices (section
3.3 there): within a block, the corrections beta (v - S'k) of its tokens solve a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, silu, softplus

from services.worker.engine.quantization.matrices import above, are_alike, reordered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.batch import ForwardBatch, StateChunk
    from services.worker.engine.model.config import RecurrentConfig
    from services.worker.engine.model.tensors import CheckedTensors
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.quantization.matrices import Matrix

# Tokens of a block; products within a block grow with its square.
_BLOCK = 64
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer on this rank, by slot."""

    matrices: torch.Tensor  # [slots, value_heads, key_dim, value_dim] float32
    inputs: torch.Tensor  # [slots, kernel - 1, conv_width], of the activations' type


@dataclass(frozen=True, slots=True)
class StatePool:
    """Recurrent states of a model on this rank: those of each row, then one for padding rows, then snapshots."""

    matrices: torch.Tensor  # [layers, slots, value_heads, key_dim, value_dim] float32
    inputs: torch.Tensor  # [layers, slots, kernel - 1, conv_width]
    rows: int

    @property
    def layers(self) -> tuple[LayerStates, ...]:
        """The states of each recurrent layer, in the order of layers."""
        return tuple(LayerStates(*parts) for parts in zip(self.matrices, self.inputs, strict=True))

    @property
    def snapshots(self) -> int:
        """Number of snapshots."""
        return self.matrices.shape[1] - self.rows - 1

    def place_of(self, snapshot: int) -> int:
        """Return the slot of a snapshot among all of a layer."""
        return self.rows + 1 + snapshot

    def load(self, row: int, snapshot: int) -> None:
        """Let a row continue from a snapshot."""
        self._copy(self.place_of(snapshot), row)

    def save(self, row: int, snapshot: int) -> None:
        """Overwrite a snapshot with a row's states."""
        self._copy(row, self.place_of(snapshot))

    def _copy(self, source: int, target: int) -> None:
        for states in (self.matrices, self.inputs):
            states[:, target].copy_(states[:, source])


def state_bytes(config: RecurrentConfig, key_heads: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row's states over all layers, on a rank with so many key heads."""
    part = config.conv_width // config.key_heads * key_heads
    matrix = key_heads * config.values_per_key * config.key_dim * config.value_dim
    return len(config.layers) * (4 * matrix + dtype.itemsize * (config.kernel - 1) * part)


def allocate_states(
    config: RecurrentConfig, key_heads: int, slots: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> StatePool:
    """Allocate states of a rank with so many key heads, for `slots` rows and snapshots.

    They are zeroed, since padding rows compute with them.
    """
    rows, snapshots = slots
    heads = key_heads * config.values_per_key
    width = config.conv_width // config.key_heads * key_heads
    shape = len(config.layers), rows + 1 + snapshots
    return StatePool(
        torch.zeros(*shape, heads, config.key_dim, config.value_dim, device=device),
        torch.zeros(*shape, config.kernel - 1, width, dtype=dtype, device=device),
        rows,
    )


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One layer's recurrence on this rank, from its input up to the output projection."""

    config: RecurrentConfig
    key_heads: int
    """Of this rank."""
    projection: Callable[[torch.Tensor], torch.Tensor]
    """Makes queries, keys, values, output gates, and for each value head a strength and a decay of the input."""
    filters: torch.Tensor  # [kernel, conv_width] of the activations' type, oldest token first
    decay_scales: torch.Tensor  # [value_heads] float32
    decay_bias: torch.Tensor  # [value_heads] float32
    norm: torch.Tensor  # [value_dim] float32
    epsilon: float

    def __call__(self, inputs: torch.Tensor, states: LayerStates, batch: ForwardBatch) -> torch.Tensor:
        """Advance the states by inputs [tokens, hidden]; return outputs [tokens, value_heads * value_dim]."""
        projected = self.projection(inputs)
        outputs = projected.new_empty(inputs.shape[0], self._values)
        advance = partial(self._advance, states)
        if batch.defer is None:
            advance(projected, outputs, batch)
        else:
            batch.defer(advance, projected, outputs, in_window=False)
        return outputs

    @property
    def _keys(self) -> int:
        return self.key_heads * self.config.key_dim

    @property
    def _value_heads(self) -> int:
        return self.key_heads * self.config.values_per_key

    @property
    def _values(self) -> int:
        return self._value_heads * self.config.value_dim

    def _advance(
        self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, batch: ForwardBatch
    ) -> None:
        slots = batch.states
        assert slots is not None, "the batch of a model with recurrent layers has their slots"
        decoding = batch.decode_rows
        if decoding:
            self._decode(states, projected[:decoding], outputs[:decoding], slots.decoding.long())
        for chunk in slots.chunks:
            part = slice(chunk.start, chunk.stop)
            self._prefill(states, projected[part], outputs[part], chunk)

    def _decode(self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, slots: torch.Tensor) -> None:
        """Take one token of each of the rows in `slots` in."""
        mixed, gates, strengths, decays = self._split(projected)
        window = torch.cat((states.inputs[slots], mixed[:, None]), dim=1)
        states.inputs.index_copy_(0, slots, window[:, 1:])
        queries, keys, values = self._heads(silu((window * self.filters).sum(dim=1)))
        matrices = states.matrices[slots] * decays.exp()[..., None, None]
        known = torch.einsum("rhkv,rhk->rhv", matrices, keys)
        corrections = (values - known) * strengths[..., None]
        matrices = matrices + keys[..., None] * corrections[:, :, None]
        states.matrices.index_copy_(0, slots, matrices)
        self._finish(torch.einsum("rhkv,rhk->rhv", matrices, queries), gates, outputs)

    def _prefill(self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, chunk: StateChunk) -> None:
        """Take consecutive tokens of one row in."""
        mixed, gates, strengths, decays = self._split(projected)
        before, matrix = states.inputs[chunk.slot], states.matrices[chunk.slot]
        if chunk.begins:
            before, matrix = torch.zeros_like(before), torch.zeros_like(matrix)
        window, tokens = torch.cat((before, mixed)), mixed.shape[0]
        convolved = torch.stack([window[i : i + tokens] * each for i, each in enumerate(self.filters)]).sum(dim=0)
        queries, keys, values = self._heads(silu(convolved))
        attended, matrix = delta_rule(queries, keys, values, decays, strengths, matrix)
        states.inputs[chunk.slot].copy_(window[tokens:])
        states.matrices[chunk.slot].copy_(matrix)
        self._finish(attended, gates, outputs)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs of the convolution, gates, and of each value head strength and logarithm of the decay."""
        heads, width = self._value_heads, 2 * self._keys + self._values
        mixed, gates, strengths, decays = torch.split(projected, [width, self._values, heads, heads], dim=1)
        decays = self.decay_scales * softplus(decays.float() + self.decay_bias)
        return mixed, gates, strengths.float().sigmoid(), decays

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [tokens, value_heads, key_dim or value_dim] float32."""
        config, tokens = self.config, convolved.shape[0]
        queries, keys, values = torch.split(convolved.float(), [self._keys, self._keys, self._values], dim=1)
        spread = [
            _normalised(each.view(tokens, self.key_heads, config.key_dim)).repeat_interleave(
                config.values_per_key, dim=1
            )
            for each in (queries, keys)
        ]
        return spread[0] * config.key_dim**-0.5, spread[1], values.view(tokens, -1, config.value_dim)

    def _finish(self, attended: torch.Tensor, gates: torch.Tensor, outputs: torch.Tensor) -> None:
        """Normalise each head of `attended` [tokens, value_heads, value_dim] and multiply it by its gate."""
        means = attended.square().mean(dim=-1, keepdim=True)
        normed = attended * torch.rsqrt(means + self.epsilon) * self.norm
        outputs.copy_(normed.flatten(1) * silu(gates.float()))


def delta_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    strengths: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs of a row's tokens [tokens, heads, value_dim], and its state after them.

    Args:
        queries: [tokens, heads, key_dim] float32, as `keys`.
        keys: Of length 1.
        values: [tokens, heads, value_dim] float32.
        decays: [tokens, heads], logarithms.
        strengths: [tokens, heads], beta.
        state: [heads, key_dim, value_dim] before the tokens; it is not changed.
    """
    tokens, block = queries.shape[0], min(_BLOCK, queries.shape[0])
    missing = -tokens % block
    # Tokens of strength 0 and without decay change nothing. [blocks, heads, block, ...]
    queries, keys, values = (
        pad(each, (0, 0, 0, 0, 0, missing)).reshape(-1, block, *each.shape[1:]).transpose(1, 2)
        for each in (queries, keys, values)
    )
    decays, strengths = (
        pad(each, (0, 0, 0, missing)).reshape(-1, block, each.shape[1]).transpose(1, 2) for each in (decays, strengths)
    )
    since_start = decays.cumsum(dim=-1)
    between = since_start[..., :, None] - since_start[..., None, :]
    is_later = torch.ones(block, block, dtype=torch.bool, device=queries.device).triu(1)
    # Before the exponential, which would overflow there.
    between = between.masked_fill(is_later, -torch.inf).exp()
    scaled = keys * strengths[..., None]
    # Only what lies below the diagonal is read; the diagonal counts as ones.
    system = scaled @ keys.mT * between
    from_start = since_start.exp()[..., None]
    sides = torch.cat((values * strengths[..., None], scaled * from_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    alone, of_state = torch.split(solved, [values.shape[-1], keys.shape[-1]], dim=-1)
    scores = queries @ keys.mT * between
    outputs = []
    for i in range(queries.shape[0]):
        corrections = alone[i] - of_state[i] @ state
        outputs.append((queries[i] * from_start[i]) @ state + scores[i] @ corrections)
        last = since_start[i, :, -1:]
        state = state * last.exp()[..., None] + (keys[i] * (last - since_start[i]).exp()[..., None]).mT @ corrections
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens], state


@dataclass(frozen=True, slots=True)
class RecurrentReader:
    """Reads the gated delta nets of one rank, which has some key heads and their value heads."""

    tensors: CheckedTensors
    kernels: Kernels
    device: torch.device
    heads: Span
    """Key heads."""

    def read(self, name: str) -> GatedDeltaNet:
        """Read the layer whose names begin with `name`, but for its output projection."""
        config = self._config
        values = self._value_heads.scaled(1)
        filters = self.tensors.plain(f"{name}.conv1d.weight").squeeze(1)
        filters = torch.cat([filters[part] for part in self._conv_parts]).t()
        return GatedDeltaNet(
            config,
            len(self.heads),
            projection=self._by_head(name) if config.is_by_head else self._by_kind(name),
            filters=filters.to(self.device, self.kernels.activation_dtype).contiguous(),
            decay_scales=-self._float32(f"{name}.A_log")[values].exp(),
            decay_bias=self._float32(f"{name}.dt_bias")[values],
            norm=self._float32(f"{name}.norm.weight"),
            epsilon=self.tensors.checkpoint.config.norm_epsilon,
        )

    def _by_kind(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        values = self._value_heads
        gates = values.scaled(self._config.value_dim)
        main = self.tensors.alike(
            [
                *((f"{name}.in_proj_qkv.weight", part, None) for part in self._conv_parts),
                (f"{name}.in_proj_z.weight", gates, None),
            ]
        )
        small = self.tensors.alike([(f"{name}.in_proj_{each}.weight", values.scaled(1), None) for each in "ba"])
        return self._product(above(*main), above(*small))

    def _by_head(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        config = self._config
        sizes = (config.key_dim, config.key_dim, *(config.values_per_key * config.value_dim,) * 2)
        main = self.tensors.matrix(f"{name}.in_proj_qkvz.weight", self.heads.scaled(sum(sizes)))
        small = self.tensors.matrix(f"{name}.in_proj_ba.weight", self.heads.scaled(2 * config.values_per_key))
        order = self._by_kind_order(sizes)
        return self._product(
            reordered(main, order), reordered(small, self._by_kind_order((config.values_per_key,) * 2))
        )

    def _by_kind_order(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return the rows of a matrix that has parts of `sizes` for each head, one kind of parts after the other."""
        by_head = torch.arange(len(self.heads) * sum(sizes)).view(len(self.heads), -1)
        return torch.cat([part.flatten() for part in torch.split(by_head, list(sizes), dim=1)])

    def _product(self, main: Matrix, small: Matrix) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return one product where it can be: quantised checkpoints leave the small matrix as it was."""
        if are_alike((main, small)):
            return self.kernels.linear(above(main, small), None)
        products = [self.kernels.linear(matrix, None) for matrix in (main, small)]
        return lambda inputs: torch.cat([product(inputs) for product in products], dim=1)

    @property
    def _config(self) -> RecurrentConfig:
        config = self.tensors.checkpoint.config.recurrent
        assert config is not None, "the model has recurrent layers"
        return config

    @property
    def _value_heads(self) -> Span:
        each = self._config.values_per_key
        return replace(self.heads, start=self.heads.start * each, stop=self.heads.stop * each)

    @property
    def _conv_parts(self) -> tuple[slice, ...]:
        """This rank's queries, keys and values among those of all ranks."""
        config = self._config
        keys, values = self.heads.scaled(config.key_dim), self._value_heads.scaled(config.value_dim)
        width = config.key_heads * config.key_dim
        return (
            keys,
            slice(width + keys.start, width + keys.stop),
            slice(2 * width + values.start, 2 * width + values.stop),
        )

    def _float32(self, name: str) -> torch.Tensor:
        return self.tensors.plain(name).to(self.device, torch.float32, copy=True)


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + _EPSILON)
