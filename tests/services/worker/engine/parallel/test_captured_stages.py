"""Stages with the executors of GPUs, on CPUs: sampling on the device, replays between receiving and sending."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec, SleepLevel, SleepPart
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.parallel import staged_plans
from tests.services.worker.engine.parallel.staged_plans import Answers, assert_same_answers
from tests.services.worker.engine.parallel.test_stages import PAGES, live, save_living
from tests.services.worker.engine.speculated_lives import CONTEXT, PAGE_SIZE, ROWS, Library

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

# Models are on the CPU, where only Triton's interpreter can reach their rows.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")


def live_captured(
    rank: int, world_size: int, rendezvous: str, spec: EngineSpec, seeds: Sequence[int], mailbox: Path
) -> tuple[int, Counter[str]]:
    """Live worlds through with captured stages, and on one rank; return the number of tokens, and of replays."""
    # Imported here: processes that run other tests do without Triton.
    from tests.services.worker.engine.parallel.captured import REPLAYS, captured_stages

    REPLAYS.clear()
    with contextlib.ExitStack() as stack:
        for patched in captured_stages():
            stack.enter_context(patched)
        tokens = live(rank, world_size, rendezvous, spec, seeds, mailbox)
    return tokens, Counter(REPLAYS)


def lived(
    ranks: Ranks, model: Path, family: str, world_size: int, stages: int, worlds: int
) -> list[tuple[int, Counter[str]]]:
    """Live worlds through with a model of a family; return the result of each rank."""
    save_living(model, family)
    spec = EngineSpec(
        str(model), dtype="float32", max_rows=ROWS, max_context=CONTEXT, page_size=PAGE_SIZE, device_pages=PAGES,
        max_step_tokens=48, stages=stages,
    )  # fmt: skip
    return ranks.run(live_captured, world_size, spec, range(worlds), model / "mail")


def check(results: list[tuple[int, Counter[str]]], world_size: int, stages: int, least: int) -> None:
    """Assert that enough tokens were the same, and that ranks replayed what they have to."""
    sampler = world_size - world_size // stages
    assert results[sampler][0] > least
    replays = [counts for _, counts in results]
    assert len({counts["compute"] for counts in replays}) == 1
    assert replays[0]["compute"] > least / ROWS
    for rank, counts in enumerate(replays):
        kinds = set(counts) - {"compute"}
        assert bool(kinds) == (rank >= sampler), "the last stage chooses tokens"
    assert replays[sampler]["processed, reported"] > 0


def answer_as_stage(
    rank: int, world_size: int, rendezvous: str, model: str, stages: int, known: dict[int, list[int]] | None,
    sleeps: bool,
) -> tuple[Answers, Counter[str]]:  # fmt: skip
    """Carry out the plans of a pipeline, captured if there are several stages; return the answers and the replays.

    If it `sleeps`, these are what there is after it has slept and is captured again.
    """
    from tests.services.worker.engine.parallel.captured import REPLAYS, captured_stages

    torch.set_num_threads(1)
    spec = EngineSpec(
        model, dtype="float32", max_rows=ROWS, max_context=64, page_size=staged_plans.PAGE_SIZE, max_step_tokens=48,
        device_pages=staged_plans.PAGES, rank=rank, world_size=world_size, rendezvous=rendezvous, stages=stages,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patched in captured_stages():
            stack.enter_context(patched)
        options = RunnerOptions(device="cpu", threads=1)
        engine = torch_engine(lambda its, report: load_decoder(its, report, options), Library())  # type: ignore[arg-type]  # a fake
        engine.configure(spec, lambda *_: None)
        if sleeps:
            staged_plans.answer(engine, known)
            engine.reset()
            engine.sleep(SleepLevel.HOST, keeps_host_pages=False)
            assert engine.wake(tuple(SleepPart), lambda *_: None)
        REPLAYS.clear()
        answers = staged_plans.answer(engine, known)
        # A rank that leaves takes with it what the next stage has not received yet.
        if world_size > 1:
            torch.distributed.barrier()
        engine.close()
    return answers, Counter(REPLAYS)


@pytest.mark.parametrize(
    ("world_size", "sleeps"),
    [(2, False), pytest.param(2, True, marks=pytest.mark.extended), pytest.param(4, False, marks=pytest.mark.extended)],
)
def test_captured_stages_answer_as_one_rank_does(ranks: Ranks, world_size: int, sleeps: bool, tmp_path: Path) -> None:
    save_living(tmp_path, "llama")
    ((expected, nothing),) = ranks.run(answer_as_stage, 1, str(tmp_path), 1, None, False)
    assert not nothing, "a model in one stage is not captured here"
    results = ranks.run(answer_as_stage, world_size, str(tmp_path), 2, expected.tokens, sleeps)
    sampler = world_size // 2
    assert_same_answers(results[sampler][0], expected, 2e-4)
    for rank, (answers, replays) in enumerate(results):
        assert bool(answers.tokens) == (rank == sampler)
        # Each plan without chunks or drafts is replayed, step by step, until its rows have ended.
        assert replays["compute"] > 25
        kinds = set(replays) - {"compute"}
        assert bool(kinds) == (rank >= sampler), "the last stage chooses tokens"
    assert {"filtered", "processed", "processed, reported"} & set(results[sampler][1])


@pytest.mark.extended
def test_random_requests_get_the_same_from_two_captured_stages(ranks: Ranks, tmp_path: Path) -> None:
    check(lived(ranks, tmp_path, "qwen3", 2, 2, worlds=2), 2, 2, least=200)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "world_size", "stages"), [("llama", 3, 3), ("llama biased", 4, 2), ("gemma2", 2, 2), ("qwen3.5", 2, 2)]
)
def test_random_requests_get_the_same_from_captured_stages_of_every_kind(
    ranks: Ranks, family: str, world_size: int, stages: int, tmp_path: Path
) -> None:
    check(lived(ranks, tmp_path, family, world_size, stages, worlds=2), world_size, stages, least=150)
