"""The engine of one rank: loads the configured model and runs step plans with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart
from services.worker.engine.execution.device_claim import OwnDevice
from services.worker.engine.execution.interface import ProgressReport, never_overtaken

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from common.steps import ExpertLoad, StepPlan
    from services.worker.engine.execution.device_claim import DeviceClaim
    from services.worker.engine.execution.interface import (
        AdapterStore,
        DevicePageBytes,
        Emit,
        HostPageBytes,
        ImageEncoder,
        ImageStore,
        IsOvertaken,
        PassCalls,
        PeerPageCopies,
    )
    from services.worker.engine.plans.rows import RowStates


class PlanRunner(Protocol):
    """Owns the rows of one stream of plans and runs these plans, synchronously or overlapped."""

    rows: RowStates

    def run(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        """Run a plan; see `Engine.execute`."""

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit the results of passes that are still computed; see `Engine.settle`."""

    def reset(self) -> None:
        """Free all rows and cancel all transfers."""


class LoadedModel(Protocol):
    """A model on this rank, real or fake."""

    @property
    def capacity(self) -> EngineCapacity:
        """The room for rows and pages."""

    @property
    def host_pages(self) -> HostPageBytes | None:
        """The host tier's pages, None without one."""

    @property
    def device_pages(self) -> DevicePageBytes | None:
        """See `Engine.device_pages`."""

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        """See `Engine.peer_copies`."""

    @property
    def adapters(self) -> AdapterStore | None:
        """See `Engine.adapters`."""

    @property
    def images(self) -> ImageStore | None:
        """Those of the last runner; None: the model sees none."""

    @property
    def encoder(self) -> ImageEncoder | None:
        """See `Engine.encoder`."""

    def read_expert_load(self) -> ExpertLoad | None:
        """See `Engine.read_expert_load`."""

    @property
    def pass_calls(self) -> PassCalls | None:
        """See `Engine.pass_calls`."""

    def join_pass(self, number: int) -> bool:
        """See `Engine.join_pass`."""

    @property
    def ends_with_group(self) -> bool:
        """See `Engine.ends_with_group`."""

    def make_runner(self) -> PlanRunner:
        """Return a runner with free rows; the runner made before is not used any more."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which a plan runs."""

    def keep_warm(self) -> None:
        """See `Engine.keep_warm`."""

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """See `Engine.sleep`. The runner made before is not used any more."""

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """See `Engine.wake`."""

    def close(self) -> None:
        """Free weights and memory, and leave the group."""


LoadModel = Callable[[EngineSpec, ProgressReport], LoadedModel]
# Reads the weights of another spec beside a model; returns what loads with them, None if they cannot be read ahead.
PrepareModel = Callable[[EngineSpec, LoadedModel], LoadModel | None]


class ModelEngine:
    """Implements `Engine` over the model that `load` returns."""

    def __init__(self, load: LoadModel, prepare: PrepareModel | None = None, device: DeviceClaim | None = None) -> None:
        """Call `load` for each new configuration, in the thread that calls `configure`; `device` may be shared."""
        self._device = device or OwnDevice()
        self._load = load
        self._prepare = prepare
        self._prepared: tuple[EngineSpec, LoadModel] | None = None
        self._spec: EngineSpec | None = None
        self._model: LoadedModel | None = None
        # None: there is no model, or it sleeps.
        self._runner: PlanRunner | None = None

    @property
    def open_rows(self) -> int:
        return self._runner.rows.open_count if self._runner else 0

    @property
    def host_pages(self) -> HostPageBytes | None:
        return self._model.host_pages if self._model else None

    @property
    def device_pages(self) -> DevicePageBytes | None:
        return self._model.device_pages if self._model else None

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        return self._model.peer_copies if self._model else None

    @property
    def adapters(self) -> AdapterStore | None:
        return self._model.adapters if self._model else None

    @property
    def images(self) -> ImageStore | None:
        return self._model.images if self._model and self._runner else None

    @property
    def encoder(self) -> ImageEncoder | None:
        return self._model.encoder if self._model and self._runner else None

    def read_expert_load(self) -> ExpertLoad | None:
        return self._model.read_expert_load() if self._model else None

    @property
    def pass_calls(self) -> PassCalls | None:
        return self._model.pass_calls if self._model else None

    def join_pass(self, number: int) -> bool:
        # A call may outlast the model.
        if self._model is None:
            return False
        with self._model.computing():
            return self._model.join_pass(number)

    @property
    def ends_with_group(self) -> bool:
        return self._model is not None and self._model.ends_with_group

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Load the model, unless the same one is loaded; see `Engine.configure`."""
        self._device.take(report)
        try:
            return self._configure(spec, report)
        except BaseException:
            self.close()
            raise

    def _configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        if self._model is None or not self._is_loaded(spec, self._model.capacity):
            load = self._loader_of(spec)
            self._close_model()
            self._model = load(spec, report)
            self._spec = spec
        elif self._runner is None:
            self._model.wake(tuple(SleepPart), report)
        self._prepared = None
        self._runner = self._model.make_runner()
        return self._model.capacity

    def prepare(self, spec: EngineSpec) -> bool:
        model = self._model
        load = None if model is None or self._prepare is None else self._prepare(spec, model)
        self._prepared = None if load is None else (spec, load)
        return load is not None

    def drop_prepared(self) -> None:
        self._prepared = None

    def _loader_of(self, spec: EngineSpec) -> LoadModel:
        """Return the loader of `spec`: with the weights that `prepare` has read, if they are its."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and _without_pages(prepared[0]) == _without_pages(spec):
            return prepared[1]
        return self._load

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        assert self._model is not None, "sleep before configure"
        self._runner = None
        freed = self._model.sleep(level, keeps_host_pages=keeps_host_pages)
        self._device.give_back()
        return freed

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        assert self._model is not None, "wake before configure"
        self._device.take(report)
        if self._runner is None and self._model.wake(parts, report):
            self._runner = self._model.make_runner()
        return self._runner is not None

    def execute(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        assert self._model is not None, "execute before configure"
        assert self._runner is not None, "a configured engine has a runner"
        with self._model.computing():
            self._runner.run(plan, emit, is_overtaken)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        if self._runner is not None:
            self._runner.settle(is_wanted)

    def keep_warm(self) -> None:
        if self._model is not None:
            self._model.keep_warm()

    def reset(self) -> None:
        if self._runner is not None:
            self._runner.reset()

    def close(self) -> None:
        self._close_model()
        self._device.give_back()

    def _close_model(self) -> None:
        model, self._model, self._runner, self._spec = self._model, None, None, None
        if model is not None:
            model.close()

    def _is_loaded(self, spec: EngineSpec, capacity: EngineCapacity) -> bool:
        loaded = self._spec
        if loaded is None or spec.reload_weights:
            return False
        if spec.world_size > 1:
            # This rank cannot know whether the others still belong to its group: all of them join again.
            return False
        # A scheduler that lost its worker configures the numbers that it was given before, one that restarts those of
        # its settings, which may leave them open. The settings never name the last three.
        window, states = capacity.window_pool, capacity.recurrent_states
        return (
            (
                spec.device_pages in (loaded.device_pages, capacity.device_pages)
                or (spec.device_pages is None and loaded.chosen_device_pages)
            )
            and (
                spec.host_pages in (loaded.host_pages, capacity.host_pages)
                or (spec.host_pages is None and loaded.chosen_host_pages)
            )
            and spec.window_pages in (None, loaded.window_pages, window and window.pages)
            and spec.snapshots in (None, loaded.snapshots, states and states.snapshots)
            and spec.host_snapshots in (None, loaded.host_snapshots, states and states.host_snapshots)
            and _without_pages(spec) == _without_pages(loaded)
        )


def _without_pages(spec: EngineSpec) -> EngineSpec:
    return replace(spec, device_pages=None, host_pages=None, window_pages=None, snapshots=None, host_snapshots=None)
