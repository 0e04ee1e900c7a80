"""Two ranks on GPUs: what they exchange, through shared memory if each has its own GPU, and a model cut in two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from services.worker.engine.parallel.group import DistributedGroup, join_group
from services.worker.engine.parallel.shards import split_evenly
from services.worker.engine.parallel.symmetric_memory import SIZES, ExchangeShape, Method
from tests.services.worker.engine.driving import Driver, random_ids
from tests.services.worker.engine.execution.test_families import OWN, PRECISE
from tests.services.worker.engine.families import FAMILIES, save_model
from tests.services.worker.engine.parallel.ranks import Ranks, gpu_of
from tests.services.worker.engine.quantization.stored_formats import SCHEMES, store_quantised
from tests.services.worker.engine.quantization.test_stored_formats import SHAPE
from tests.services.worker.engine.tiny_llama import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WORLD = 2
VOCABULARY, ROWS, HIDDEN = 10, 4, 96
# Sums of every method, and some that only NCCL makes: too many, of odd size.
ELEMENTS = (8, 5120, 300_000, 2_600_000, SIZES[-1] // 2 + 8, 5)
LLAMA, AWQ = "llama of two layers", "awq 32"
# Choices of experts and groups which let every expert be chosen, so that roundings change no choice.
ALL_EXPERTS: dict[str, dict[str, object]] = {
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "glm4 moe": {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "llama4": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "deepseek v3": {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "qwen3 next": {"num_experts": 4, "num_experts_per_tok": 4},
    "deepseek v2 lite": {"n_routed_experts": 4, "num_experts_per_tok": 4},
    "granite moe": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "granite moe shared": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "llama4 of two experts": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "qwen2 moe": {"num_experts": 4, "num_experts_per_tok": 4},
    "qwen3 moe": {"num_experts": 4, "num_experts_per_tok": 4},
    "qwen3 moe partly dense": {"num_experts": 4, "num_experts_per_tok": 4},
}
# Of the norm of logits: what other sums of a narrow type may cost. Roundings add up over the many parts of Gemma 3 and
# 4, and in recurrent states.
TOLERANCE, TOLERANCES = 0.02, {"gemma3": 0.04, "gemma4": 0.06, "gemma4 moe": 0.06, "qwen3.5": 0.04}
CUT = (
    LLAMA, AWQ, "gemma2", "gemma4", "olmo2", "gpt-oss", "glm4 moe", "llama4", "deepseek v3", "qwen3 next",
)  # fmt: skip
# All others of those that run on one GPU.
ALSO_CUT = tuple(pytest.param(each, marks=pytest.mark.extended) for each in OWN if each not in CUT)


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have not met yet: on GPUs they can only once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


def join(rank: int, rendezvous: str) -> DistributedGroup:
    device = torch.device("cuda", gpu_of(rank))
    torch.cuda.set_device(device)
    group = join_group(rank, WORLD, rendezvous, device, ExchangeShape(torch.bfloat16, HIDDEN, ROWS, VOCABULARY))
    assert isinstance(group, DistributedGroup)
    return group


def add_sums(group: DistributedGroup, rank: int) -> tuple[list[torch.Tensor], list[bool]]:
    """Join some partial sums to a residual stream; return it after each, and whether it and its norm are right."""
    streams, are_right = [], []
    weight = torch.full((HIDDEN,), 0.5, device=torch.device("cuda", gpu_of(rank))).bfloat16()
    for call, tokens in enumerate((1, 700, 5, 1, 64, 64, 65, 700)):
        generator = torch.Generator().manual_seed(call)
        parts = torch.randn(WORLD, tokens, HIDDEN, generator=generator).bfloat16().to(weight.device)
        hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().to(weight.device)
        expected = hidden.float() + parts.float().sum(0)
        joined = group.joined(hidden)
        if joined is None:
            return [], [False]
        joined.place(hidden).copy_(parts[rank])
        normed = joined.add(hidden, weight, 1e-6)
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * 0.5
        are_right += [
            torch.allclose(wide, expected, atol=5e-2, rtol=1e-2),
            torch.allclose(normed.float(), scaled, atol=2e-2, rtol=1e-2),
        ]
        streams.append(hidden.cpu())
    return streams, are_right


def part(elements: int, rank: int) -> torch.Tensor:
    return (torch.arange(elements, device=torch.device("cuda", gpu_of(rank))) % 60 + rank).bfloat16()


def exchange(rank: int, world_size: int, rendezvous: str) -> dict[str, object]:
    group = join(rank, rendezvous)
    expected = {elements: 2 * part(elements, rank) + (1 - 2 * rank) for elements in ELEMENTS}
    sums = [torch.equal(group.sum(part(elements, rank)), whole) for elements, whole in expected.items()]
    placed = []
    for elements, whole in expected.items():
        # Twice: what is summed first must not be written over before all have read it.
        for _ in range(2):
            place = group.place_for(part(elements, rank))
            given = part(elements, rank) if place is None else place.copy_(part(elements, rank))
            placed.append(torch.equal(group.sum(given), whole))
    shared = group._shared
    methods = []
    if shared is not None:
        for method in (Method.ONE_STAGE, Method.TWO_STAGES):
            for elements in ELEMENTS[:4]:
                for place in (torch.empty_like(part(elements, rank)), shared._sums[:elements]):
                    summed = shared._sum(method, place.copy_(part(elements, rank)))
                    methods.append(summed is not None and torch.equal(summed, expected[elements]))
    streams, joined = add_sums(group, rank)
    spans = split_evenly(VOCABULARY, world_size)
    columns = torch.arange(VOCABULARY, device=torch.device("cuda", gpu_of(rank))).bfloat16()
    gathered = []
    for rows in (1, ROWS, ROWS + 3):
        mine = columns[spans[rank].scaled(1)] + 10 * torch.arange(rows, device=columns.device)[:, None]
        gathered.append(group.gather_columns(mine.bfloat16(), spans).cpu())
    given = part(5120, rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed = group.sum(given * 1)
    for _ in range(3):
        graph.replay()
    captured = torch.equal(summed, expected[5120])
    # NCCL ends a group only after the graphs that use it.
    del graph
    group.close()
    return {
        "sums": sums, "placed": placed, "methods": methods, "gathered": gathered, "captured": captured,
        "shares": shared is not None, "streams": streams, "joined": joined,
    }  # fmt: skip


def compute(
    rank: int, world_size: int, rendezvous: str, model: str, changes: dict[str, object] | None = None
) -> torch.Tensor:
    fields = {"dtype": "bfloat16", "max_rows": 4, "device_pages": 64, **(changes or {})}
    spec = EngineSpec(
        model, rank=rank, world_size=world_size, rendezvous=rendezvous,
        **fields,  # type: ignore[arg-type]  # spec fields
    )  # fmt: skip
    runner = load_decoder(spec, lambda *_: None, RunnerOptions(device="cuda", device_index=gpu_of(rank)))
    driver = Driver(runner)
    row, ids = driver.open(60), random_ids(40, runner.capacity.vocabulary_size)
    parts = [ids[:23], ids[23:36], *([token] for token in ids[36:])]
    logits = torch.cat([driver.run([(row, part)]).cpu() for part in parts])
    assert runner.agree(True)
    runner.close()
    return logits


def test_collectives_of_two_gpu_ranks_give_the_right_results(fresh_ranks: Ranks) -> None:
    first, second = fresh_ranks.run(exchange, WORLD)
    for result in (first, second):
        assert result["shares"] == (torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1))
        assert all(result["sums"]), result["sums"]
        assert all(result["placed"]), result["placed"]
        assert all(result["methods"]), result["methods"]
        assert all(result["joined"]) or not result["shares"], result["joined"]
        assert result["captured"]
    for rows, whole in zip((1, ROWS, ROWS + 3), first["gathered"], strict=True):
        assert torch.equal(whole, (torch.arange(VOCABULARY) + 10 * torch.arange(rows)[:, None]).bfloat16())
    # All ranks hold the very same sums.
    assert all(torch.equal(one, other) for one, other in zip(first["streams"], second["streams"], strict=True))
    assert [tuple(nothing.shape) for nothing in second["gathered"]] == [(0, VOCABULARY)] * 3


def save_cut(directory: Path, model: str) -> None:
    """Write one of `CUT`, of sizes for which there are programs."""
    if model == LLAMA:
        save_tiny_llama(directory)
    elif model == AWQ:
        save_model(directory, "Llama", {**FAMILIES["llama biased"][1], **SHAPE})
        assert len(store_quantised(directory, SCHEMES[AWQ])) == 14
    else:
        name, options = FAMILIES[model]
        changes = {**OWN[model], **ALL_EXPERTS.get(model, {}), "initializer_range": 0.05}
        save_model(directory, name, {**options, **changes})


@pytest.mark.parametrize("model", [*CUT, *ALSO_CUT])
def test_two_ranks_compute_the_same_as_one(fresh_ranks: Ranks, model: str, tmp_path: Path) -> None:
    save_cut(tmp_path, model)
    changes = {"dtype": PRECISE.get(model, "bfloat16")}
    both, nothing = fresh_ranks.run(compute, WORLD, str(tmp_path), changes)
    (alone,) = fresh_ranks.run(compute, 1, str(tmp_path), changes)
    assert tuple(nothing.shape) == (0, alone.shape[1])
    assert float((both - alone).norm() / alone.norm()) < TOLERANCES.get(model, TOLERANCE)


@pytest.mark.parametrize("changes", [{"expert_parallel": True}, {"stages": 2}])
def test_mixtures_of_two_ranks_compute_the_same_as_of_one(
    fresh_ranks: Ranks, changes: dict[str, object], tmp_path: Path
) -> None:
    # All experts are chosen: roundings change no choice.
    name, options = FAMILIES["qwen3 moe"]
    save_model(tmp_path, name, {**options, "num_experts": 2, "initializer_range": 0.05})
    results = fresh_ranks.run(compute, WORLD, str(tmp_path), changes)
    (alone,) = fresh_ranks.run(compute, 1, str(tmp_path))
    together = results[-1 if "stages" in changes else 0]
    assert float((together - alone).norm() / alone.norm()) < TOLERANCE


@pytest.mark.parametrize("changes", [{}, {"expert_parallel": True}])
def test_mixtures_in_int8_of_two_ranks_compute_the_same_as_of_one(
    fresh_ranks: Ranks, changes: dict[str, object], tmp_path: Path
) -> None:
    name, options = FAMILIES["qwen3 moe"]
    # All experts are chosen: roundings change no choice.
    few = {"moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 2, "initializer_range": 0.05}
    save_model(tmp_path, name, {**options, **SHAPE, **few})
    store_quantised(tmp_path, SCHEMES["int8"])
    together, _ = fresh_ranks.run(compute, WORLD, str(tmp_path), changes)
    (alone,) = fresh_ranks.run(compute, 1, str(tmp_path))
    # Ranks scale their own parts of the activations.
    assert float((together - alone).norm() / alone.norm()) < 2 * TOLERANCE


def compute_shared(rank: int, world_size: int, rendezvous: str, model: str) -> torch.Tensor | None:
    """Compute a prompt on group 0 of those that share experts; the others have no tokens. With one group, alone."""
    spec = EngineSpec(
        model, dtype="bfloat16", max_rows=4, device_pages=64, data_parallel_rank=rank, data_parallel_size=world_size,
        data_parallel_rendezvous=rendezvous if world_size > 1 else "",
    )  # fmt: skip
    runner = load_decoder(spec, lambda *_: None, RunnerOptions(device="cuda", device_index=gpu_of(rank)))
    logits = None
    if rank == 0:
        driver = Driver(runner)
        row, ids = driver.open(60), random_ids(40, runner.capacity.vocabulary_size)
        parts = [ids[:23], ids[23:36], *([token] for token in ids[36:])]
        logits = torch.cat([driver.run([(row, part)]).cpu() for part in parts])
    if runner.pass_calls is not None:
        # Until no rank has tokens left.
        runner.pass_calls.load_together(runner.join_pass)
        assert runner.agree(True)
        assert runner.expert_counts is not None
        assert sum(runner.expert_counts.read().tokens) > 0
    runner.close()
    return logits


@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral", "deepseek v3"])
def test_two_ranks_that_share_experts_compute_the_same_as_one(fresh_ranks: Ranks, family: str, tmp_path: Path) -> None:
    # All experts are chosen: roundings change no choice.
    name, options = FAMILIES[family]
    few = {"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    changes = {key: value for key, value in few.items() if key in options}
    if family == "deepseek v3":
        # The sizes for which there are programs.
        changes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "hidden_size": 64}
    save_model(tmp_path, name, {**options, **changes, "initializer_range": 0.05})
    together, nothing = fresh_ranks.run(compute_shared, WORLD, str(tmp_path))
    (alone,) = fresh_ranks.run(compute_shared, 1, str(tmp_path))
    assert nothing is None
    assert float((together - alone).norm() / alone.norm()) < TOLERANCE
