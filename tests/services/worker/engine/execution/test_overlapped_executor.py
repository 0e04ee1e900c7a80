"""Resident rows and passes of fixed sizes, against a runner that verifies every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.prompt_logprobs import PromptLogprobs
from common.steps import EngineSpec, StepPlan
from common.types import AdapterSlot, FinishReason, SamplingParams, StepId
from services.worker.engine.execution.interface import OutOfMemoryError
from tests.fakes.model_runner import PAGE_SIZE, CheckingRunner
from tests.fakes.simulated_worker import VOCABULARY, expected_output, next_token
from tests.services.worker.engine.execution.test_overlapped_runner import lives
from tests.services.worker.engine.overlapped_worker import OverlappedHarness, OverlappedWorker
from tests.services.worker.engine.scenario import GREEDY, chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.model.batch import ForwardBatch

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.execution.decode_graphs import decode_capture_sizes
from services.worker.engine.execution.out_of_memory import chunk_halves
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.pass_graphs import PassGraphs
from services.worker.engine.plans.passes import Chunks, make_pass
from services.worker.engine.plans.plan import PlanLimits, apply_bookkeeping
from services.worker.engine.plans.rows import RowStates

# The runner that checks everything is on the CPU, where only Triton's interpreter can reach its rows.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")

PROMPT = [11, 12, 13, 14, 15]


class ResidentCheckingRunner(CheckingRunner):
    """Takes the padding out of a batch before it is checked."""

    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        return super().logits(hidden).half()

    def agree(self, holds: bool) -> bool:
        return holds

    def compute(self, batch):  # type: ignore[no-untyped-def]  # as `OverlappedModel.compute`
        if batch.table_rows is None:
            return self.forward(batch).half()
        live = batch.table_rows != batch.page_table.shape[0] - 1
        count = int(live.sum())
        logits = torch.zeros(live.shape[0], VOCABULARY, dtype=torch.float16)
        plain = replace(
            batch,
            token_ids=batch.token_ids[live],
            positions=batch.positions[live],
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            key_lengths=batch.key_lengths[live],
            page_table=batch.page_table[batch.table_rows[live].long()],
            write_slots=batch.write_slots[live],
            sample_indices=torch.arange(count),
            decode_rows=count,
            max_key_length=int(batch.key_lengths[live].max()),
            table_rows=None,
            window_table=None if batch.window_table is None else batch.window_table[batch.table_rows[live].long()],
            window_slots=None if batch.window_slots is None else batch.window_slots[live],
        )
        if self.capacity.window_pool is not None:
            padding = batch.window_slots[~live] // PAGE_SIZE
            assert bool((padding == self.capacity.window_pool.pages).all()), "there, too"
        assert bool((batch.write_slots[~live] // PAGE_SIZE == self.capacity.device_pages).all()), "padding has its page"
        logits[live] = self.forward(plain).half()
        return logits


def executor(runner: CheckingRunner, max_rows: int = 4) -> OverlappedExecutor:
    checking = ResidentCheckingRunner(runner.capacity)
    return OverlappedExecutor(checking, EngineSpec("none", max_rows=max_rows, page_size=PAGE_SIZE))


@settings(max_examples=8, deadline=None)
@given(st.data(), st.integers(14, 40), st.integers(1, 3))
def test_rows_on_the_device_follow_the_plans(data: st.DataObject, pages: int, depth: int) -> None:
    lives(OverlappedHarness(executor, pages=pages, depth=depth, target_plan_s=0.004), data)


@settings(max_examples=6, deadline=None)
@given(st.data(), st.integers(14, 40), st.integers(1, 3), st.integers(1, 24), st.integers(2, 12))
def test_rows_with_two_page_tables_follow_the_plans(
    data: st.DataObject, pages: int, depth: int, window: int, spare: int
) -> None:
    pool = (window + 4) // 4 + 2 + spare
    lives(
        OverlappedHarness(executor, pages=pages, depth=depth, target_plan_s=0.004, window=window, window_pool=pool),
        data,
    )


# What the tables on the device cannot hold: the host samples.
BEYOND = SamplingParams(temperature=0.0, frequency_penalty=0.001, top_logprobs=21)


def test_a_row_that_the_host_samples_waits_for_its_history_and_others_do_not() -> None:
    made = executor(CheckingRunner(), 8)
    one = OverlappedWorker(4000, PAGE_SIZE, 8, made)
    opens = (open_row(0, PROMPT, [0, 1, 2], total=9), open_row(3, [21, 22], [3, 4, 5], total=9, sampling=BEYOND))
    plan = StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5), chunk(3, 0, 2)), steps=9)
    results = one.run(plan) + one.settle()
    assert [tokens_by_row(result).get(0) for result in results[:4]] == expected_output(PROMPT, 9)
    assert [tokens_by_row(result)[3] for result in results] == expected_output([21, 22], 9)


def test_prompts_are_scored_while_other_rows_decode() -> None:
    prompt = list(range(40, 52))
    one = OverlappedWorker(4000, PAGE_SIZE, 8, executor(CheckingRunner(), 8))
    scored = replace(open_row(3, prompt, [6, 7, 8, 9], total=16), prompt_logprobs=PromptLogprobs(2, 1, (5,)))
    plans = [
        StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2, 3], total=16),), prefills=(chunk(0, 0, 5),)),
        StepPlan(StepId(2), opens=(scored,), prefills=(chunk(3, 0, 7),)),
        StepPlan(StepId(3), prefills=(chunk(3, 7, 5),)),
    ]
    results = [result for plan in plans for result in one.run(plan)] + one.settle()
    spans = [span for result in results for _, span in result.prompt_logprobs]
    assert [span.first for span in spans] == [3, 8]
    assert [token for span in spans for token in span.token_ids.tolist()] == prompt[3:]
    best = [token for span in spans for token in span.top_ids[:, 0].tolist()]
    assert best == [next_token(prompt[:position]) for position in range(3, 12)]
    assert [result.partial for result in results if result.prompt_logprobs] == [True, True]
    told = [tokens_by_row(result).get(0) for result in results if not result.partial]
    assert told == expected_output(PROMPT, 8)
    assert tokens_by_row(results[-1])[3] == next_token(prompt)


def test_prompts_with_adapters_run_kernel_by_kernel() -> None:
    for adapter, sizes in ((None, [5]), (AdapterSlot(0), [])):
        rows = RowStates(4, 64, PAGE_SIZE)
        opened = replace(open_row(0, PROMPT, [0, 1]), adapter=adapter)
        plan = StepPlan(StepId(1), opens=(opened,), prefills=(chunk(0, 0, 5),))
        chunks = apply_bookkeeping(plan, rows, PlanLimits(VOCABULARY, 4000, 64, adapters=1))
        with patch.object(PassGraphs, "prompt", return_value=None) as prompt:
            forward = make_pass(rows, rows.decoding(), chunks)
            executor(CheckingRunner())._compute_mixed(rows, forward, lambda: None)
        assert [call.args for call in prompt.call_args_list] == [(size,) for size in sizes]


def test_sampling_on_the_device_is_a_function_of_seed_and_position() -> None:
    hot = SamplingParams(temperature=5000.0, seed=1234567890123456789, top_k=400)
    outputs = []
    for row, first in ((0, 0), (6, 9)):
        one = OverlappedWorker(4000, PAGE_SIZE, 8, executor(CheckingRunner(), 8))
        opens = (open_row(row, PROMPT, range(first, first + 3), total=12, sampling=hot),)
        other = (open_row(2, [50, 51], [20, 21, 22], total=12, sampling=GREEDY),) if row else ()
        prefills = tuple(chunk(opened.row, 0, opened.token_ids.size) for opened in (*opens, *other))
        results = one.run(StepPlan(StepId(1), opens=(*opens, *other), prefills=prefills, steps=7)) + one.settle()
        outputs.append([tokens_by_row(result)[row] for result in results])
    assert outputs[0] == outputs[1]
    assert outputs[0] != expected_output(PROMPT, 12)


def test_a_pass_that_does_not_fit_into_memory_is_computed_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    made = executor(CheckingRunner(), 8)
    compute = made._runner.compute
    sizes: list[int] = []

    def short_of_memory(batch):  # type: ignore[no-untyped-def]
        sizes.append(batch.token_ids.shape[0])
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("made up")
        return compute(batch)

    monkeypatch.setattr(made._runner, "compute", short_of_memory)
    one = OverlappedWorker(4000, PAGE_SIZE, 8, made)
    opens = (open_row(0, PROMPT, [0, 1, 2], total=9), open_row(1, [31, 32, 33, 34, 35, 36], [3, 4, 5], total=9))
    (result,) = one.run(StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5), chunk(1, 0, 6)))) + one.settle()
    assert tokens_by_row(result) == {
        0: expected_output(PROMPT, 6)[0],
        1: expected_output([31, 32, 33, 34, 35, 36], 7)[0],
    }
    assert max(size for size in sizes if size <= 4) > 1


@pytest.mark.parametrize("where", ["compute", "choose", "choose on the host", "host memory"])
def test_decoding_rows_that_exceed_memory_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    made = executor(CheckingRunner(), 8)
    refusals: list[int] = []

    def short(owner: object, name: str, size_of: Callable[..., int], most: int) -> None:
        plain = getattr(owner, name)

        def wanting(*arguments, **options):  # type: ignore[no-untyped-def]
            if size_of(*arguments) > most:
                refusals.append(size_of(*arguments))
                raise torch.OutOfMemoryError("made up")
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, wanting)

    punished = replace(BEYOND, top_logprobs=20)
    asked = BEYOND if where == "choose on the host" else punished
    opens = tuple(
        open_row(row, [11 + row, 12, 13], [3 * row, 3 * row + 1, 3 * row + 2], total=9, sampling=asked)
        for row in range(3)
    )
    one = OverlappedWorker(4000, PAGE_SIZE, 8, made)
    results = one.run(StepPlan(StepId(1), opens=opens, prefills=tuple(chunk(row, 0, 3) for row in range(3))))
    match where:
        case "compute":
            short(made._runner, "compute", lambda batch: batch.decode_rows, 1)
        case "choose":
            short(made._sampler, "choose", lambda logits, *_others: len(logits), 1)
        case "choose on the host":
            short(made, "_sample_on_host", lambda _logits, _places, slots, _rows: slots.size, 1)
        case _:
            # Only once: all tokens of a pass come to the host together.
            short(made, "_host_memory", lambda _count: 5 - len(refusals), 4)
    results += one.run(StepPlan(StepId(2), steps=5)) + one.settle()
    for row in range(3):
        tokens = [tokens_by_row(result)[row] for result in results if row in tokens_by_row(result)]
        assert tokens == expected_output([11 + row, 12, 13], 9)
    assert refusals


def test_a_row_that_does_not_fit_alone_is_given_up_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = executor(CheckingRunner(), 8)
    compute = made._runner.compute
    lost = expected_output([31, 32, 33], 4)[0]

    def short_of_memory(batch):  # type: ignore[no-untyped-def]
        if lost in batch.token_ids.tolist():
            raise torch.OutOfMemoryError("made up")
        return compute(batch)

    monkeypatch.setattr(made._runner, "compute", short_of_memory)
    one = OverlappedWorker(4000, PAGE_SIZE, 8, made)
    opens = (open_row(0, PROMPT, [0, 1, 2], total=9), open_row(1, [31, 32, 33], [3, 4, 5], total=9))
    plan = StepPlan(StepId(1), opens=opens, prefills=(chunk(0, 0, 5), chunk(1, 0, 3)), steps=4)
    results = one.run(plan) + one.settle()
    assert [tokens_by_row(result)[0] for result in results] == expected_output(PROMPT, 9)
    assert [tokens_by_row(result).get(1) for result in results] == [lost, None, None, None]
    stops = [(result.substep, stop.row, stop.reason) for result in results for stop in result.stops if stop.row == 1]
    assert stops == [(1, 1, FinishReason.ERROR)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_of_several_ranks_does_not_split_a_batch_alone(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    checking = ResidentCheckingRunner(CheckingRunner().capacity)
    made = OverlappedExecutor(checking, EngineSpec("none", max_rows=4, page_size=PAGE_SIZE, world_size=2))

    compute = checking.compute
    refusals: list[ForwardBatch] = []

    def short_of_memory(batch: ForwardBatch) -> torch.Tensor:
        if phase == "prefill" or batch.decode_rows:
            refusals.append(batch)
            raise torch.OutOfMemoryError("made up")
        logits: torch.Tensor = compute(batch)  # type: ignore[no-untyped-call]  # as above
        return logits

    monkeypatch.setattr(checking, "compute", short_of_memory)
    one = OverlappedWorker(4000, PAGE_SIZE, 4, made)
    with pytest.raises(OutOfMemoryError):
        one.run(StepPlan(StepId(1), opens=(open_row(0, PROMPT, [0, 1, 2]),), prefills=(chunk(0, 0, 5),), steps=3))
    # A second try would find the other ranks elsewhere.
    assert len(refusals) == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).filter(lambda lengths: sum(lengths) > 1), st.data())
def test_halves_hold_the_same_tokens(lengths: list[int], data: st.DataObject) -> None:
    count = len(lengths)
    starts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    completes = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    no_drafts = np.zeros(count, np.int64)
    whole = Chunks(np.arange(count), starts, np.array(lengths), completes, np.zeros(count, np.bool_), no_drafts)
    first, second = chunk_halves(whole)
    parts = [
        (int(part.rows[i]), int(part.starts[i]) + token, bool(part.completes[i]) and token == part.lengths[i] - 1)
        for part in (first, second)
        for i in range(part.rows.size)
        for token in range(int(part.lengths[i]))
    ]
    assert parts == [
        (row, int(starts[row]) + token, bool(completes[row]) and token == lengths[row] - 1)
        for row in range(count)
        for token in range(lengths[row])
    ]
    assert min(first.lengths.min(), second.lengths.min()) >= 1
    assert abs(int(first.lengths.sum()) - int(second.lengths.sum())) <= 1


def test_decode_capture_sizes_cover_every_number_of_rows() -> None:
    assert decode_capture_sizes(1) == (1,)
    assert decode_capture_sizes(5) == (1, 2, 4, 5)
    assert decode_capture_sizes(256)[-1] == 256
    assert list(decode_capture_sizes(300)) == sorted(set(decode_capture_sizes(300)))
