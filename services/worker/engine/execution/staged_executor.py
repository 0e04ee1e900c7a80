"""The executor of stages that do not sample: computes its layers, and learns the tokens later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.execution.synchronous_executor import to_device
from services.worker.engine.plans.drafts import following_of, split_tokens
from services.worker.engine.plans.passes import gather

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from common.steps import StepPlan
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.parallel.stages import PendingTokens
    from services.worker.engine.plans.passes import ForwardPass
    from services.worker.engine.plans.rows import RowIndices, RowStates


class StageRunner(Protocol):
    """One rank of an earlier stage, as `ModelRunner` implements it."""

    device: torch.device

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the stage's layers and send their output on."""

    def expect_tokens(self, shape: tuple[int, int]) -> PendingTokens:
        """Return the tokens of the pass that was launched last, which the last stage will return."""


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass whose tokens are computed by later stages."""

    slots: RowIndices
    drafted: NDArray[np.int64]
    tokens: PendingTokens

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.tokens.is_ready

    def wait(self) -> PassOutput:
        """Return the tokens, as `SynchronousExecutor` reads them."""
        values = self.tokens.wait().numpy().astype(np.int32)
        if not self.slots.size:
            return PassOutput()
        width = 1 + int(self.drafted.max())
        chosen, accepted = split_tokens(values[:, :width], self.slots)
        return PassOutput(chosen, accepted=accepted, forced=following_of(values[:, width:], self.slots))


class StagedExecutor:
    """Launches passes with a model runner; see `StagePassExecutor`."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        """Do nothing: every pass gathers what it needs from the rows."""

    def launch(self, rows: RowStates, forward: ForwardPass) -> LaunchedPass:
        slots, drafted = forward.sampled_rows, forward.drafted
        shape = returned_shape(slots, drafted, rows.jump_room(slots))
        self._runner.forward(to_device(gather(rows, forward), self._runner.device))
        return LaunchedPass(slots, drafted, self._runner.expect_tokens(shape))


def returned_shape(slots: RowIndices, drafted: NDArray[np.int64], room: NDArray[np.int64]) -> tuple[int, int]:
    """Return the shape of the tokens that the last stage returns; a pass without any returns a number, as a sign."""
    if not slots.size:
        return 1, 1
    return slots.size, 1 + int(drafted.max()) + int(room.max())
