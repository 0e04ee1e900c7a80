"""Layers of an encoder of pictures in a few calls of the compiled operators.

They are those of a decoder (operators/layers.hpp) but for attention: a window, or a frame, is a row whose tokens see
each other, and its keys and values are kept for one layer only.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from services.worker.engine.kernels.cpu.kernels import CpuGatedLinear, CpuLinear
from services.worker.engine.kernels.cpu.library import (
    ELEMENT_TYPES,
    AttentionArguments,
    LayerArguments,
    LayersArguments,
    StoreArguments,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from services.worker.engine.vision.encoder import GatedLayer

# Of keys and values, as of activations.
_KV: Final = torch.float32


@dataclass(frozen=True, slots=True)
class _Rows:
    """Consecutive tokens that see each other, and the pages where their keys and values are."""

    starts: torch.Tensor  # [rows + 1] int32
    lengths: torch.Tensor  # [rows] int32
    table: torch.Tensor  # [rows, most pages of a row] int32
    slots: torch.Tensor  # [tokens] int64
    pages: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64], page_size: int) -> _Rows:
        """Give every row pages of its own, one after the other."""
        counts = -(-lengths // page_size)
        firsts, starts = np.cumsum(counts) - counts, np.concatenate(([0], np.cumsum(lengths)))
        # Entries after a row's last page are not read.
        table = firsts[:, None] + np.arange(counts.max(initial=0))
        slots = np.arange(starts[-1]) + np.repeat(firsts * page_size - starts[:-1], lengths)
        return cls(
            starts=torch.from_numpy(starts.astype(np.int32)),
            lengths=torch.from_numpy(lengths.astype(np.int32)),
            table=torch.from_numpy(table.astype(np.int32)),
            slots=torch.from_numpy(slots),
            pages=int(counts.sum()),
        )


class FusedEncoderLayers:
    """Layers that follow each other; threads and interpreter meet once for all that attend within the same rows."""

    def __init__(
        self, layers: Sequence[GatedLayer], are_full: Sequence[bool], last_norm: torch.Tensor, heads: int,
        epsilon: float,
    ) -> None:  # fmt: skip
        """Join `layers`, which `can_fuse` accepted; `last_norm` [hidden] normalises the output of the last one.

        Those that `are_full` attend within frames, the others within windows.
        """
        self._kept = (layers, last_norm)  # their memory is what the arguments point at
        self._arguments = (LayerArguments * len(layers))(*map(_layer_arguments, layers))
        self._are_full = are_full
        self._last_norm = last_norm
        self._heads = heads
        self._epsilon = epsilon
        qkv, gate_up = layers[0].qkv, layers[0].gate_up
        assert isinstance(qkv, CpuLinear)
        assert isinstance(gate_up, CpuGatedLinear)
        self._library = qkv.library
        self._weights_type = qkv.element_type
        self._threads = qkv.threads
        self._activation = gate_up.activation
        widths = self._arguments[0]
        self._head_dim = widths.output.inputs // heads
        inputs = max(widths.qkv.inputs, widths.output.inputs, widths.down.inputs)
        self._scratch_width = inputs + widths.qkv.outputs + widths.output.inputs + widths.gate.outputs

    def __call__(
        self, hidden: torch.Tensor, angles: torch.Tensor, windows: NDArray[np.int64], frames: NDArray[np.int64]
    ) -> torch.Tensor:
        """Run the residual stream `hidden` [tokens, hidden] through the layers, in place; return it normalised.

        `angles` [tokens, head_dim / 2] turn queries and keys; `windows` and `frames` are the tokens of each.
        """
        assert hidden.is_contiguous(), "operators take contiguous activations"
        # The smallest pages: rows fill their last ones up.
        tokens, page_size = hidden.shape[0], self._library.lanes
        rows = _Rows.of(windows, page_size), _Rows.of(frames, page_size)
        normed, scratch = torch.empty_like(hidden), hidden.new_empty(tokens, self._scratch_width)
        keys, values = hidden.new_empty(2, max(each.pages for each in rows), self._heads * self._head_dim * page_size)
        turns, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(tokens)
        for layer in self._arguments:
            layer.angles, layer.keys, layer.values = turns.data_ptr(), keys.data_ptr(), values.data_ptr()
        store = StoreArguments(
            positions=positions.data_ptr(),
            epsilon=self._epsilon,
            tokens=tokens,
            query_heads=self._heads,
            kv_heads=self._heads,
            head_dim=self._head_dim,
            page_size=page_size,
            threads=self._threads,
        )
        for is_full, places in groupby(range(len(self._are_full)), self._are_full.__getitem__):
            own, numbers = rows[is_full], list(places)
            arguments = LayersArguments(
                layers=ctypes.pointer(self._arguments[numbers[0]]),
                count=len(numbers),
                hidden=hidden.data_ptr(),
                # All calls but the last normalise for nothing, as layers normalise their own input.
                normed=normed.data_ptr(),
                next_norm=self._last_norm.data_ptr(),
                scratch=scratch.data_ptr(),
                page_tables=(own.table.data_ptr(), None),
                slots=(own.slots.data_ptr(), None),
                table_widths=(own.table.shape[1], 0),
                activation=self._activation,
                store=store,
                attention=self._attention_arguments(own, page_size),
            )
            self._library.layers(ctypes.byref(arguments), self._weights_type, ELEMENT_TYPES[_KV])
        return normed

    def _attention_arguments(self, rows: _Rows, page_size: int) -> AttentionArguments:
        return AttentionArguments(
            query_starts=rows.starts.data_ptr(),
            key_lengths=rows.lengths.data_ptr(),
            query_stride=self._arguments[0].qkv.outputs,
            rows=len(rows.lengths),
            query_heads=self._heads,
            kv_heads=self._heads,
            head_dim=self._head_dim,
            page_size=page_size,
            threads=self._threads,
            window_left=-1,
            sees_all=True,
            scale=self._head_dim**-0.5,
        )


def fuse_encoder_layers(
    layers: Sequence[GatedLayer], full: Sequence[int], last_norm: torch.Tensor, heads: int, epsilon: float
) -> FusedEncoderLayers | None:
    """Return layers of compiled operators as one; None if they are of another kind.

    Those with the numbers `full` attend within frames, the others within windows.
    """
    if not layers or not all(can_fuse(layer, heads) for layer in layers):
        return None
    return FusedEncoderLayers(layers, [number in full for number in range(len(layers))], last_norm, heads, epsilon)


def can_fuse(layer: GatedLayer, heads: int) -> bool:
    """Return whether all products of a layer are compiled operators, which serve heads so wide, too."""
    parts = layer.qkv, layer.attention_output, layer.down
    if not isinstance(layer.gate_up, CpuGatedLinear) or not isinstance(layer.qkv, CpuLinear):
        return False
    library, head_dim = layer.qkv.library, layer.qkv.matrix.arguments.outputs // (3 * heads)
    are_whole = head_dim % library.lanes == 0 and head_dim <= library.max_head_dim
    return are_whole and all(isinstance(part, CpuLinear) for part in parts)


def _layer_arguments(layer: GatedLayer) -> LayerArguments:
    assert isinstance(layer.qkv, CpuLinear)
    assert isinstance(layer.attention_output, CpuLinear)
    assert isinstance(layer.gate_up, CpuGatedLinear)
    assert isinstance(layer.down, CpuLinear)
    return LayerArguments(
        input_norm=layer.attention_norm.data_ptr(),
        feed_forward_norm=layer.feed_forward_norm.data_ptr(),
        qkv=layer.qkv.matrix.arguments,
        output=layer.attention_output.matrix.arguments,
        gate=layer.gate_up.gate.arguments,
        up=layer.gate_up.up.arguments,
        down=layer.down.matrix.arguments,
        window_left=-1,
    )
