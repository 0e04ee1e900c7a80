"""Decoder layers in a single call of the compiled operators, with the same bits as operator by operator."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from services.worker.engine.kernels.cpu.attention import CpuAttention, page_table_of, scales_of
from services.worker.engine.kernels.cpu.kernels import CpuGatedLinear, CpuLinear
from services.worker.engine.kernels.cpu.library import (
    ELEMENT_TYPES,
    LayerArguments,
    LayersArguments,
)
from services.worker.engine.model.feed_forward import DenseFeedForward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.kernels.interface import AttentionBackend
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.transformer import DecoderLayer


class FusedLayers:
    """Layers that follow each other; threads and interpreter meet once per pass instead of once per operator."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        attention: Sequence[CpuAttention],
        next_norm: torch.Tensor,
        epsilon: float,
    ) -> None:
        """Join `layers`, which `can_fuse` accepted; `next_norm` [hidden] normalises the output of the last one."""
        self._kept = (layers, attention, next_norm)  # their memory is what the arguments point at
        self._arguments = (LayerArguments * len(layers))(*map(_layer_arguments, layers, attention))
        self._first = attention[0]
        self._epsilon = epsilon
        self._next_norm = next_norm
        qkv, feed_forward = layers[0].qkv, layers[0].feed_forward
        assert isinstance(qkv, CpuLinear)
        assert isinstance(feed_forward, DenseFeedForward)
        assert isinstance(feed_forward.gate_up, CpuGatedLinear)
        self._library = qkv.library
        self._weights_type = qkv.element_type
        self._activation = feed_forward.gate_up.activation
        widths = self._arguments[0]
        inputs = max(widths.qkv.inputs, widths.output.inputs, widths.down.inputs)
        self._scratch_width = inputs + widths.qkv.outputs + widths.output.inputs + widths.gate.outputs

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Run the residual stream `hidden` [tokens, hidden] through the layers, in place; return it normalised."""
        assert hidden.is_contiguous(), "operators take contiguous activations"
        for layer, kv in zip(self._arguments, pool.layers, strict=False):  # the pool has more layers than these
            layer.keys, layer.values = kv.keys.data_ptr(), kv.values.data_ptr()
            layer.key_scales, layer.value_scales = scales_of(kv)
        normed, scratch = torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], self._scratch_width)
        kinds = (batch, batch.in_window())
        tables = [page_table_of(kind) for kind in kinds]
        store, attention = self._first.store_arguments(batch), self._first.attention_arguments(batch)
        store.epsilon = self._epsilon
        attention.query_stride = self._arguments[0].qkv.outputs
        count = len(self._arguments)
        arguments = LayersArguments(
            layers=self._arguments,
            hidden=hidden.data_ptr(),
            normed=normed.data_ptr(),
            next_norm=self._next_norm.data_ptr(),
            scratch=scratch.data_ptr(),
            page_tables=tuple(address for address, _ in tables),
            slots=tuple(kind.write_slots.data_ptr() for kind in kinds),
            table_widths=tuple(width for _, width in tables),
            count=count,
            activation=self._activation,
            store=store,
            attention=attention,
        )
        element_type = ELEMENT_TYPES[pool.layers[0].keys.dtype]
        if batch.checkpoint is None:
            self._library.layers(ctypes.byref(arguments), self._weights_type, element_type)
            return normed
        # Each call but the last normalises for nothing, as layers normalise their own input.
        arguments.count = 1
        for number in range(count):
            batch.checkpoint()
            arguments.layers = ctypes.pointer(self._arguments[number])
            self._library.layers(ctypes.byref(arguments), self._weights_type, element_type)
        return normed


def fuse_layers(
    layers: Sequence[DecoderLayer], attention: Sequence[AttentionBackend], next_norm: torch.Tensor, epsilon: float
) -> FusedLayers | None:
    """Return whole layers of compiled operators as one; None if they are of another kind, or there are none.

    `attention` has an entry for each of `layers`, and more.
    """
    native = [backend for backend in attention[: len(layers)] if isinstance(backend, CpuAttention)]
    if not layers or len(native) < len(layers) or not all(map(can_fuse, layers)):
        return None
    return FusedLayers(layers, native, next_norm, epsilon)


def can_fuse(layer: DecoderLayer) -> bool:
    """Return whether this is a plain layer, all of whose products are compiled operators."""
    feed_forward = layer.feed_forward
    return (
        isinstance(feed_forward, DenseFeedForward)
        and isinstance(feed_forward.gate_up, CpuGatedLinear)
        and all(isinstance(part, CpuLinear) for part in (layer.qkv, layer.attention_output, feed_forward.down))
        and layer.post_norms is None
        and layer.projection_norm is None
        and layer.gate is None
        and layer.temperature is None
        and layer.residual_scale == 1.0
        and layer.input_norm is not None
        and layer.feed_forward_norm is not None
    )


def _layer_arguments(layer: DecoderLayer, attention: CpuAttention) -> LayerArguments:
    feed_forward, norms, window = layer.feed_forward, layer.qk_norm, attention.shape.window_left
    assert layer.input_norm is not None
    assert layer.feed_forward_norm is not None
    assert isinstance(layer.qkv, CpuLinear)
    assert isinstance(layer.attention_output, CpuLinear)
    assert isinstance(feed_forward, DenseFeedForward)
    assert isinstance(feed_forward.gate_up, CpuGatedLinear)
    assert isinstance(feed_forward.down, CpuLinear)
    return LayerArguments(
        input_norm=layer.input_norm.data_ptr(),
        query_norm=norms.query.data_ptr() if norms else None,
        key_norm=norms.key.data_ptr() if norms else None,
        feed_forward_norm=layer.feed_forward_norm.data_ptr(),
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        angles=attention.angles.data_ptr(),
        qkv=layer.qkv.matrix.arguments,
        output=layer.attention_output.matrix.arguments,
        gate=feed_forward.gate_up.gate.arguments,
        up=feed_forward.gate_up.up.arguments,
        down=feed_forward.down.matrix.arguments,
        window_left=-1 if window is None else window,
        is_chunked=attention.shape.is_chunked,
        table=int(window is not None),
    )
