from __future__ import annotations

import pytest
import torch

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.host_tier.pool import HostPool, allocate_host_pool, count_host_pages
from services.worker.engine.kernels.interface import AttentionShape, KvLayout
from services.worker.engine.model.kv_pool import allocate_pool, bytes_per_token
from tests.services.worker.engine.host_tier.test_sliced_transfers import OTHER, SHAPE, pool_of

CPU = torch.device("cpu")


def make(dtype: torch.dtype = torch.bfloat16) -> HostPool:
    pool = allocate_pool(SHAPE, layers=3, pages=5, layout=KvLayout.LANES, dtype=dtype, device=CPU)
    host = allocate_host_pool(pool, 7)
    assert host.page_bytes == pool.bytes_per_token * pool.page_size
    return host


def test_a_page_is_one_run_of_bytes_of_all_layers() -> None:
    host = make()
    assert (host.pages, host.page_bytes) == (7, 3 * 2 * 2 * 8 * 4 * 2)
    content = bytes(range(256)) * (host.page_bytes // 256)
    host.write_page(3, memoryview(content))
    assert host.read_page(3) == content
    assert host.read_page(2) == host.read_page(4) == bytes(host.page_bytes)


def test_a_page_of_latent_rows_holds_each_once() -> None:
    shape = AttentionShape(query_heads=4, kv_heads=1, head_dim=24, page_size=4, latent_dim=16)
    pool = allocate_pool(shape, layers=3, pages=5, layout=KvLayout.TOKEN_MAJOR, dtype=torch.bfloat16, device=CPU)
    assert [layer.values.shape for layer in pool.layers] == [(5, 4, 1, 16)] * 3
    assert pool.layers[0].values.data_ptr() == pool.layers[0].keys.data_ptr()
    assert (pool.bytes_per_token, bytes_per_token(shape, 3, torch.bfloat16)) == (3 * 24 * 2, 3 * 24 * 2)
    host = allocate_host_pool(pool, 7)
    assert host.memory.shape == (7, 3, 1, 4 * 24)
    assert host.page_bytes == pool.bytes_per_token * pool.page_size


def test_a_page_of_layers_that_differ_holds_as_much_as_each_needs() -> None:
    pool = pool_of((SHAPE, OTHER, SHAPE), 5, KvLayout.TOKEN_MAJOR, torch.bfloat16, CPU)
    host = allocate_host_pool(pool, 7)
    assert host.page_bytes == 2 * 2 * 4 * (2 * 2 * 8 + 4 * 6) == pool.bytes_per_token * pool.page_size


def test_the_pool_is_sized_in_bytes_or_pages() -> None:
    assert count_host_pages(EngineSpec("m"), 100, 0, free_bytes=10_000) == (0, 0)
    assert count_host_pages(EngineSpec("m", host_bytes=999), 100, 0, free_bytes=10_000) == (9, 0)
    assert count_host_pages(EngineSpec("m", host_pages=20, host_bytes=999), 100, 0, free_bytes=10_000) == (20, 0)
    assert count_host_pages(EngineSpec("m", host_pages=0, host_bytes=999), 100, 0, free_bytes=10_000) == (0, 0)


def test_snapshots_get_as_much_memory_as_pages() -> None:
    # Slots begin at cache lines.
    assert count_host_pages(EngineSpec("m", host_bytes=4000), 100, 250, free_bytes=10_000) == (20, 2000 // 256)
    assert count_host_pages(EngineSpec("m", host_pages=20), 100, 250, free_bytes=10_000) == (20, 7)
    assert count_host_pages(EngineSpec("m", host_pages=20, host_snapshots=3), 100, 250, free_bytes=10_000) == (20, 3)
    # One to continue from, and one that is being made.
    assert count_host_pages(EngineSpec("m", host_pages=2), 100, 250, free_bytes=10_000) == (2, 2)
    assert count_host_pages(EngineSpec("m"), 100, 250, free_bytes=10_000) == (0, 0)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"of 91 pages takes.*are free"):
        count_host_pages(EngineSpec("m", host_pages=91), 100, 0, free_bytes=10_000)
    with pytest.raises(ConfigurationError, match="of 80 pages and 31 snapshots takes"):
        count_host_pages(EngineSpec("m", host_pages=80), 100, 250, free_bytes=10_000)


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not hold a page"):
        count_host_pages(EngineSpec("m", host_bytes=99), 100, 0, free_bytes=10_000)
