"""Heads of pages are cut out and joined so that ranks of any number get what their own pages would hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.host_tier.device_pages import DevicePages, page_form_of
from services.worker.engine.host_tier.page_form import PageForm, sources_of
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout
from services.worker.engine.model.kv_pool import KvPool
from services.worker.engine.parallel.shards import Span, split_kv_heads
from tests.services.worker.engine.host_tier.test_sliced_transfers import pool_of

Parts = tuple[tuple[int, int], ...]


def forms(total: int, ranks: int, parts: Parts) -> list[PageForm]:
    return [PageForm(parts, split_kv_heads(total, rank, ranks), total) for rank in range(ranks)]


def pages_of(form: PageForm, pages: list[int]) -> bytes:
    """Return pages whose bytes depend on page, part, run, head and position, so that any that is misplaced shows."""
    of_parts = []
    for part, (runs, head_bytes) in enumerate(form.parts):
        shape = (len(pages), runs, form.total, head_bytes)
        model = (np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) + 1000 * part) * 2_654_435_761 >> 24
        held = model.astype(np.uint8)[:, :, form.held.start : form.held.stop]
        of_parts.append(held.reshape(len(pages), -1))
    return np.concatenate(of_parts, axis=1).tobytes()


PARTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3).map(tuple)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 8), PARTS)
def test_each_rank_assembles_its_pages_from_those_of_any_number_of_ranks(
    total: int, ranks: int, peers: int, parts: Parts
) -> None:
    theirs, pages = forms(total, peers, parts), [3, 1, 2]
    for rank, own in enumerate(forms(total, ranks, parts)):
        sources = sources_of(own, rank, ranks, peers)
        covered = [head for _, heads in sources for head in range(heads.start, heads.stop)]
        assert covered == list(range(own.held.start, own.held.stop))
        assert all(theirs[peer].holds(heads) for peer, heads in sources)
        read = [(heads, memoryview(theirs[peer].cut(pages_of(theirs[peer], pages), heads))) for peer, heads in sources]
        assert bytes(own.join(read)) == pages_of(own, pages)


def test_ranks_that_share_heads_read_from_different_ones() -> None:
    own = forms(2, 2, ((1, 1),))
    assert [sources_of(form, rank, 2, 4) for rank, form in enumerate(own)] == [[(0, Span(0, 1))], [(3, Span(1, 2))]]


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("others", [(8, 1), (6, 2)], ids=["alike", "differing"])
def test_heads_of_a_pool_are_those_of_the_pool_of_a_rank_with_fewer(layout: KvLayout, others: tuple[int, int]) -> None:
    shape, pool = random_pool(4, others, layout)
    form = page_form_of(pool, layout, shape, Span(0, 4), 4)
    assert form is not None
    for held in (Span(0, 1), Span(1, 3), Span(0, 4)):
        part_shape, _ = random_pool(len(held), others, layout)
        layers = (cut(layer, held, layout, by) for layer, by in zip(pool.layers, (1, others[1]), strict=True))
        of_rank = KvPool(tuple(layers), pool.pages, pool.page_size)
        own = page_form_of(of_rank, layout, part_shape, held, 4)
        assert own is not None
        content = DevicePages(pool, form).read_pages([2, 0], held)
        assert content == DevicePages(of_rank, own).read_pages([2, 0], held)
        assert len(content) == 2 * own.page_bytes


def random_pool(heads: int, others: tuple[int, int], layout: KvLayout) -> tuple[AttentionShape, KvPool]:
    """Return a pool of a layer of `heads` heads, and of one of heads of another width, some number of times as many."""
    head_dim, by = others
    shape = AttentionShape(query_heads=heads, kv_heads=heads, head_dim=8, page_size=4)
    shapes = (shape, replace(shape, query_heads=by * heads, kv_heads=by * heads, head_dim=head_dim))
    pool = pool_of(shapes, 3, layout, torch.float32, torch.device("cpu"))
    for layer in pool.layers:
        for tensor in layer.stored:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    return shape, pool


def cut(layer: KvLayer, held: Span, layout: KvLayout, by: int) -> KvLayer:
    heads = 2 if layout is KvLayout.TOKEN_MAJOR else 1
    keys, values = (tensor.narrow(heads, by * held.start, by * len(held)).contiguous() for tensor in layer.stored)
    return KvLayer(keys=keys, values=values)
