from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.measuring.capacity import MemoryMeasure, activation_reserve, count_pages, longest_context
from services.worker.engine.model.config import MoeConfig
from tests.services.worker.engine.parallel.test_shards import SMOL

GIB = 1024**3
# A page of 16 tokens is a MiB.
TOKEN = 65_536


def spec(**changes: object) -> EngineSpec:
    return EngineSpec("model", **{"memory_fraction": 0.5, **changes})  # type: ignore[arg-type]  # whatever a test wants


def pages(asked: EngineSpec, memory: MemoryMeasure, context: int = 8192) -> int:
    return count_pages(asked, context, TOKEN, reserve=GIB, memory=memory)


def test_a_requested_number_of_pages_is_used_unchanged() -> None:
    assert pages(spec(device_pages=7), MemoryMeasure(0, 0)) == 7


def test_weights_and_kv_share_a_fraction_of_the_free_memory() -> None:
    # Of 80 GiB half may be used; 10 are weights, 1 is kept for activations: 29 GiB are left.
    assert pages(spec(), MemoryMeasure(80 * GIB, 70 * GIB)) == 29_696
    assert pages(spec(page_size=32), MemoryMeasure(80 * GIB, 70 * GIB)) == 14_848


def test_a_gpu_keeps_some_memory_free_even_if_all_of_it_was_asked_for() -> None:
    all_of_it = MemoryMeasure(80 * GIB, 70 * GIB)
    # 69 GiB less three quarters of one.
    assert pages(spec(memory_fraction=1.0), all_of_it) == 69_888
    # Another process has taken 20 GiB since.
    assert pages(spec(memory_fraction=1.0), MemoryMeasure(80 * GIB, 50 * GIB)) == 49_408
    # Of 80 GiB 8 are kept, which is more.
    assert pages(spec(memory_fraction=0.9), all_of_it) == 62_464


@given(
    free_before=st.integers(8 * GIB, 200 * GIB),
    used=st.integers(0, 4 * GIB),
    fraction=st.sampled_from([0.75, 0.875, 1.0]),
    page_size=st.sampled_from([1, 16, 64]),
    token=st.integers(1000, 1_000_000),
)
def test_a_gpu_s_pages_fit_and_one_more_would_not(
    free_before: int, used: int, fraction: float, page_size: int, token: int
) -> None:
    memory = MemoryMeasure(free_before, free_before - used)
    count = count_pages(spec(memory_fraction=fraction, page_size=page_size), 8192, token, reserve=GIB, memory=memory)

    def fits(number: int) -> bool:
        taken = used + GIB + number * token * page_size
        return taken <= free_before * fraction and free_before - taken >= 768 * 2**20

    assert fits(count)
    # A page of room for the rounding of fractions.
    assert not fits(count + 2)


def test_ranks_on_one_host_share_its_memory() -> None:
    # Half of 5 GiB, less one for activations.
    assert pages(spec(), MemoryMeasure(5 * GIB, 5 * GIB, is_host=True)) == 1536
    assert pages(spec(), MemoryMeasure(5 * GIB, 5 * GIB, shared_by=3, is_host=True)) == 512


def test_a_host_gives_two_gib_at_most() -> None:
    assert pages(spec(), MemoryMeasure(80 * GIB, 80 * GIB, is_host=True)) == 2048


def test_a_host_gives_no_more_than_all_rows_can_fill() -> None:
    memory = MemoryMeasure(80 * GIB, 80 * GIB, is_host=True)
    assert pages(spec(max_rows=3), memory, context=100) == 3 * 7
    assert pages(spec(max_rows=3), MemoryMeasure(80 * GIB, 80 * GIB), context=100) > 1000


def test_no_room_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no memory for KV: 1024 MiB are free after loading"):
        pages(spec(), MemoryMeasure(8 * GIB, GIB))
    with pytest.raises(ConfigurationError, match="no memory for KV"):
        pages(spec(device_pages=0), MemoryMeasure(8 * GIB, 8 * GIB))


def test_context_may_be_shortened_but_not_stretched() -> None:
    assert longest_context(spec(), SMOL) == 8192
    assert longest_context(spec(max_context=100), SMOL) == 100
    assert longest_context(spec(max_context=10**6), SMOL) == 8192


def test_every_expert_of_a_token_has_activations() -> None:
    one = spec(max_step_tokens=1000)

    def reserve(experts: int, per_token: int) -> int:
        moe = MoeConfig(
            experts=experts, experts_per_token=per_token, intermediate_size=768, normalizes_routing_weights=True
        )
        return activation_reserve(one, replace(SMOL, moe=moe), element_bytes=4)

    # For each of 1,000 tokens: gate, up and their product, 768 columns each, and the expert's input and output, of 576.
    assert reserve(64, 8) - reserve(64, 7) == 13_824_000
    assert reserve(128, 8) == reserve(64, 8) > activation_reserve(one, SMOL, element_bytes=4)


def test_activations_grow_with_the_step_and_the_vocabulary() -> None:
    reserve = activation_reserve(spec(max_step_tokens=2048, max_rows=32), SMOL, element_bytes=4)
    # Gate and up of 2,048 tokens, and logits of 32 rows, are in it.
    assert reserve > 2 * 2048 * 1536 * 4 + 32 * 49152 * 4
    assert activation_reserve(spec(max_step_tokens=4096, max_rows=32), SMOL, element_bytes=4) > 1.5 * reserve
