"""The engine that runs a model: row state here, the forward pass in the model runner, then the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from common.steps import EngineCapacity, EngineSpec, StepPlan
from services.worker.engine.encoder.runner import EncoderExecutor, EncoderRunner
from services.worker.engine.execution.interface import Emit, OutOfMemoryError, ProgressReport
from services.worker.engine.execution.out_of_memory import is_out_of_memory
from services.worker.engine.execution.overlapped_runner import OverlappedRunner
from services.worker.engine.execution.synchronous_executor import Runner, SynchronousExecutor
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.engine.measuring.warm_up import warm_up
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowTable
from services.worker.engine.sampling.table import SamplingTable

if TYPE_CHECKING:
    from services.worker.engine.execution.keep_warm import DeviceWarmer
    from services.worker.engine.execution.overlapped_executor import OverlappedExecutor
    from services.worker.engine.grammars.library import GrammarLibrary
    from services.worker.engine.host_tier.pool import HostPool


log = logging.getLogger(__name__)

LoadModel = Callable[[EngineSpec, ProgressReport], Runner | EncoderRunner]


class TorchEngine:
    """Runs plans with a model runner; see `Engine`."""

    def __init__(self, load_model: LoadModel, library: GrammarLibrary | None = None) -> None:
        """Prepare; `load_model` loads what is configured, in the calling thread. `library` has rows' grammars."""
        self._load_model = load_model
        self._library = library
        self._spec: EngineSpec | None = None
        self._runner: Runner | EncoderRunner | None = None
        self._executor: OverlappedExecutor | None = None
        self._warmer: DeviceWarmer | None = None
        self._has_told_of_cpu = False
        self._plans: SynchronousRunner | OverlappedRunner | None = None

    @property
    def open_rows(self) -> int:
        """How many row slots are taken."""
        return self._plans.rows.open_count if self._plans else 0

    @property
    def host_pages(self) -> HostPool | None:
        """The host tier's pages, None without one; other threads may touch them until `reset` or `close`."""
        return self._runner.host_pool if self._runner else None

    @property
    def ends_with_group(self) -> bool:
        """True on GPUs: NCCL within graphs hangs once a process has met others before (seen with torch 2.11)."""
        distributed = torch.distributed
        return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "nccl"

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Load the model, unless the very same one is loaded; see `Engine.configure`."""
        if self._runner is None or not self._is_loaded(spec):
            self.close()
            self._runner = self._load_model(spec, report)
            self._spec = spec
        capacity = self._runner.capacity
        window = capacity.window_pool
        rows = RowTable(spec.max_rows, capacity.max_context, capacity.page_size, has_window_pool=window is not None)
        limits = PlanLimits(
            capacity.vocabulary_size,
            capacity.device_pages,
            spec.max_step_tokens,
            capacity.host_pages,
            is_encoder=capacity.is_encoder,
            window_pages=window.pages if window else 0,
            window_tokens=window.window_tokens if window else 0,
        )
        if isinstance(self._runner, EncoderRunner):
            self._plans = SynchronousRunner(rows, limits, EncoderExecutor(self._runner))
            return capacity
        transfers, is_first = self._runner.transfers, spec.rank == 0
        grammars = self._row_masks(spec, capacity)
        if isinstance(self._runner, ModelRunner) and self._runner.can_overlap:
            executor = self._executor or self._make_overlapped_executor(self._runner, spec, report)
            executor.use_grammars(grammars)
            self._plans = OverlappedRunner(rows, limits, executor, transfers=transfers, reports_tokens=is_first)
            return capacity
        table = SamplingTable(spec.max_rows, capacity.vocabulary_size, grammars)
        plain = SynchronousExecutor(self._runner, table, rank=spec.rank, is_shared=spec.world_size > 1)
        self._plans = SynchronousRunner(rows, limits, plain, transfers=transfers, reports_tokens=is_first)
        # Where layers have windows of their own, the scheduler gives back what it thinks that no row sees any more.
        return replace(capacity, jumps_forward=grammars is not None and window is None)

    def _row_masks(self, spec: EngineSpec, capacity: EngineCapacity) -> RowMasks | None:
        """Return what follows rows' grammars, on the rank that samples."""
        if self._library is None or spec.rank != 0:
            return None
        self._library.serve(
            VocabularySource(spec.model, spec.load_format, capacity.vocabulary_size, capacity.eos_token_ids)
        )
        return RowMasks(self._library, capacity.vocabulary_size)

    def _make_overlapped_executor(
        self, runner: ModelRunner, spec: EngineSpec, report: ProgressReport
    ) -> OverlappedExecutor:
        # Only here: it imports Triton.
        from services.worker.engine.execution.overlapped_executor import OverlappedExecutor

        with torch.inference_mode():
            executor = OverlappedExecutor(runner, spec)
            executor.capture(lambda share: report(0.99 + 0.01 * share, "capturing graphs"))
            warm_up(executor, runner.capacity, spec)
        self._executor = executor
        return executor

    def execute(self, plan: StepPlan, emit: Emit) -> None:
        """Run a plan; see `Engine.execute`."""
        assert self._plans is not None, "execute before configure"
        try:
            with torch.inference_mode():
                self._plans.run(plan, emit)
        except OutOfMemoryError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(f"memory does not suffice for a plan: {error}") from error

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit what is still computed; see `Engine.settle`."""
        if self._plans is not None:
            self._plans.settle(is_wanted)

    def keep_warm(self) -> None:
        """Let an idle GPU do a little; see `Engine.keep_warm`."""
        if self._runner is None:
            return
        device = self._runner.device
        if device.type == "cpu":
            if not self._has_told_of_cpu:
                log.warning("worker.keep_warm_ms changes nothing here: a CPU needs no work to stay fast")
            self._has_told_of_cpu = True
            return
        if self._warmer is None:
            from services.worker.engine.execution.keep_warm import DeviceWarmer

            self._warmer = DeviceWarmer(device)
        self._warmer.run()

    def reset(self) -> None:
        """Free all rows."""
        if self._plans is not None:
            self._plans.reset()

    def close(self) -> None:
        """Give back the model's memory and its group."""
        runner, self._runner, self._plans, self._spec = self._runner, None, None, None
        self._executor = self._warmer = None
        if runner is not None:
            runner.close()

    def _is_loaded(self, spec: EngineSpec) -> bool:
        assert self._runner is not None, "asked of a loaded engine"
        if self._spec is None or spec.world_size > 1:
            # Whether the other ranks still belong to our group cannot be known from here: all of them meet anew.
            return False
        # A scheduler that lost its worker asks for as many pages as it was once given.
        capacity = self._runner.capacity
        return (
            spec.device_pages in (self._spec.device_pages, capacity.device_pages)
            and spec.host_pages in (self._spec.host_pages, capacity.host_pages)
            and spec.window_pages in (self._spec.window_pages, capacity.window_pool and capacity.window_pool.pages)
            and _without_pages(spec) == _without_pages(self._spec)
        )


def _without_pages(spec: EngineSpec) -> EngineSpec:
    return replace(spec, device_pages=None, host_pages=None, window_pages=None)
