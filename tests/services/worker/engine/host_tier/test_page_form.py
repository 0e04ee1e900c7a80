"""Heads of pages are cut out and joined so that ranks of any number get what their own pages would hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.host_tier.device_pages import DevicePages, page_form_of
from services.worker.engine.host_tier.page_form import PageForm, sources_of
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout
from services.worker.engine.model.kv_pool import KvPool, allocate_pool
from services.worker.engine.parallel.shards import Span, split_kv_heads


def forms(total: int, ranks: int, runs: int, head_bytes: int) -> list[PageForm]:
    return [PageForm(runs, head_bytes, split_kv_heads(total, rank, ranks), total) for rank in range(ranks)]


def pages_of(form: PageForm, pages: list[int]) -> bytes:
    """Return pages whose bytes depend on page, run, head and position, so that any that is misplaced shows."""
    shape = (len(pages), form.runs, form.total, form.head_bytes)
    model = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) * 2_654_435_761 >> 24
    return model.astype(np.uint8)[:, :, form.held.start : form.held.stop].tobytes()


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_each_rank_assembles_its_pages_from_those_of_any_number_of_ranks(
    total: int, ranks: int, peers: int, runs: int, head_bytes: int
) -> None:
    theirs, pages = forms(total, peers, runs, head_bytes), [3, 1, 2]
    for rank, own in enumerate(forms(total, ranks, runs, head_bytes)):
        sources = sources_of(own, rank, ranks, peers)
        covered = [head for _, heads in sources for head in range(heads.start, heads.stop)]
        assert covered == list(range(own.held.start, own.held.stop))
        assert all(theirs[peer].holds(heads) for peer, heads in sources)
        parts = [(heads, memoryview(theirs[peer].cut(pages_of(theirs[peer], pages), heads))) for peer, heads in sources]
        assert bytes(own.join(parts)) == pages_of(own, pages)


def test_ranks_that_share_heads_read_from_different_ones() -> None:
    own = forms(2, 2, 1, 1)
    assert [sources_of(form, rank, 2, 4) for rank, form in enumerate(own)] == [[(0, Span(0, 1))], [(3, Span(1, 2))]]


@pytest.mark.parametrize("layout", list(KvLayout))
def test_heads_of_a_pool_are_those_of_the_pool_of_a_rank_with_fewer(layout: KvLayout) -> None:
    shape, pool = pool_of(4, layout)
    form = page_form_of(pool, layout, shape, Span(0, 4), 4)
    assert form is not None
    for held in (Span(0, 1), Span(1, 3), Span(0, 4)):
        part_shape, _ = pool_of(len(held), layout)
        of_rank = KvPool(tuple(cut(layer, held, layout) for layer in pool.layers), pool.pages, pool.page_size)
        own = page_form_of(of_rank, layout, part_shape, held, 4)
        assert own is not None
        content = DevicePages(pool, form).read_pages([2, 0], held)
        assert content == DevicePages(of_rank, own).read_pages([2, 0], held)
        assert len(content) == 2 * own.page_bytes


def pool_of(heads: int, layout: KvLayout) -> tuple[AttentionShape, KvPool]:
    shape = AttentionShape(query_heads=heads, kv_heads=heads, head_dim=8, page_size=4)
    pool = allocate_pool(shape, 2, 3, layout, dtype=torch.float32, device=torch.device("cpu"))
    for layer in pool.layers:
        for tensor in layer.stored:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    return shape, pool


def cut(layer: KvLayer, held: Span, layout: KvLayout) -> KvLayer:
    heads = 2 if layout is KvLayout.TOKEN_MAJOR else 1
    keys, values = (tensor.narrow(heads, held.start, len(held)).contiguous() for tensor in layer.stored)
    return KvLayer(keys=keys, values=values)
