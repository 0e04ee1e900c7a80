"""Two stages of a pipeline on GPUs, with CUDA graphs: the same answers as of a model that is not cut."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from common.steps import EngineSpec, SleepLevel, SleepPart
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.torch_model import torch_engine
from services.worker.engine.loader import load_decoder
from tests.services.worker.engine.families import FAMILIES, save_model
from tests.services.worker.engine.parallel import staged_plans
from tests.services.worker.engine.parallel.ranks import Ranks, free_address, gpu_of, share_gpus
from tests.services.worker.engine.parallel.staged_plans import Answers, assert_same_answers
from tests.services.worker.engine.speculated_lives import VOCABULARY, Library

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.worker.engine.execution.engine import ModelEngine

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="deterministic mode needs a Hopper GPU")]

STAGES = 2
# Seconds after which a process ends whose thread still waits on the device.
PATIENCE_S = 8


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have not met yet: on GPUs they can only once."""
    ranks = Ranks()
    yield ranks
    ranks.stop()


def save_small(directory: Path) -> None:
    """Write a model of a shape that the programs of GPUs serve, whose likeliest tokens stand out."""
    name, options = FAMILIES["llama"]
    changes = {"head_dim": 64, "hidden_size": 128, "vocab_size": VOCABULARY, "initializer_range": 0.2}
    save_model(directory, name, {**options, **changes})


def engine_on(
    rank: int, world_size: int, rendezvous: str, model: str, stages: int, *, graphs: bool = True
) -> ModelEngine:
    """Return the configured engine of a rank, whose rows get the same bits in every batch."""
    torch.cuda.set_device(gpu_of(rank))
    spec = EngineSpec(
        model, dtype="bfloat16", max_rows=staged_plans.ROWS, max_context=64, page_size=staged_plans.PAGE_SIZE,
        max_step_tokens=64, device_pages=staged_plans.PAGES, rank=rank, world_size=world_size, rendezvous=rendezvous,
        stages=stages, deterministic=True,
    )  # fmt: skip
    options = RunnerOptions(device="cuda", device_index=gpu_of(rank), graphs=graphs)
    engine = torch_engine(lambda its, report: load_decoder(its, report, options), Library())  # type: ignore[arg-type]  # a fake
    engine.configure(spec, lambda *_: None)
    return engine


def answer(
    rank: int, world_size: int, rendezvous: str, model: str, stages: int, known: dict[int, list[int]] | None,
    graphs: bool,
) -> tuple[list[Answers], int]:  # fmt: skip
    """Carry the plans out, several stages twice, asleep in between; return the answers and the replayed graphs."""
    engine = engine_on(rank, world_size, rendezvous, model, stages, graphs=graphs)
    replays: Counter[str] = Counter()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        replays["all"] += 1
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        answers = [staged_plans.answer(engine, known)]
    if stages > 1:
        engine.reset()
        engine.sleep(SleepLevel.HOST, keeps_host_pages=False)
        assert engine.wake(tuple(SleepPart), lambda *_: None)
        answers.append(staged_plans.answer(engine, known))
    torch.cuda.synchronize()
    if world_size > 1:
        torch.distributed.barrier()
    engine.close()
    return answers, replays["all"]


@pytest.mark.parametrize("graphs", [True, False])
def test_two_stages_on_gpus_answer_as_one_does(fresh_ranks: Ranks, graphs: bool, tmp_path: Path) -> None:
    save_small(tmp_path)
    (((expected,), alone),) = fresh_ranks.run(answer, 1, str(tmp_path), 1, None, True)
    assert alone > 0
    (nothing, first), (found, last) = fresh_ranks.run(answer, STAGES, str(tmp_path), STAGES, expected.tokens, graphs)
    assert not any(each.tokens for each in nothing), "the first stage reports no tokens"
    assert len(found) == 2
    for each in found:
        # One GPU computes the rows of both micro-batches together. Log probabilities are reported by other programs.
        assert_same_answers(each, expected, 1e-6)
    if not graphs:
        assert first == last == 0
        return
    # One graph for the layers of each step of each micro-batch that decodes; on the last stage one more, which samples.
    assert first > 25
    assert last > first + 15


def fail(rank: int, rendezvous: str, model: str, failing: int) -> None:
    """Carry plans out until this rank fails, and ends its process, or notices that the other one has."""
    share_gpus(rank, STAGES)
    engine = engine_on(rank, STAGES, rendezvous, model, STAGES)
    started = threading.Event()

    def watch() -> None:
        """End a process whose thread waits on the device, as a worker does when its stream of plans ends."""
        started.wait()
        time.sleep(PATIENCE_S)
        os._exit(1)

    def before(number: int) -> None:
        if number == 8:
            if rank == failing:
                os._exit(75)
            started.set()

    threading.Thread(target=watch, daemon=True).start()
    try:
        staged_plans.answer(engine, None, before)
    except RuntimeError:
        os._exit(2)
    os._exit(0)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_ever_for_one_that_has_failed(failing: int, tmp_path: Path) -> None:
    save_small(tmp_path)
    context = multiprocessing.get_context("spawn")
    rendezvous = free_address()
    processes = [
        context.Process(target=fail, args=(rank, rendezvous, str(tmp_path), failing)) for rank in range(STAGES)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert statuses[failing] == 75
    # The first stage waits for tokens on the host, where it notices; the last one may be in the middle of a pass.
    assert statuses[1 - failing] not in (None, 0)
