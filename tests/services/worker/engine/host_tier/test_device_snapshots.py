"""Snapshots of recurrent states as bytes: each rank reads its key heads from the ranks that hold them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.worker.engine.host_tier.device_snapshots import DeviceSnapshots, snapshot_form
from services.worker.engine.host_tier.page_form import sources_of
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.host_tier.sliced_transfers import SlicedTransfers
from services.worker.engine.model.config import RecurrentConfig
from services.worker.engine.model.recurrent import StatePool, allocate_states, state_bytes
from services.worker.engine.parallel.shards import Span, split_evenly
from tests.services.worker.engine.host_tier.test_state_slots import (
    BACKUP,
    finish,
    pool_with_states,
    snapshot_transfer,
)

CPU = torch.device("cpu")
# Six key heads with two value heads each, in two layers.
CONFIG = RecurrentConfig(layers=(0, 2), key_heads=6, value_heads=12, key_dim=4, value_dim=6, kernel=4)
ROWS, SNAPSHOTS = 2, 3
QUERIES = CONFIG.key_heads * CONFIG.key_dim


def whole_states(dtype: torch.dtype) -> StatePool:
    """Return random states of all heads."""
    states = allocate_states(CONFIG, CONFIG.key_heads, (ROWS, SNAPSHOTS), dtype, CPU)
    states.matrices.normal_()
    states.inputs.normal_()
    return states


def shard_of(states: StatePool, heads: Span) -> StatePool:
    """Return the part of the states that a rank with some key heads has, as its layers lay it out."""
    queries, keys, values = torch.split(states.inputs, [QUERIES, QUERIES, 12 * CONFIG.value_dim], dim=-1)
    own = slice(heads.start * CONFIG.key_dim, heads.stop * CONFIG.key_dim)
    own_values = slice(heads.start * 2 * CONFIG.value_dim, heads.stop * 2 * CONFIG.value_dim)
    inputs = torch.cat([queries[..., own], keys[..., own], values[..., own_values]], dim=-1)
    return StatePool(states.matrices[:, :, heads.start * 2 : heads.stop * 2].clone(), inputs, ROWS)


def snapshots_of(states: StatePool, heads: Span) -> DeviceSnapshots:
    return DeviceSnapshots(states, snapshot_form(states, heads, CONFIG.key_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3), (3, 2), (6, 4), (4, 6), (1, 6)])
def test_ranks_of_groups_of_any_sizes_hand_over_their_heads_of_a_snapshot(
    theirs: int, ours: int, dtype: torch.dtype
) -> None:
    whole = whole_states(dtype)
    lenders = [snapshots_of(shard_of(whole, heads), heads) for heads in split_evenly(CONFIG.key_heads, theirs)]
    for rank, heads in enumerate(split_evenly(CONFIG.key_heads, ours)):
        expected, own = shard_of(whole, heads), allocate_states(CONFIG, len(heads), (ROWS, SNAPSHOTS), dtype, CPU)
        reader = snapshots_of(own, heads)
        parts = [
            (part, memoryview(lenders[peer].read(2, part)))
            for peer, part in sources_of(reader.form, rank, ours, theirs)
        ]
        reader.write(1, reader.form.join(parts))
        at, source = own.place_of(1), expected.place_of(2)
        assert torch.equal(own.matrices[:, at], expected.matrices[:, source])
        assert torch.equal(own.inputs[:, at], expected.inputs[:, source])
        # Nothing else was written.
        own.matrices[:, at], own.inputs[:, at] = 0, 0
        assert not own.matrices.any()
        assert not own.inputs.any()


def test_a_snapshot_has_the_bytes_of_its_copy_on_the_host() -> None:
    states, heads = whole_states(torch.bfloat16), Span(0, CONFIG.key_heads)
    pool = replace(pool_with_states(CPU), states=states)
    host = allocate_host_pool(pool, 8, 2)
    transfers = SlicedTransfers(pool, host)
    transfers.begin([snapshot_transfer(1, BACKUP, [2], [1])])
    assert len(finish(transfers, 1)) == 1
    content = snapshots_of(states, heads).read(2, heads)
    assert host.states is not None
    assert bytes(host.states.memory[1, : len(content)].numpy()) == content
    assert len(content) == state_bytes(CONFIG, CONFIG.key_heads, torch.bfloat16)


def test_nothing_is_read_or_written_once_the_model_has_been_closed() -> None:
    states = whole_states(torch.float32)
    before = states.matrices.clone()
    snapshots = snapshots_of(states, Span(0, 6))
    content = snapshots.read(0, Span(0, 6))
    snapshots.close()
    assert snapshots.read(0, Span(0, 6)) == b""
    snapshots.write(1, memoryview(content))
    assert torch.equal(states.matrices, before)
