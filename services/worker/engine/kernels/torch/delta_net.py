"""Gated delta nets in plain torch, on any device.

A head's state S [key_dim, value_dim] takes in one token after the other (Gated DeltaNet, Yang et al. 2024):

    S = exp(g) S;  S = S + k (beta (v - S'k))';  output = S'q

Rows that decode compute just that. Chunks of prompts are computed in blocks of tokens, as products of matrices (section
3.3 there): within a block, the corrections beta (v - S'k) of its tokens solve a triangular system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, silu, softplus

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import DeltaNetConstants, LayerStates
    from services.worker.engine.model.batch import StateChunk, StateSlots

# Tokens of a block; products within a block grow with its square.
BLOCK = 64
# Of the lengths by which queries and keys are divided.
EPSILON = 1e-6


class TorchDeltaNet:
    """One layer's recurrence on this rank."""

    def __init__(self, constants: DeltaNetConstants) -> None:
        """Compute with `constants`, which are on the device."""
        self._constants = constants

    def advance(self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, slots: StateSlots) -> None:
        """Advance states by the tokens of a batch; see `DeltaNet`."""
        decoding = slots.decoding.shape[0]
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
        queries, keys, values = self._heads(silu((window * self._constants.filters).sum(dim=1)))
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
        convolved = torch.stack([window[i : i + tokens] * each for i, each in enumerate(self._constants.filters)])
        queries, keys, values = self._heads(silu(convolved.sum(dim=0)))
        attended, matrix = delta_rule(queries, keys, values, decays, strengths, matrix)
        states.inputs[chunk.slot].copy_(window[tokens:])
        states.matrices[chunk.slot].copy_(matrix)
        self._finish(attended, gates, outputs)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs of the convolution, gates, and of each value head strength and logarithm of the decay."""
        of = self._constants
        widths = [of.filters.shape[1], of.values, of.value_heads, of.value_heads]
        mixed, gates, strengths, decays = torch.split(projected, widths, dim=1)
        decays = of.decay_scales * softplus(decays.float() + of.decay_bias)
        return mixed, gates, strengths.float().sigmoid(), decays

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, [tokens, value_heads, key_dim or value_dim] float32."""
        of, tokens = self._constants, convolved.shape[0]
        queries, keys, values = torch.split(convolved.float(), [of.keys, of.keys, of.values], dim=1)
        spread = [
            _normalised(each.view(tokens, of.key_heads, of.key_dim)).repeat_interleave(of.values_per_key, dim=1)
            for each in (queries, keys)
        ]
        return spread[0] * of.key_dim**-0.5, spread[1], values.view(tokens, -1, of.value_dim)

    def _finish(self, attended: torch.Tensor, gates: torch.Tensor, outputs: torch.Tensor) -> None:
        """Normalise each head of `attended` [tokens, value_heads, value_dim] and multiply it by its gate."""
        means = attended.square().mean(dim=-1, keepdim=True)
        normed = attended * torch.rsqrt(means + self._constants.epsilon) * self._constants.norm
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
    tokens, block = queries.shape[0], min(BLOCK, queries.shape[0])
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


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + EPSILON)
