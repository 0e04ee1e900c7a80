"""Groups that share the experts of a mixture, each with requests of its own: the same numbers as on one rank."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from common.errors import ConfigurationError
from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.interface import ExpertGroupError
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from services.worker.engine.parallel.expert_exchange import RowForm
from services.worker.engine.parallel.shards import Span, shards_of
from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import VOCABULARY, reference_logits, save_family
from tests.services.worker.engine.parallel.test_experts import SHAPE
from tests.services.worker.engine.parallel.test_stages import PAGES, assert_same, save_living
from tests.services.worker.engine.speculated_lives import (
    CONTEXT,
    PAGE_SIZE,
    ROWS,
    Library,
    Lives,
    Setting,
    random_world,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.steps import ExpertLoad
    from services.worker.engine.execution.engine import ModelEngine
    from services.worker.engine.model_runner import ModelRunner
    from services.worker.engine.parallel.pass_calls import QueuedPassCalls
    from tests.services.worker.engine.parallel.ranks import Ranks

# Each group has another one; the last group has no request at all.
PROMPTS = [random_ids(count, VOCABULARY, seed=count) for count in (40, 9, 17)]


def load_group(rank: int, ranks: int, rendezvous: str, model: str, **changes: object) -> ModelRunner:
    shared = {"data_parallel_rank": rank, "data_parallel_size": ranks, "data_parallel_rendezvous": rendezvous}
    return load(model, **{**shared, **changes})  # type: ignore[arg-type]  # spec fields


def join_the_rest(calls: QueuedPassCalls, join: Callable[[int], bool]) -> int:
    """Take part in passes until no rank has tokens left; return how many there were."""
    joined: list[int] = []
    calls.load_together(lambda number: joined.append(number) if join(number) else None)
    return len(joined)


def run_prompt(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Compute a prompt in two chunks and three given tokens; return the logits of each token."""
    driver = Driver(runner)
    row, half = driver.open(len(ids)), len(ids) // 2
    parts = [ids[:half], ids[half:-3], *([token] for token in ids[-3:])]
    return torch.cat([driver.run([(row, part)], all_tokens=True) for part in parts])


def compute(
    rank: int, ranks: int, rendezvous: str, model: str, changes: dict[str, object]
) -> tuple[torch.Tensor | None, ExpertLoad, int]:
    """Compute this group's prompt, and then take part in what others still compute."""
    runner = load_group(rank, ranks, rendezvous, model, **changes)
    logits = None if rank == ranks - 1 else run_prompt(runner, PROMPTS[rank])
    assert runner.pass_calls is not None
    joined = join_the_rest(runner.pass_calls, runner.join_pass)
    assert runner.agree(True)
    assert runner.expert_counts is not None
    load_of_rank = runner.expert_counts.read()
    runner.close()
    return logits, load_of_rank, joined


@pytest.mark.parametrize(
    ("family", "groups", "changes"),
    [
        ("mixtral", 2, {"backend": "compiled"}),
        ("qwen3 moe partly dense", 3, {"backend": "torch"}),
        pytest.param("qwen3 moe", 2, {"backend": "compiled", "host_pages": 8}, marks=pytest.mark.extended),
        pytest.param("deepseek v3", 4, {"backend": "compiled"}, marks=pytest.mark.extended),
        pytest.param("qwen2 moe", 2, {"backend": "torch"}, marks=pytest.mark.extended),
        pytest.param("gpt-oss", 2, {"backend": "compiled"}, marks=pytest.mark.extended),
        pytest.param("llama4", 2, {"backend": "torch"}, marks=pytest.mark.extended),
    ],
)
def test_groups_compute_the_same_as_one_rank(
    ranks: Ranks, family: str, groups: int, changes: dict[str, object], tmp_path: Path
) -> None:
    reference = save_family(tmp_path, family)
    results = ranks.run(compute, groups, str(tmp_path), changes)
    assert [logits is None for logits, _, _ in results] == [False] * (groups - 1) + [True]
    for ids, (logits, _, _) in zip(PROMPTS, results[:-1], strict=False):
        torch.testing.assert_close(logits, reference_logits(reference, ids), atol=3e-4, rtol=1e-4)
    # Five passes are as many as any group has; one without a request has joined all of them, perhaps the first in
    # loading.
    assert results[-1][2] >= 4
    loads = [each for _, each, _ in results]
    assert [each.first for each in loads] == sorted({each.first for each in loads})
    assert len({each.imbalance for each in loads}) == 1
    if "host_pages" not in changes:  # with a host tier, prefill was measured
        assert sum(sum(each.tokens) for each in loads) % sum(len(ids) for ids in PROMPTS[: groups - 1]) == 0


def live(rank: int, ranks: int, rendezvous: str, spec: EngineSpec, worlds: int) -> int:
    """Live worlds through with shared experts and alone, fewer on later ranks; return the number of equal tokens."""
    torch.set_num_threads(1)
    options = RunnerOptions(device="cpu", threads=1)

    def engine_of(its: EngineSpec) -> ModelEngine:
        engine = torch_engine(lambda spec, report: load_decoder(spec, report, options), Library())  # type: ignore[arg-type]  # a fake
        engine.configure(its, lambda *_: None)
        return engine

    alone = engine_of(spec)
    shared = replace(spec, data_parallel_rank=rank, data_parallel_size=ranks, data_parallel_rendezvous=rendezvous)
    engine, tokens = engine_of(shared), 0

    def again(its: ModelEngine) -> Callable[[int], ModelEngine]:
        def reset(_pages: int) -> ModelEngine:
            its.reset()
            return its

        return reset

    for seed in range(rank, worlds, 1 + rank):
        events = random_world(Random(100 * rank + seed), 10)
        expected = Lives(Setting(pages=PAGES), again(alone)).run(events, with_accidents=False)
        setting = Setting(pages=PAGES, draft=seed % 2 * 4, cache="shared")
        found = Lives(setting, again(engine)).run(events, with_accidents=True)
        assert_same(found, expected)
        tokens += sum(len(each.tokens) for each in found.values())
    calls = engine.pass_calls
    assert calls is not None
    join_the_rest(calls, engine.join_pass)  # type: ignore[arg-type]  # that of a decoder
    # None leaves while another one still waits for calls.
    dist.barrier()
    engine.close()
    alone.close()
    return tokens


@pytest.mark.parametrize(
    ("family", "groups"),
    [("qwen3 moe", 2), pytest.param("deepseek v3", 3, marks=pytest.mark.extended)],
)
def test_random_requests_of_uneven_groups_get_the_same_as_alone(
    ranks: Ranks, family: str, groups: int, tmp_path: Path
) -> None:
    save_living(tmp_path, family)
    spec = EngineSpec(
        str(tmp_path), dtype="float32", max_rows=ROWS, max_context=CONTEXT, page_size=PAGE_SIZE, device_pages=PAGES,
        max_step_tokens=48,
    )  # fmt: skip
    tokens = ranks.run(live, groups, spec, 3)
    assert min(tokens) > 20


def meet_again(rank: int, ranks: int, rendezvous: str, model: str, leaves: str) -> torch.Tensor | None:
    """Lose rank 1 and meet again at the same place; return the logits of rank 0 after that."""
    runner = load_group(rank, ranks, rendezvous, model)
    calls = runner.pass_calls
    assert calls is not None
    if rank == 1:
        if leaves == "as if killed":
            # Nobody is told; the others find out when it comes again, or in their next pass.
            dist.destroy_process_group()
        else:
            runner.close()
    else:
        try:
            assert leaves == "during a pass" or calls.next_call() is None
            run_prompt(runner, PROMPTS[0])
        except ExpertGroupError:
            runner.close()
        assert calls.next_call() is None
    again = load_group(rank, ranks, rendezvous, model)
    logits = run_prompt(again, PROMPTS[0]) if rank == 0 else None
    assert again.pass_calls is not None
    join_the_rest(again.pass_calls, again.join_pass)
    assert again.agree(True)
    again.close()
    return logits


@pytest.mark.parametrize("leaves", ["as if killed", "in order", "during a pass"])
def test_groups_meet_again_when_a_rank_has_left(ranks: Ranks, leaves: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, "mixtral")
    logits, _ = ranks.run(meet_again, 2, str(tmp_path), leaves)
    torch.testing.assert_close(logits, reference_logits(reference, PROMPTS[0]), atol=3e-4, rtol=1e-4)


def differ(rank: int, ranks: int, rendezvous: str, model: str) -> str:
    try:
        load_group(rank, ranks, rendezvous, model, dtype=("float32", "bfloat16")[rank]).close()
    except ConfigurationError as error:
        return f"{error} {dist.is_initialized()}"
    return "not refused"


def test_groups_with_other_types_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    save_family(tmp_path, "mixtral")
    for reason in ranks.run(differ, 2, str(tmp_path)):
        assert "differ in their model, dtype" in reason
        assert reason.endswith("False")


def test_each_group_has_whole_experts_and_all_else() -> None:
    spec = EngineSpec("m", data_parallel_size=2)
    shards = [shards_of(replace(spec, data_parallel_rank=rank), SHAPE, 0)[0][1] for rank in range(2)]
    assert [shard.experts for shard in shards] == [Span(0, 2), Span(2, 3)]
    assert all(shard.query_heads == Span(0, 4) and shard.expert_columns == Span(0, 16) for shard in shards)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {}, "scheduler.data_parallel: llama has no experts that groups could share"),
        ("mixtral", {"data_parallel_size": 9}, "experts, too few for 9 groups"),
        ("mixtral", {"world_size": 2, "rendezvous": "h:1"}, "have one worker each, not 2"),
        ("mixtral", {"adapter_slots": 2}, "scheduler.data_parallel and scheduler.adapters.slots=2"),
        ("mixtral", {"deterministic": True, "backend": "compiled"}, "not available with scheduler.data_parallel"),
        ("mixtral", {}, "scheduler.data_parallel.rendezvous"),
    ],
)
def test_what_groups_cannot_share_is_refused_by_name(
    family: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    save_family(tmp_path, family)
    with pytest.raises(ConfigurationError, match=named):
        load(tmp_path, **{"data_parallel_size": 2, **changes})  # type: ignore[arg-type]  # spec fields


def test_what_a_token_brings_arrives_as_it_was_sent() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        form = RowForm(hidden=6, choices=3, dtype=dtype, device=torch.device("cpu"))
        sent = torch.randn(5, 6).to(dtype), torch.randint(300, (5, 3)), torch.rand(5, 3).to(dtype)
        for own, arrived in zip(sent, form.unpack(form.pack(*sent)), strict=True):
            assert torch.equal(own, arrived)
            assert own.dtype == arrived.dtype
        assert [tuple(part.shape) for part in form.unpack(form.pack(*form.empty()))] == [(0, 6), (0, 3), (0, 3)]
