"""The engine that a configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineCapacity, EngineSpec, StepPlan
    from services.worker.engine.execution.interface import Emit, Engine, HostPages, ProgressReport

FAKE = "fake"


class SelectedEngine:
    """Becomes a fake or a real engine at `configure`, whichever the load format names; see `Engine`."""

    def __init__(self, make_fake: Callable[[], Engine], make_real: Callable[[], Engine]) -> None:
        """Prepare; `make_real` may import what a fake engine does without."""
        self._make_fake = make_fake
        self._make_real = make_real
        self._engine: Engine | None = None
        self._is_fake = False

    @property
    def host_pages(self) -> HostPages | None:
        """The host tier's pages."""
        return self._engine.host_pages if self._engine else None

    @property
    def open_rows(self) -> int:
        """How many row slots are taken."""
        return self._engine.open_rows if self._engine else 0

    @property
    def ends_with_group(self) -> bool:
        """See `Engine.ends_with_group`."""
        return self._engine is not None and self._engine.ends_with_group

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Make the right engine, unless it is there, and configure it."""
        wants_fake = spec.load_format == FAKE
        if self._engine is None or wants_fake != self._is_fake:
            self.close()
            self._engine = self._make_fake() if wants_fake else self._make_real()
            self._is_fake = wants_fake
        return self._engine.configure(spec, report)

    def execute(self, plan: StepPlan, emit: Emit) -> None:
        """Run a plan."""
        assert self._engine is not None, "execute before configure"
        self._engine.execute(plan, emit)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit what is still computed."""
        if self._engine is not None:
            self._engine.settle(is_wanted)

    def keep_warm(self) -> None:
        """Let an idle device do a little."""
        if self._engine is not None:
            self._engine.keep_warm()

    def reset(self) -> None:
        """Free all rows."""
        if self._engine is not None:
            self._engine.reset()

    def close(self) -> None:
        """Give everything back."""
        if self._engine is not None:
            self._engine.close()
