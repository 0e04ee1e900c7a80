"""Whole experts on each rank, in processes of their own: the same numbers as on one rank; tokens of each expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.model.config import ModelConfig, MoeConfig, RotaryConfig
from services.worker.engine.parallel.expert_load import ExpertCounts
from services.worker.engine.parallel.shards import Span, shard_model
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import FAMILIES, VOCABULARY, reference_logits, save_family, save_model
from tests.services.worker.engine.mxfp4_checkpoints import save_published
from tests.services.worker.engine.parallel.test_stages import lived_tokens
from tests.services.worker.engine.quantization.fp8_checkpoints import change_config
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised

if TYPE_CHECKING:
    from pathlib import Path

    from common.steps import ExpertLoad
    from tests.services.worker.engine.parallel.ranks import Ranks

SHAPE = ModelConfig(
    family="mixtral", vocabulary_size=100, hidden_size=32, intermediate_size=64, layers=2, query_heads=4, kv_heads=4,
    head_dim=8, max_context=64, norm_epsilon=1e-5, rotary=RotaryConfig(1e5), tied_embeddings=True,
    moe=MoeConfig(experts=3, experts_per_token=2, intermediate_size=16, normalizes_routing_weights=True),
)  # fmt: skip
PROMPT = random_ids(40, VOCABULARY)


def compute(
    rank: int, world_size: int, rendezvous: str, model: str, changes: dict[str, object]
) -> tuple[torch.Tensor, ExpertLoad | None]:
    """Prefill in two chunks, then decode four given tokens; return all logits, and what the rank's experts computed."""
    runner = load(model, rank=rank, world_size=world_size, rendezvous=rendezvous, **changes)  # type: ignore[arg-type]  # spec fields
    driver = Driver(runner)
    row = driver.open(44)
    parts = [PROMPT[:23], PROMPT[23:36], *([token] for token in PROMPT[36:])]
    logits = torch.cat([driver.run([(row, part)], all_tokens=True) for part in parts])
    counts = runner.expert_counts
    # A rank that leaves takes with it what the next stage has not received yet.
    assert runner.agree(True)
    runner.close()
    return logits, None if counts is None else counts.read()


def test_ranks_hold_whole_experts_as_evenly_as_possible() -> None:
    first, second = (shard_model(SHAPE, rank, 2, expert_parallel=True) for rank in range(2))
    assert (first.experts, second.experts) == (Span(0, 2), Span(2, 3))
    assert first.expert_columns == second.expert_columns == Span(0, 16)
    # All else is cut as without.
    assert (first.query_heads, second.query_heads) == (Span(0, 2), Span(2, 4))


def test_experts_narrower_than_a_column_for_each_rank_are_held_whole() -> None:
    with pytest.raises(ConfigurationError, match="leaves some without work"):
        shard_model(SHAPE, 0, 2)
    assert shard_model(SHAPE, 0, 2, expert_parallel=True).experts == Span(0, 2)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {}, "scheduler.expert_parallel: llama has no experts"),
        ("mixtral", {"world_size": 1}, "each stage has only one"),
        ("mixtral", {"world_size": 2, "stages": 2}, "each stage has only one"),
        ("granite moe", {"world_size": 4, "adapter_slots": 2}, "scheduler.adapters.slots=2"),
    ],
)
def test_what_whole_experts_do_not_support_is_refused_by_name(
    family: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, **{"rank": 0, "world_size": 2, "expert_parallel": True, **changes})  # type: ignore[arg-type]  # spec fields


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="mixtral has 3 experts, too few for 4 ranks"):
        shard_model(SHAPE, 0, 4, expert_parallel=True)


def test_the_imbalance_is_what_ranks_wait_for_in_each_layer() -> None:
    counts = ExpertCounts(2, 3, (Span(0, 2), Span(2, 3)), 1, torch.device("cpu"))
    assert counts.read().imbalance == 1.0
    with torch.inference_mode():
        for tokens in ([1, 2, 1], [0, 0, 4]):
            counts.of_next_layer().copy_(torch.tensor(tokens))
    load_of_second = counts.read()
    assert (load_of_second.first, load_of_second.tokens) == (2, (5,))
    # The busiest ranks compute 3 and 4 of 8 tokens, where 4 would be balanced.
    assert load_of_second.imbalance == 7 / 4
    counts.reset()
    assert counts.read().tokens == (0,)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"backend": "compiled"}),
        ("qwen3 moe partly dense", {"backend": "torch", "world_size": 3}),
        pytest.param("qwen2 moe", {"backend": "compiled"}, marks=pytest.mark.extended),
        pytest.param("gpt-oss", {"backend": "torch"}, marks=pytest.mark.extended),
        pytest.param("llama4", {"backend": "torch"}, marks=pytest.mark.extended),
        pytest.param("deepseek v3", {"backend": "compiled"}, marks=pytest.mark.extended),
        pytest.param("mixtral", {"backend": "compiled", "world_size": 4, "stages": 2}, marks=pytest.mark.extended),
    ],
)
def test_whole_experts_compute_the_same_as_one_rank(
    ranks: Ranks, family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    expected = reference_logits(save_family(tmp_path, family), PROMPT)
    changes = {"expert_parallel": True, **changes}
    world_size = int(str(changes.pop("world_size", 2)))
    results = ranks.run(compute, world_size, str(tmp_path), changes)
    sampler = world_size - world_size // int(str(changes.get("stages", 1)))
    torch.testing.assert_close(results[sampler][0], expected, atol=3e-4, rtol=1e-4)
    assert [load.first for _, load in results].count(0) == changes.get("stages", 1)
    assert all(sum(load.tokens) for _, load in results)


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["fp8 blocks", "int8", "awq 32", "gptq act-order"])
def test_stored_formats_are_those_of_one_rank(ranks: Ranks, scheme: str, tmp_path: Path) -> None:
    name, options = FAMILIES["qwen3 moe"]
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128}
    save_model(tmp_path, name, {**options, **sizes, "num_experts": 3, "initializer_range": 0.05})
    store_quantised(tmp_path, SCHEMES[scheme])
    # All of them are chosen: roundings change no choice.
    change_config(tmp_path, num_experts_per_tok=3)
    (alone, _), *_ = ranks.run(compute, 1, str(tmp_path), {})
    (together, load), (_, other) = ranks.run(compute, 2, str(tmp_path), {"expert_parallel": True})
    # Ranks scale their own parts of the activations.
    assert float((together - alone).norm() / alone.norm()) < (2e-2 if scheme in ("fp8 blocks", "int8") else 1e-5)
    # Three layers of which each expert gets all tokens.
    assert (load.tokens, other.tokens) == ((120, 120), (120,))
    assert load.imbalance == other.imbalance == pytest.approx(4 / 3)


@pytest.mark.extended
def test_blocks_of_mxfp4_need_not_be_cut(ranks: Ranks, tmp_path: Path) -> None:
    published, wide = save_published(tmp_path)
    with pytest.raises(ConfigurationError, match="leaves some without work"):
        load(published, rank=0, world_size=3, rendezvous="127.0.0.1:1")
    results = ranks.run(compute, 3, str(published), {"expert_parallel": True})
    torch.testing.assert_close(results[0][0], reference_logits(wide, PROMPT), atol=3e-4, rtol=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "world_size", "stages"), [("mixtral", 2, 1), ("qwen3 moe", 3, 1), ("qwen2 moe", 4, 2), ("gpt-oss", 2, 1)]
)
def test_random_requests_get_the_same_from_whole_experts(
    ranks: Ranks, family: str, world_size: int, stages: int, tmp_path: Path
) -> None:
    assert lived_tokens(ranks, tmp_path, family, world_size, stages, worlds=2, expert_parallel=True) > 150
