from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.measuring.capacity import MemoryMeasure, activation_reserve, count_pages, longest_context
from services.worker.engine.model.config import MoeConfig
from tests.services.worker.engine.parallel.test_shards import SMOL

GIB = 1024**3
TOKEN = 46080


def spec(**changes: object) -> EngineSpec:
    return EngineSpec("model", **{"memory_fraction": 0.5, **changes})  # type: ignore[arg-type]  # whatever a test wants


def pages(asked: EngineSpec, memory: MemoryMeasure, context: int = 8192) -> int:
    return count_pages(asked, context, TOKEN, reserve=GIB, memory=memory)


def test_pages_that_were_asked_for_are_not_questioned() -> None:
    assert pages(spec(device_pages=7), MemoryMeasure(0, 0)) == 7


def test_weights_and_kv_share_a_fraction_of_what_was_free() -> None:
    # Of 80 GiB half may be used; 10 are weights, 1 is kept for activations.
    assert pages(spec(), MemoryMeasure(80 * GIB, 70 * GIB)) == 29 * GIB // (TOKEN * 16)
    assert pages(spec(page_size=32), MemoryMeasure(80 * GIB, 70 * GIB)) == 29 * GIB // (TOKEN * 32)


def test_a_gpu_keeps_some_memory_free_even_if_all_of_it_was_asked_for() -> None:
    all_of_it = MemoryMeasure(80 * GIB, 70 * GIB)
    assert pages(spec(memory_fraction=1.0), all_of_it) == (69 * GIB - 768 * 2**20) // (TOKEN * 16)
    # Another process has taken 20 GiB since.
    taken = MemoryMeasure(80 * GIB, 50 * GIB)
    assert pages(spec(memory_fraction=1.0), taken) == (49 * GIB - 768 * 2**20) // (TOKEN * 16)
    assert pages(spec(memory_fraction=0.9), all_of_it) == (61 * GIB) // (TOKEN * 16)


def test_ranks_on_one_host_share_its_memory() -> None:
    alone = pages(spec(), MemoryMeasure(5 * GIB, 5 * GIB, is_host=True))
    assert pages(spec(), MemoryMeasure(5 * GIB, 5 * GIB, shared_by=3, is_host=True)) == alone // 3


def test_a_host_gives_two_gib_at_most() -> None:
    assert pages(spec(), MemoryMeasure(80 * GIB, 80 * GIB, is_host=True)) == 2 * GIB // (TOKEN * 16)


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
    moe = MoeConfig(experts=64, experts_per_token=8, intermediate_size=768, normalizes_routing_weights=True)
    one = spec(max_step_tokens=1000)
    more = activation_reserve(one, replace(SMOL, moe=moe), 4) - activation_reserve(one, SMOL, 4)
    assert more == 1000 * 4 * (8 * (3 * 768 + 2 * 576) - 4 * 1536)


def test_activations_grow_with_the_step_and_the_vocabulary() -> None:
    reserve = activation_reserve(spec(max_step_tokens=2048, max_rows=32), SMOL, element_bytes=4)
    # Gate and up of 2,048 tokens, and logits of 32 rows, are in it.
    assert reserve > 2 * 2048 * 1536 * 4 + 32 * 49152 * 4
    assert activation_reserve(spec(max_step_tokens=4096, max_rows=32), SMOL, element_bytes=4) > 1.5 * reserve
