"""Executors of stages on GPUs, whose passes are captured as CUDA graphs: of the last stage, and of those before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from services.worker.engine.execution.decode_graphs import OverlappedModel
from services.worker.engine.execution.device_batch import DeviceBatch
from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
from services.worker.engine.execution.pass_graphs import PassGraphs
from services.worker.engine.execution.staged_executor import LaunchedPass, StageRunner, returned_shape
from services.worker.engine.execution.synchronous_executor import to_device
from services.worker.engine.plans.drafts import join_tokens
from services.worker.engine.plans.passes import gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineSpec, StepPlan
    from services.worker.engine.execution.overlapped_executor import LaunchedOutput
    from services.worker.engine.execution.pass_output import PassOutput
    from services.worker.engine.execution.stage_ends import StageEnds
    from services.worker.engine.grammars.row_masks import RowMasks
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices, RowStates


class LastStageModel(OverlappedModel, Protocol):
    """One rank of the last stage, as `ModelRunner` implements it."""

    def return_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Send the sampling rank's `token_ids` to the stages before; other ranks of its stage get them, too."""


class EarlierStageModel(OverlappedModel, StageRunner, Protocol):
    """One rank of an earlier stage, as `ModelRunner` implements it."""


@dataclass(frozen=True, slots=True)
class SampledPass:
    """A pass of the last stage, whose tokens go to the stages before once they are there."""

    slots: RowIndices
    shape: tuple[int, int]
    output: LaunchedOutput
    runner: LastStageModel

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.output.is_ready()

    def wait(self) -> PassOutput:
        """Return the tokens, on all stages; passes are waited for in the order in which they were launched."""
        output = self.output.wait()
        tokens = join_tokens(output.token_ids, output.accepted, self.slots, self.shape)
        self.runner.return_tokens(torch.from_numpy(tokens))
        return output


class LastStageExecutor:
    """Launches passes as with one stage, and samples on the device; see `StagePassExecutor`."""

    def __init__(self, runner: LastStageModel, spec: EngineSpec, ends: StageEnds) -> None:
        """Use `runner`, with rows as `spec` says."""
        self._runner = runner
        self._executor = OverlappedExecutor(runner, spec, ends)

    def use_grammars(self, grammars: RowMasks | None) -> None:
        """Hold rows to their grammars from now on."""
        self._executor.use_grammars(grammars)

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture passes as graphs."""
        self._executor.capture(report)

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        self._executor.mirror(plan, rows)

    def launch(self, rows: RowStates, forward: ForwardPass) -> SampledPass:
        slots = forward.sampled_rows
        shape = returned_shape(slots, forward.drafted, rows.jump_room(slots))
        launched = self._executor.launch(rows, forward, _do_nothing, _do_nothing)
        return SampledPass(slots, shape, launched, self._runner)


class EarlierStageExecutor:
    """Replays the passes of a stage that does not sample; see `StagePassExecutor`.

    Rows on the device get their tokens from the host, which learns them from the last stage.
    """

    def __init__(self, runner: EarlierStageModel, spec: EngineSpec, ends: StageEnds) -> None:
        """Use `runner`, with rows as `spec` says."""
        self._runner = runner
        self._rows = DeviceBatch.of(spec, runner.capacity, runner.device)
        self._graphs = PassGraphs(runner, spec, self._rows, None, ends)
        # Nothing is sampled here.
        self._needs = np.zeros(spec.max_rows, np.uint16)

    def capture(self, report: Callable[[float], None]) -> None:
        """Capture passes as graphs."""
        self._graphs.capture(report)

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        self._rows.mirror(plan, rows, self._needs)

    def launch(self, rows: RowStates, forward: ForwardPass) -> LaunchedPass:
        slots, drafted = forward.sampled_rows, forward.drafted
        shape = returned_shape(slots, drafted, rows.jump_room(slots))
        self._rows.upload()
        if forward.chunks.rows.size:
            self._compute_mixed(rows, forward)
        else:
            members = forward.decode_rows
            self._rows.set_tokens(members, rows)
            self._rows.upload()
            one = self._graphs.decode(members.size)
            one.take(members, rows.lengths[members], rows.adapters[members])
            one.compute()
        return LaunchedPass(slots, drafted, self._runner.expect_tokens(shape))

    def _compute_mixed(self, rows: RowStates, forward: ForwardPass) -> None:
        host = gather(rows, forward)
        batch = replace(to_device(host, self._runner.device), host=host)
        captured = self._graphs.prompt(forward.tokens)
        if captured is None:
            self._runner.hidden_states(batch)
        else:
            captured.hidden_states(batch)


def _do_nothing() -> None:
    """Do nothing: earlier tokens of the launched rows are known, and the runner looks for those of other rows."""
