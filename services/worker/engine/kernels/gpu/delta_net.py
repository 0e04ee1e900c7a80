"""Gated delta nets as Triton programs: three for rows that decode, five for all chunks of prompts of a pass.

Within a chunk, blocks follow one another, but what a block does to itself is computed for all blocks at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from services.worker.engine.kernels.gpu import delta_programs as programs
from services.worker.engine.kernels.torch.delta_net import BLOCK, EPSILON
from services.worker.engine.uploads import to_device

if TYPE_CHECKING:
    from services.worker.engine.kernels.interface import DeltaNetConstants, LayerStates
    from services.worker.engine.model.batch import StateChunk, StateSlots

# Columns that one program convolves: of a block of tokens, and of a single one.
_COLUMNS = 128
_ROW_COLUMNS = 1024
# Factors of matrix units are at least as wide.
_NARROWEST = 16
# Columns of a head's state that one program keeps in registers: for a token of a row, and for a chunk's.
_ROW_VALUE_COLUMNS = 64
_VALUE_COLUMNS = 32
# Lines of a block's system that are inverted by substitution, which takes a step for each.
_SUBBLOCK = BLOCK // 4
_HEADS = 8


class ChunkTables:
    """Where a batch's chunks and their blocks are, as programs read it: made once for all layers of a pass."""

    def __init__(self) -> None:
        """Start without a batch."""
        self._chunks: tuple[StateChunk, ...] = ()
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, chunks: tuple[StateChunk, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [chunks, 5] and [blocks, 5] int32; `delta_programs` says what the columns are."""
        if self._tables is None or chunks is not self._chunks:
            self._chunks, self._tables = chunks, _tables_of(chunks, device)
        return self._tables


class GpuDeltaNet:
    """One layer's recurrence on this rank."""

    def __init__(self, constants: DeltaNetConstants, tables: ChunkTables) -> None:
        """Compute with `constants`, which are on the device; all layers share `tables`."""
        self._constants = constants
        self._tables = tables
        self._sizes = {
            "HEADS": constants.value_heads,
            "PER_KEY": constants.values_per_key,
            "KEY_DIM": constants.key_dim,
            "VALUE_DIM": constants.value_dim,
            "KEY_BLOCK": _block_of(constants.key_dim),
        }
        self._value_block = min(_VALUE_COLUMNS, _block_of(constants.value_dim))
        self._row_value_block = min(_ROW_VALUE_COLUMNS, _block_of(constants.value_dim))

    def advance(self, states: LayerStates, projected: torch.Tensor, outputs: torch.Tensor, slots: StateSlots) -> None:
        """Advance states by the tokens of a batch; see `DeltaNet`."""
        of = self._constants
        convolved = projected.new_empty(projected.shape[0], of.filters.shape[1])
        attended = torch.empty(projected.shape[0], of.values, device=projected.device)
        if slots.decoding.shape[0]:
            self._decode(states, projected, convolved, attended, slots.decoding)
            self._finish(attended, projected, outputs, 0, slots.decoding.shape[0])
        if slots.chunks:
            self._prefill(states, projected, convolved, attended, slots.chunks)
            self._finish(attended, projected, outputs, slots.chunks[0].start, slots.chunks[-1].stop)

    def _decode(
        self, states: LayerStates, projected: torch.Tensor, convolved: torch.Tensor, attended: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:  # fmt: skip
        of, rows, stride = self._constants, slots.shape[0], projected.stride(0)
        kernel, width = of.filters.shape
        programs.filter_tokens[(rows, triton.cdiv(width, _ROW_COLUMNS))](
            projected, states.inputs, of.filters, slots, convolved, stride, width,
            KERNEL=kernel, BLOCK=_ROW_COLUMNS, num_warps=4,
        )  # fmt: skip
        programs.take_tokens[(rows, of.value_heads, triton.cdiv(of.value_dim, self._row_value_block))](
            convolved, projected, states.matrices, slots, of.decay_scales, of.decay_bias, attended, stride,
            **self._sizes, LEAST=EPSILON, VALUE_BLOCK=self._row_value_block, num_warps=4,
        )  # fmt: skip

    def _prefill(
        self, states: LayerStates, projected: torch.Tensor, convolved: torch.Tensor, attended: torch.Tensor,
        chunks: tuple[StateChunk, ...],
    ) -> None:  # fmt: skip
        of, stride, device = self._constants, projected.stride(0), projected.device
        (kernel, width), heads = of.filters.shape, of.value_heads
        chunk_table, block_table = self._tables.of(chunks, device)
        blocks, columns = block_table.shape[0], triton.cdiv(width, _COLUMNS)
        programs.filter_blocks[(blocks, columns)](
            projected, states.inputs, of.filters, block_table, convolved, stride, width,
            KERNEL=kernel, TOKENS=BLOCK, BLOCK=_COLUMNS, num_warps=8,
        )  # fmt: skip
        programs.keep_inputs[(len(chunks), columns)](
            projected, states.inputs, chunk_table, stride, width,
            KERNEL=kernel, LINES=triton.next_power_of_2(kernel - 1), BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
        inverses, scores = torch.empty(2, blocks, heads, BLOCK, BLOCK, device=device)
        factors = torch.empty(blocks, heads, 4, BLOCK, device=device)
        programs.solve_blocks[(blocks, heads)](
            convolved, projected, of.decay_scales, of.decay_bias, block_table, inverses, scores, factors,
            stride, **self._sizes, LEAST=EPSILON, TOKENS=BLOCK, SUBBLOCK=_SUBBLOCK, num_warps=4,
        )  # fmt: skip
        programs.take_blocks[(len(chunks), heads, triton.cdiv(of.value_dim, self._value_block))](
            convolved, states.matrices, chunk_table, inverses, scores, factors, attended,
            **self._sizes, VALUE_BLOCK=self._value_block, TOKENS=BLOCK, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _finish(
        self, attended: torch.Tensor, projected: torch.Tensor, outputs: torch.Tensor, first: int, last: int
    ) -> None:
        of = self._constants
        programs.finish_tokens[(last - first, triton.cdiv(of.value_heads, _HEADS))](
            attended, projected, of.norm, outputs, first, projected.stride(0), of.filters.shape[1], of.epsilon,
            HEADS=of.value_heads, VALUE_DIM=of.value_dim, VALUE_BLOCK=triton.next_power_of_2(of.value_dim),
            HEAD_BLOCK=_HEADS, num_warps=4,
        )  # fmt: skip


def _block_of(columns: int) -> int:
    return max(_NARROWEST, int(triton.next_power_of_2(columns)))


def _tables_of(chunks: tuple[StateChunk, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    of_chunks: list[tuple[int, ...]] = []
    of_blocks: list[tuple[int, ...]] = []
    for chunk in chunks:
        of_chunks.append((chunk.start, chunk.stop - chunk.start, chunk.slot, chunk.begins, len(of_blocks)))
        of_blocks += [
            (first, min(BLOCK, chunk.stop - first), chunk.start, chunk.slot, chunk.begins)
            for first in range(chunk.start, chunk.stop, BLOCK)
        ]
    return to_device(np.array(of_chunks, np.int32), device), to_device(np.array(of_blocks, np.int32), device)
