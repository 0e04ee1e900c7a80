"""The scheduler core against a worker that runs ahead of what it has told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.steps import RecurrentStates, WindowPool
from services.worker.engine.execution.overlapped_runner import OverlappedPassExecutor, OverlappedRunner
from services.worker.engine.execution.pass_output import PassOutput
from services.worker.engine.execution.pooler import Pooler, with_pooled
from services.worker.engine.execution.synchronous_executor import to_device
from services.worker.engine.plans.passes import ForwardPass, gather
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from tests.fakes.model_runner import CheckingRunner
from tests.fakes.simulated_worker import VOCABULARY, SimulatedWorker
from tests.services.scheduler.core.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import StepPlan, StepResult
    from services.worker.engine.plans.rows import RowIndices
    from services.worker.engine.plans.saved_states import RowStateCopies

CPU = torch.device("cpu")


@dataclass
class Arriving:
    """Tokens that are there when they have been asked for often enough."""

    tokens: PassOutput
    asks: int

    @property
    def failed(self) -> RowIndices:
        return self.tokens.failed

    def is_ready(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait(self) -> PassOutput:
        return self.tokens


@dataclass
class LateExecutor:
    """Knows its rows' last tokens at once, as a device does, and tells them later."""

    runner: CheckingRunner
    last: dict[int, int] = field(default_factory=dict)
    launches: int = 0
    pooler: Pooler = field(default_factory=Pooler)

    def mirror(self, plan: StepPlan, rows: RowStates) -> None:
        for opened in plan.opens:
            self.last.pop(opened.row, None)
            self.pooler.open(opened)

    def launch(
        self, rows: RowStates, forward: ForwardPass, catch_up: Callable[[], None], report_ready: Callable[[], None]
    ) -> Arriving:
        self.launches += 1
        host = with_pooled(gather(rows, forward))
        # Launching some passes takes so long that earlier tokens arrive meanwhile.
        for _ in range(self.launches % 3):
            report_ready()
        for i, row in enumerate(forward.decode_rows):
            host.token_ids[i] = self.last[int(row)]
        hidden = self.runner.hidden_states(to_device(host, CPU))
        samples = forward.sampled_rows.size
        if host.pooled_slots.size:
            self.pooler.add(host.pooled_slots, hidden[samples:])
        tokens = hidden[:samples].argmax(dim=-1).numpy().astype(np.int32)
        embeddings = self.pooler.finish(forward.pooled_rows)
        self.last.update(zip(forward.sampled_rows.tolist(), tokens.tolist(), strict=True))
        return Arriving(PassOutput(tokens, embeddings=embeddings), asks=self.launches % 3)


class OverlappedWorker(SimulatedWorker):
    """Results come when the runner emits them."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        max_rows: int,
        executor: OverlappedPassExecutor,
        window: WindowPool | None = None,
        states: RowStateCopies | None = None,
        compute_us: int | None = None,
    ) -> None:
        super().__init__(pages, page_size)
        # How long passes seem to take; None: as long as they do.
        self._pass_us = compute_us
        self.emitted: deque[StepResult] = deque()
        limits = PlanLimits(
            VOCABULARY,
            pages,
            64,
            window_pages=window.pages if window else 0,
            window_tokens=window.window_tokens if window else 0,
            snapshots=0 if states is None else 100,
        )
        rows = RowStates(max_rows, 128, page_size, has_window_pool=window is not None, has_states=states is not None)
        self.runner = OverlappedRunner(rows, limits, executor, states=states)

    def run(self, plan: StepPlan) -> list[StepResult]:
        self.runner.run(plan, self.emitted.append)
        return self.take()

    def settle(self) -> list[StepResult]:
        self.runner.settle(lambda: False, pause=lambda _seconds: None)
        return self.take()

    def take(self) -> list[StepResult]:
        taken = list(self.emitted)
        self.emitted.clear()
        if self._pass_us is None:
            return taken
        return [replace(result, compute_us=self._pass_us) for result in taken]


class OverlappedHarness(Harness):
    """A harness around such a worker, which loses nothing but can be lost."""

    def __init__(self, make_executor: Callable[[CheckingRunner], OverlappedPassExecutor], **options: object) -> None:
        super().__init__(page_size=4, **options)  # type: ignore[arg-type]  # whatever a test wants to change
        self._make_executor = make_executor
        worker = self.worker
        self._pass_us = worker.compute_us if self.config.draft_tokens else None
        self._window = WindowPool(worker.window_pool, worker.window, 1, 1) if worker.window else None
        self._renew()

    def result(self) -> bool:
        if not self.results and isinstance(self.worker, OverlappedWorker):
            self.results.extend(self.worker.settle())
        return super().result()

    def lose_workers(self, *, engine_failed: bool = False) -> None:
        super().lose_workers(engine_failed=engine_failed)
        self._renew()

    def _renew(self) -> None:
        slots = self.worker.snapshots
        capacity = replace(
            CheckingRunner().capacity,
            device_pages=self.config.device_pages,
            max_context=128,
            window_pool=self._window,
            recurrent_states=None if slots is None else RecurrentStates(len(slots), 1),
        )
        runner = CheckingRunner(capacity)
        executor = self._make_executor(runner)
        pages, rows = self.config.device_pages, self.config.max_rows
        self.worker = OverlappedWorker(
            pages, 4, rows, executor, self._window, None if slots is None else runner, self._pass_us
        )
        self.worker.snapshots = slots
