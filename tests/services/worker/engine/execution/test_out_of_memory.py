"""Memory that does not suffice: in a prompt, in decoding, in sampling, for one row alone, and with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import EngineSpec, RowStop, StepPlan, StepResult
from common.types import FinishReason, RowSlot, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution import synchronous_executor
from services.worker.engine.execution.interface import OutOfMemoryError
from services.worker.engine.execution.out_of_memory import is_out_of_memory
from services.worker.engine.execution.torch_model import TorchModel, torch_engine
from services.worker.engine.loader import load_decoder
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.sampling import sampler
from tests.fakes.model_runner import CheckingRunner, spec
from tests.fakes.simulated_worker import expected_output
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row
from tests.services.worker.engine.tiny_llama import save_tiny_llama
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.execution.engine import ModelEngine
    from services.worker.engine.model.batch import ForwardBatch
    from tests.services.worker.engine.parallel.ranks import Ranks

PROMPTS = [[11, 12, 13, 14, 15], [31, 32, 33, 34, 35, 36], [41, 42, 43]]
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.cuda.OutOfMemoryError("made up"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


class ShortRunner(CheckingRunner):
    """Has no memory for the batches that a test names."""

    def __init__(self, is_too_much: Callable[[ForwardBatch], bool], error: Exception = ERRORS[0]) -> None:
        super().__init__()
        self._is_too_much = is_too_much
        self._error = error
        self.refusals = 0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self._is_too_much(batch):
            self.refusals += 1
            raise self._error
        return super().forward(batch)


def configured(runner: CheckingRunner, **changes: object) -> ModelEngine:
    engine = torch_engine(lambda _spec, _report: runner)
    engine.configure(spec(**changes), lambda _fraction, _stage: None)
    return engine


def run(engine: ModelEngine, plan: StepPlan) -> list[StepResult]:
    results: list[StepResult] = []
    engine.execute(plan, results.append)
    return results


def plan_of(prompts: list[list[int]], steps: int) -> StepPlan:
    return StepPlan(
        StepId(1),
        opens=tuple(open_row(row, ids, [3 * row, 3 * row + 1, 3 * row + 2]) for row, ids in enumerate(prompts)),
        prefills=tuple(chunk(row, 0, len(ids)) for row, ids in enumerate(prompts)),
        steps=steps,
    )


def generated(results: list[StepResult], row: int) -> list[int]:
    return [tokens_by_row(result)[row] for result in results if row in tokens_by_row(result)]


def test_out_of_memory_errors_of_torch_and_numpy_are_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("error", ERRORS, ids=[f"{number}" for number in range(len(ERRORS))])
def test_a_prompt_that_does_not_fit_is_computed_in_parts(error: Exception) -> None:
    runner = ShortRunner(lambda batch: batch.token_ids.shape[0] > 4, error)
    results = run(configured(runner), plan_of(PROMPTS, 4))
    assert [generated(results, row) for row in range(3)] == [expected_output(ids, len(ids) + 4) for ids in PROMPTS]
    assert runner.refusals
    assert not any(result.stops for result in results)


def test_decoding_rows_that_do_not_fit_together_are_computed_in_parts() -> None:
    runner = ShortRunner(lambda batch: batch.decode_rows > 1)
    results = run(configured(runner), plan_of(PROMPTS, 4))
    assert [generated(results, row) for row in range(3)] == [expected_output(ids, len(ids) + 4) for ids in PROMPTS]
    assert runner.refusals


def test_a_pass_is_repeated_in_parts_where_its_sampling_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sampler.sample
    refusals = []

    def sample(logits, *others):  # type: ignore[no-untyped-def]  # as `sampler.sample`
        if logits.shape[0] > 1:
            refusals.append(logits.shape[0])
            raise torch.OutOfMemoryError("made up")
        return plain(logits, *others)

    monkeypatch.setattr(synchronous_executor, "sample", sample)
    results = run(configured(CheckingRunner()), plan_of(PROMPTS, 4))
    assert [generated(results, row) for row in range(3)] == [expected_output(ids, len(ids) + 4) for ids in PROMPTS]
    assert refusals


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_that_does_not_fit_alone_is_given_up_and_others_go_on(phase: str) -> None:
    def is_too_much(batch: ForwardBatch) -> bool:
        at = 32 if phase == "prefill" else expected_output(PROMPTS[1], 7)[0]
        return at in batch.token_ids.tolist()

    engine = configured(ShortRunner(is_too_much))
    results = run(engine, plan_of(PROMPTS, 4))
    for row in (0, 2):
        assert generated(results, row) == expected_output(PROMPTS[row], len(PROMPTS[row]) + 4)
    stops = [(result.substep, stop) for result in results for stop in result.stops]
    at = 0 if phase == "prefill" else 1
    assert stops == [(at, RowStop(RowSlot(1), FinishReason.ERROR))]
    assert len(generated(results, 1)) == at
    # The scheduler closes it in its own time.
    assert engine.open_rows == 3
    run(engine, StepPlan(StepId(2), closes=(RowSlot(1),)))
    assert engine.open_rows == 2


def test_a_later_chunk_of_a_row_given_up_is_harmless() -> None:
    engine = configured(ShortRunner(lambda batch: 12 in batch.token_ids.tolist()))
    opened = open_row(0, PROMPTS[0], [0, 1, 2])
    (first,) = run(engine, StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 3),)))
    assert first.stops == (RowStop(RowSlot(0), FinishReason.ERROR),)
    # Sent before the scheduler heard of it; what it brings is nobody's. A real model reads what was never written.
    engine._runner._executor._runner.forward = lambda batch: torch.zeros(1, 1000)  # type: ignore[union-attr]
    run(engine, StepPlan(StepId(2), prefills=(chunk(0, 3, 2),)))
    run(engine, StepPlan(StepId(3), closes=(RowSlot(0),)))
    assert engine.open_rows == 0


@pytest.mark.parametrize("error", ERRORS[1:3], ids=["device", "host"])
def test_one_of_several_ranks_reports_out_of_memory_without_a_retry(error: Exception) -> None:
    runner = ShortRunner(lambda batch: batch.token_ids.shape[0] > 4, error)
    engine = configured(runner, rank=0, world_size=2)
    with pytest.raises(OutOfMemoryError, match="14 tokens"):
        run(engine, plan_of(PROMPTS, 4))
    assert runner.refusals == 1


def test_any_failed_allocation_in_a_plan_raises_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = configured(CheckingRunner())
    monkeypatch.setattr(engine._runner, "run", lambda *_: np.empty(2**60, np.uint8))
    with pytest.raises(OutOfMemoryError):
        run(engine, plan_of(PROMPTS, 1))


def test_other_runtime_errors_are_not_reported_as_out_of_memory() -> None:
    engine = configured(ShortRunner(lambda _: True, RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(engine, plan_of(PROMPTS, 1))


LONG = [5, 17, 80, 33, 61, 2, 9, 44, 71, 23, 8, 12]


def short_rank(rank: int, world_size: int, rendezvous: str, model: str, phase: str) -> tuple[str, list[int]]:
    """Serve one plan for which rank 1 alone lacks memory, then the same in steps for which it has enough."""
    asked = EngineSpec(
        model, max_rows=2, max_context=64, max_step_tokens=32, device_pages=8, dtype="float32",
        rank=rank, world_size=world_size, rendezvous=rendezvous,
    )  # fmt: skip
    engine = torch_engine(
        lambda spec, report: load_decoder(spec, report, RunnerOptions(device="cpu", threads=1, backend="torch"))
    )
    engine.configure(asked, lambda _fraction, _stage: None)
    assert isinstance(engine._model, TorchModel)
    runner = engine._model.runner
    assert isinstance(runner, ModelRunner)
    forward = runner.forward

    def short_of_memory(batch: ForwardBatch) -> torch.Tensor:
        if (batch.token_ids.shape[0] > 6) if phase == "prefill" else (batch.decode_rows == 1):
            raise torch.OutOfMemoryError("made up")
        return forward(batch)

    if rank == 1:
        runner.forward = short_of_memory  # type: ignore[method-assign]
    opened = open_row(0, LONG, [3, 1], total=len(LONG) + 6)
    try:
        run(engine, StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, len(LONG)),), steps=6))
        told = "nothing"
    except Exception as error:  # noqa: BLE001  (whichever it is, is the question)
        told = type(error).__name__
    # What the executor does, which wakes the other rank. The scheduler configures ranks anew once it has lost them all;
    # one that came sooner would meet the group that the other has not left yet.
    engine.close()
    Path(model, f"{phase}-{rank}-has-left").touch()
    wait_until(lambda: len(list(Path(model).glob(f"{phase}-*-has-left"))) == world_size)
    engine.configure(asked, lambda _fraction, _stage: None)
    first = StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 6),))
    then = StepPlan(StepId(2), prefills=(chunk(0, 6, 6),), steps=6)
    results = run(engine, first) + run(engine, then)
    engine.close()
    return told, [int(token) for result in results for token in result.token_ids]


@pytest.mark.parametrize("phase", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def test_two_ranks_recover_after_one_runs_out_of_memory(ranks: Ranks, phase: str, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    engine = torch_engine(lambda asked, report: load_decoder(asked, report, RunnerOptions(threads=1)))
    engine.configure(
        EngineSpec(str(tmp_path), max_rows=2, max_context=64, max_step_tokens=32, device_pages=8, dtype="float32"),
        lambda _fraction, _stage: None,
    )
    opened = open_row(0, LONG, [3, 1], total=len(LONG) + 6)
    alone = run(engine, StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, len(LONG)),), steps=6))
    (of_first, tokens), (of_second, others) = ranks.run(short_rank, 2, str(tmp_path), phase)
    assert of_second == "OutOfMemoryError"
    # It waited for the other in a collective, and is told that the other has gone.
    assert of_first not in ("nothing", "OutOfMemoryError")
    assert tokens == [int(token) for result in alone for token in result.token_ids]
    assert others == []
