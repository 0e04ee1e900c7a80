"""Memory for keys and values, by pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from services.worker.engine.host_memory import HostArena
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, KvScales

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.worker.engine.model.recurrent import StatePool


@dataclass(frozen=True, slots=True)
class KvPool:
    """Keys and values of `pages` pages; page p of the model is page p of every layer that attends.

    Layers of which only the newest tokens are kept have pages of their own, if `window_pages` are there: then page p is
    page p of every other layer, and window page p is page p of each of these.
    """

    layers: Sequence[KvLayer]
    pages: int
    page_size: int
    window_pages: int = 0
    # Of one token's keys and values over the layers that have pages of their own.
    window_bytes_per_token: int = 0
    # Of the layers that do not attend, if there are any.
    states: StatePool | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers that `pages` counts."""
        held = sum(tensor.nbytes for layer in self.layers for tensor in layer.stored)
        return held // self.page_size // self.pages - self.window_bytes_per_token * self.window_pages // self.pages


def join_pools(pool: KvPool, window_pool: KvPool, is_local: Sequence[bool]) -> KvPool:
    """Return one pool of layers of two, of which `is_local` [layers] says which are of the second."""
    others, locals_ = iter(pool.layers), iter(window_pool.layers)
    layers = tuple(next(locals_) if local else next(others) for local in is_local)
    return KvPool(layers, pool.pages, pool.page_size, window_pool.pages, window_pool.bytes_per_token)


def with_scales(pool: KvPool, scales: Sequence[KvScales]) -> KvPool:
    """Return `pool`, which is in FP8, with the scales of its layers."""
    layers = (replace(layer, scales=its) for layer, its in zip(pool.layers, scales, strict=True))
    return replace(pool, layers=tuple(layers))


def bytes_per_token(shape: AttentionShape, layers: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's KV in `layers` layers."""
    return layers * shape.stored_width * dtype.itemsize


def allocate_pool(
    shape: AttentionShape, layers: int, pages: int, layout: KvLayout, *, dtype: torch.dtype, device: torch.device
) -> KvPool:
    """Allocate a zeroed pool: unwritten values must be finite, since masked values are multiplied by zero."""
    arena = HostArena()
    if shape.latent_dim is not None:
        layers_of_rows = (_latent_layer(shape, pages, layout, dtype, device, arena) for _ in range(layers))
        return KvPool(tuple(layers_of_rows), pages, shape.page_size)
    match layout:
        case KvLayout.TOKEN_MAJOR:
            key_page = value_page = (shape.page_size, shape.kv_heads, shape.head_dim)
        case KvLayout.LANES:
            key_page = (shape.kv_heads, shape.head_dim, shape.page_size)
            value_page = (shape.kv_heads, shape.page_size, shape.head_dim)
        case KvLayout.HEAD_MAJOR:
            key_page = value_page = (shape.kv_heads, shape.page_size, shape.head_dim)
    return KvPool(
        layers=tuple(
            KvLayer(
                keys=_zeros((pages, *key_page), dtype, device, arena),
                values=_zeros((pages, *value_page), dtype, device, arena),
            )
            for _ in range(layers)
        ),
        pages=pages,
        page_size=shape.page_size,
    )


def shape_of(pool: KvPool) -> KvPool:
    """Return `pool` without its memory: its tensors are on the meta device."""
    states = pool.states
    if states is not None:
        states = replace(states, matrices=_meta(states.matrices), inputs=_meta(states.inputs))
    layers = (_with_tensors(layer, [_meta(tensor) for tensor in layer.stored]) for layer in pool.layers)
    return replace(pool, layers=tuple(layers), states=states)


def allocate_like(shape: KvPool, device: torch.device) -> KvPool:
    """Allocate a zeroed pool of a shape that `shape_of` has returned."""
    arena, states = HostArena(), shape.states
    if states is not None:
        states = replace(
            states,
            matrices=torch.zeros_like(states.matrices, device=device),
            inputs=torch.zeros_like(states.inputs, device=device),
        )
    layers = (
        _with_tensors(layer, [_zeros(tuple(each.shape), each.dtype, device, arena) for each in layer.stored])
        for layer in shape.layers
    )
    return replace(shape, layers=tuple(layers), states=states)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def _with_tensors(layer: KvLayer, stored: Sequence[torch.Tensor]) -> KvLayer:
    """Return `layer` in other memory, as `KvLayer.stored` has it."""
    if not layer.is_latent:
        return replace(layer, keys=stored[0], values=stored[1])
    return replace(layer, keys=stored[0], values=stored[0][..., : layer.values.shape[-1]])


def _latent_layer(
    shape: AttentionShape, pages: int, layout: KvLayout, dtype: torch.dtype, device: torch.device, arena: HostArena
) -> KvLayer:
    assert layout is KvLayout.TOKEN_MAJOR, "back ends of latent attention read whole rows"
    rows = _zeros((pages, shape.page_size, 1, shape.head_dim), dtype, device, arena)
    return KvLayer(rows, rows[..., : shape.latent_dim], is_latent=True)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, arena: HostArena) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return arena.zeros(shape, dtype)
