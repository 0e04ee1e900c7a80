"""Plans of the real scheduler on the real engine, where grammars force tokens: the outputs are those of sampling."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.steps import JumpLimit, StepPlan
from common.types import FinishReason, RequestId, RowSlot, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.torch_model import TorchModel, torch_engine
from services.worker.engine.grammars.matcher import mask_words
from tests.fakes.grammar_library import FakeLibrary
from tests.fakes.model_runner import CheckingRunner, spec
from tests.fakes.simulated_worker import VOCABULARY, SimulatedWorker, next_token
from tests.services.scheduler.core.harness import BOUND, STOP_ID, Harness, make_request
from tests.services.worker.engine.scenario import chunk, open_row, tokens_by_row

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from common.grammars import Grammar
    from common.steps import EngineCapacity, StepResult
    from services.worker.engine.grammars.matcher import Mask
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.plans.rows import RowStates

CONTEXT = 60
PROMPT = [11, 12, 13, 14, 15]


def certain(output: list[int]) -> int | None:
    """What the grammar leaves behind an output, if that is one token only: the end comes now and then."""
    digest = zlib.crc32(np.array(output, np.int32).tobytes())
    if digest % 40 == 1:
        return STOP_ID
    return digest // 40 % VOCABULARY if digest % 3 else None


def expected(prompt: list[int], max_tokens: int, stops: tuple[int, ...] = (STOP_ID,)) -> list[int]:
    """What sampling one token after the other gives."""
    output: list[int] = []
    while len(output) < max_tokens:
        forced = certain(output)
        output.append(next_token([*prompt, *output]) if forced is None else forced)
        if output[-1] in stops:
            break
    return output


class Certainty:
    """A matcher that goes by `certain`."""

    is_terminated = False

    def __init__(self) -> None:
        self.output: list[int] = []

    def accept(self, token_id: int) -> bool:
        self.output.append(token_id)
        return True

    def mask(self) -> Mask:
        only = certain(self.output)
        mask = np.full(mask_words(VOCABULARY), -1 if only is None else 0, np.int32)
        if only is not None:
            mask.view(np.uint32)[only >> 5] = 1 << (only & 31)
        return mask

    def spelling(self, mask: Mask) -> None:
        return None


class Library(FakeLibrary):
    def matcher(self, grammar: Grammar) -> Certainty:
        return Certainty()


class EngineWorker(SimulatedWorker):
    """Runs plans on an engine whose runner checks every batch."""

    def __init__(
        self, pages: int, runner: Callable[[EngineCapacity], CheckingRunner] = CheckingRunner, rank: int = 0
    ) -> None:
        super().__init__(pages, 4)
        capacity = replace(CheckingRunner().capacity, device_pages=pages, max_context=CONTEXT)
        self.engine = torch_engine(lambda _spec, _report: runner(capacity), Library())  # type: ignore[arg-type]  # a fake
        asked = spec(max_step_tokens=40, rank=rank, world_size=2 if rank else 1)
        assert self.engine.configure(asked, lambda *_: None).jumps_forward is (rank == 0)

    @property
    def table(self) -> RowStates:
        assert self.engine._runner is not None
        return self.engine._runner.rows

    def run(self, plan: StepPlan) -> list[StepResult]:
        results: list[StepResult] = []
        self.engine.execute(plan, results.append)
        # Passes take long enough for drafts to pay.
        return [replace(result, compute_us=20_000) for result in results]


class EngineHarness(Harness):
    def __init__(self, **options: object) -> None:
        fields: dict[str, object] = {"page_size": 4, "max_context": CONTEXT, "max_step_tokens": 40, **options}
        super().__init__(**fields)  # type: ignore[arg-type]  # whatever a test wants to change
        self.worker = EngineWorker(self.config.device_pages)

    def lose_workers(self, *, engine_failed: bool = False) -> None:
        super().lose_workers(engine_failed=engine_failed)
        self.worker = EngineWorker(self.config.device_pages)


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(16, 60),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.004]),
    st.sampled_from([0, 1, 3, 16]),
    st.sampled_from([0, 1, 6]),
)
def test_jumping_and_drafting_rows_keep_their_outputs_through_aborts_and_lost_workers(
    data: st.DataObject, pages: int, depth: int, target_plan_s: float, jump: int, draft: int
) -> None:
    harness = EngineHarness(
        pages=pages, depth=depth, target_plan_s=target_plan_s, jump_tokens=jump, cache="shared", draft_tokens=draft
    )
    wanted: dict[str, tuple[list[int], int, int]] = {}
    aborted = set()
    for number in range(data.draw(st.integers(1, 8))):
        prompt = [(13 * i + data.draw(st.integers(0, 1))) % 900 + 10 for i in range(data.draw(st.integers(1, 25)))]
        name, tokens, n = f"r{number}", data.draw(st.integers(1, 25)), data.draw(st.sampled_from([1, 1, 3]))
        request = make_request(name, prompt, max_tokens=tokens, n=n, grammar=BOUND)
        assert harness.core.submit(request, 0.0).rejected is None
        wanted[name] = prompt, tokens, n
        for _ in range(data.draw(st.integers(0, 6))):
            harness.plan()
            harness.result()
        if data.draw(st.integers(0, 6)) == 0:
            name = data.draw(st.sampled_from(sorted(wanted)))
            if harness.core.abort(RequestId(name)):
                aborted.add(name)
        if data.draw(st.integers(0, 15)) == 0:
            harness.lose_workers()
    harness.run()
    for name in wanted.keys() - aborted:
        prompt, tokens, n = wanted[name]
        for index in range(n):
            assert harness.outputs[name, index] == expected(prompt, tokens)
    harness.check_accounts()
    harness.audit()


class CrampedRunner(CheckingRunner):
    """Has memory for three tokens of a pass."""

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        if len(batch.token_ids) > 3:
            raise MemoryError("can't allocate memory")
        return super().hidden_states(batch)


@pytest.mark.parametrize("draft", [0, 6])
def test_forced_and_drafted_tokens_are_computed_in_parts_when_memory_is_short(draft: int) -> None:
    harness = EngineHarness(pages=80, jump_tokens=16, draft_tokens=draft)
    harness.worker = EngineWorker(80, CrampedRunner)
    prompts = [[salt, *PROMPT] for salt in range(4)]
    for time in range(2):
        for index, prompt in enumerate(prompts):
            harness.core.submit(make_request(f"r{time}{index}", prompt, max_tokens=25, grammar=BOUND), 0.0)
        harness.run()
        outputs = [harness.outputs[f"r{time}{index}", 0] for index in range(4)]
        assert outputs == [expected(prompt, 25) for prompt in prompts]
    assert harness.core.jumped_tokens > 10
    assert any(plan.drafts for plan in harness.plans) == (draft > 0)


@dataclass
class TellingRunner(CheckingRunner):
    """Writes down what rank 0 tells the others."""

    told: list[torch.Tensor] = field(default_factory=list)

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        self.told.append(token_ids)
        return token_ids


@dataclass
class ToldRunner(TellingRunner):
    """Is told that, in the place of what it has."""

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        told = self.told.pop(0)
        assert (token_ids.shape, token_ids.dtype) == (told.shape, told.dtype), "ranks exchange equal shapes"
        return told


@pytest.mark.parametrize("draft", [0, 6])
@pytest.mark.parametrize("target_plan_s", [0.0, 0.004])
def test_other_ranks_follow_by_the_tokens_that_they_receive(target_plan_s: float, draft: int) -> None:
    told: list[torch.Tensor] = []
    harness = EngineHarness(pages=80, jump_tokens=16, target_plan_s=target_plan_s, draft_tokens=draft)
    first = harness.worker = EngineWorker(80, partial(TellingRunner, told=told))
    for index in range(8):
        grammar = BOUND if index % 4 else None
        prompt = [index % 4, *PROMPT]
        harness.core.submit(make_request(f"r{index}", prompt, max_tokens=25, grammar=grammar), 0.0)
    harness.run()
    assert harness.core.jumped_tokens > 10
    assert (harness.core.speculation.accepted_tokens > 10) == (draft > 0)
    second = EngineWorker(80, partial(ToldRunner, told=told), rank=1)
    results = [result for plan in harness.plans for result in second.run(plan)]
    assert len(results) >= len(harness.plans) > 4
    assert all(result.rows.size == result.accepted_rows.size == result.forced_rows.size == 0 for result in results)
    assert not told
    theirs, ours = second.table, first.table
    assert theirs.lengths.tolist() == ours.lengths.tolist()
    known = [length for length in ours.lengths.tolist() if length]
    assert len(known) == 4
    for row, length in enumerate(known):
        # Beyond it are rejected drafts.
        assert theirs.token_ids[row, :length].tolist() == ours.token_ids[row, :length].tolist()


@pytest.fixture
def worker() -> EngineWorker:
    return EngineWorker(64)


def opened(
    worker: EngineWorker, most: int, *, total: int = 40, pages: int = 12, stop: tuple[int, ...] = ()
) -> StepPlan:
    row = open_row(
        0, PROMPT, range(pages), total=total, stop=stop, sampling=make_request("", [1], grammar=BOUND).options.sampling
    )
    jumps = (JumpLimit(RowSlot(0), most),) if most else ()
    return StepPlan(StepId(1), opens=(row,), prefills=(chunk(0, 0, len(PROMPT)),), jumps=jumps)


def written(results: list[StepResult]) -> list[int]:
    ids: list[int] = []
    for result in results:
        ids += tokens_by_row(result).values()
        assert set(result.forced_rows.tolist()) <= {0}
        ids += result.forced_token_ids.tolist()
    return ids


def run_length() -> int:
    """How many tokens are forced behind the first one."""
    output = expected(PROMPT, 40, ())
    return next(index for index in range(1, 40) if certain(output[:index]) is None) - 1


def test_a_row_computes_its_forced_tokens_in_one_pass(worker: EngineWorker) -> None:
    length = run_length()
    assert length >= 1, "else this test shows nothing"
    first = worker.run(opened(worker, 40))
    assert written(first) == expected(PROMPT, length + 1, ())
    second = worker.run(StepPlan(StepId(2)))
    assert written([*first, *second]) == expected(PROMPT, length + 2, ())
    assert isinstance(worker.engine._model, TorchModel)
    runner = worker.engine._model.runner
    assert isinstance(runner, CheckingRunner)
    assert runner.batches[-1].query_starts.tolist() == [0, length + 1]


def test_no_more_is_forced_than_the_plan_allows(worker: EngineWorker) -> None:
    [result] = worker.run(opened(worker, len(PROMPT) + 2))
    assert written([result]) == expected(PROMPT, 2, ())
    [result] = worker.run(StepPlan(StepId(2)))
    assert result.forced_rows.size == 0, "a plan that allows nothing"


def test_in_a_lease_the_passes_to_come_keep_their_room(worker: EngineWorker) -> None:
    plan = replace(opened(worker, len(PROMPT) + 5), steps=4)
    results = worker.run(plan)
    assert len(results) == 4
    assert written(results) == expected(PROMPT, 5, ())
    known = 0
    for index, result in enumerate(results):
        known += result.rows.size + result.forced_rows.size
        assert known <= 5 - (3 - index)


@pytest.mark.parametrize("tokens", range(1, 12))
def test_a_row_ends_with_its_length_within_a_jump(worker: EngineWorker, tokens: int) -> None:
    total = len(PROMPT) + tokens
    results = worker.run(opened(worker, total, total=total))
    for step in range(2, 20):
        if results[-1].stops:
            break
        results += worker.run(StepPlan(StepId(step), jumps=(JumpLimit(RowSlot(0), total),)))
    assert written(results) == expected(PROMPT, tokens, ())
    assert [stop.reason for result in results for stop in result.stops] == [FinishReason.LENGTH]


def test_a_stop_id_that_is_forced_ends_the_row_and_the_jump(worker: EngineWorker) -> None:
    stop = expected(PROMPT, 2, ())[1]
    assert certain(expected(PROMPT, 1, ())) == stop, "else this test shows nothing"
    [result] = worker.run(opened(worker, 40, stop=(stop,)))
    assert written([result]) == expected(PROMPT, 2, ())
    assert [(one.reason, one.matched_token_id) for one in result.stops] == [(FinishReason.STOP, stop)]
    assert result.last
    [after] = worker.run(StepPlan(StepId(2)))
    assert after.rows.size == 0


def test_nothing_is_forced_after_a_sampled_stop_id(worker: EngineWorker) -> None:
    stop = expected(PROMPT, 1, ())[0]
    [result] = worker.run(opened(worker, 40, stop=(stop,)))
    assert written([result]) == [stop]


def test_rows_that_report_log_probabilities_are_sampled_token_by_token(worker: EngineWorker) -> None:
    plan = opened(worker, 40)
    [row] = plan.opens
    told = replace(row, sampling=replace(row.sampling, top_logprobs=1))
    [result] = worker.run(replace(plan, opens=(told,)))
    assert result.forced_rows.size == 0
    assert len(result.logprobs) == 1


@pytest.mark.parametrize(("most", "pages"), [(41, 12), (14, 3)])
def test_a_jump_beyond_the_rows_limit_or_pages_is_refused(worker: EngineWorker, most: int, pages: int) -> None:
    with pytest.raises(InvalidPlanError, match="jump of row 0"):
        worker.run(opened(worker, most, pages=pages))


def test_a_jump_of_a_row_that_is_not_there_is_refused(worker: EngineWorker) -> None:
    with pytest.raises(InvalidPlanError, match="not open"):
        worker.run(StepPlan(StepId(1), jumps=(JumpLimit(RowSlot(3), 9),)))
