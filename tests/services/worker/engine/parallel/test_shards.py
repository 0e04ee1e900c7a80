from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigurationError
from services.worker.engine.model.config import KvHeads, ModelConfig, RotaryConfig
from services.worker.engine.parallel.shards import Span, are_cut_alike, shard_kinds, shard_model, split_evenly

SMOL = ModelConfig(
    family="llama", vocabulary_size=49152, hidden_size=576, intermediate_size=1536, layers=30, query_heads=9,
    kv_heads=3, head_dim=64, max_context=8192, norm_epsilon=1e-5, rotary=RotaryConfig(1e5), tied_embeddings=True,
)  # fmt: skip


@given(st.integers(1, 1000), st.integers(1, 16), st.sampled_from([1, 16]))
def test_parts_are_disjoint_complete_and_nearly_equal(total: int, parts: int, unit: int) -> None:
    spans = split_evenly(total, parts, unit)
    assert len(spans) == parts
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(total))
    assert all(span.start % unit == 0 for span in spans if len(span))
    units = [-(-len(span) // unit) for span in spans]
    assert max(units) - min(units) <= 1


def test_three_kv_heads_over_two_ranks_keep_their_groups() -> None:
    first, second = (shard_model(SMOL, rank, 2) for rank in range(2))
    assert (first.kv_heads, first.query_heads) == (Span(0, 2), Span(0, 6))
    assert (second.kv_heads, second.query_heads) == (Span(2, 3), Span(6, 9))
    assert (first.intermediate, second.intermediate) == (Span(0, 768), Span(768, 1536))
    assert first.is_first
    assert not second.is_first


@pytest.mark.parametrize(("ranks", "expected"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_heads_of_two_kinds_of_layers_belong_together_if_ranks_divide_both(ranks: int, expected: bool) -> None:
    config = replace(SMOL, query_heads=32, kv_heads=4, windows=(64, None) * 15, local_heads=KvHeads(16, 32))
    kinds = [shard_kinds(config, rank, ranks) for rank in range(ranks)]
    assert [(of_kind.kv_heads, of_kind.head_dim) for of_kind, _ in kinds[0]] == [(4, 64), (16, 32)]
    assert all(map(are_cut_alike, kinds)) == expected
    assert are_cut_alike(shard_kinds(replace(config, local_heads=None), 0, ranks)), "there is one kind"


def test_ranks_beyond_the_kv_heads_share_a_head() -> None:
    shards = [shard_model(SMOL, rank, 5) for rank in range(5)]
    assert [shard.kv_heads for shard in shards] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2), Span(2, 3)]
    assert [shard.query_heads for shard in shards] == [Span(0, 2), Span(2, 3), Span(3, 5), Span(5, 6), Span(6, 9)]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_every_query_head_is_somewhere_once_and_with_its_kv_head(kv_heads: int, group: int, world_size: int) -> None:
    config = replace(SMOL, kv_heads=kv_heads, query_heads=kv_heads * group)
    try:
        shards = [shard_model(config, rank, world_size) for rank in range(world_size)]
    except ConfigurationError:
        assert world_size > kv_heads * group or (world_size > kv_heads and -(-world_size // kv_heads) > group)
        return
    heads = [head for shard in shards for head in range(shard.query_heads.start, shard.query_heads.stop)]
    assert heads == list(range(kv_heads * group))
    for shard in shards:
        assert len(shard.query_heads) % len(shard.kv_heads) == 0
        share = len(shard.query_heads) // len(shard.kv_heads)
        for i, head in enumerate(range(shard.query_heads.start, shard.query_heads.stop)):
            assert head // group == shard.kv_heads.start + i // share


@pytest.mark.parametrize(("rank", "world_size"), [(0, 10), (3, 10), (0, 97), (2, 2), (-1, 2)])
def test_ranks_without_work_are_refused_by_all(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError):
        shard_model(SMOL, rank, world_size)
