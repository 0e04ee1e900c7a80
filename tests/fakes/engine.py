"""A fake engine that can be told to fail, to hang and to count what is done with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.worker.engine.execution.fake_model import fake_engine
from services.worker.engine.execution.interface import never_overtaken

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection

    from common.steps import EngineCapacity, EngineSpec, ExpertLoad, SleepLevel, SleepPart, StepPlan
    from services.worker.engine.execution.engine import ModelEngine
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
        ProgressReport,
    )


def nothing() -> None:
    """Do nothing."""


@dataclass
class ScriptedEngine:
    """Runs plans as the fake engine does, with hooks that are called on the engine's thread."""

    before_configure: Callable[[], None] = nothing
    before_execute: Callable[[], None] = nothing
    before_prepare: Callable[[], None] = nothing
    # Also before waking.
    before_sleep: Callable[[], None] = nothing
    calls: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    inner: ModelEngine = field(default_factory=fake_engine)
    # Since its last `configure`, as an engine on a GPU that has met other ranks.
    ends_with_group: bool = False
    meets_once: bool = False
    expert_load: ExpertLoad | None = None
    # Groups with which it shares experts call it by these; dropped when it is closed.
    pass_calls: PassCalls | None = None
    before_join: Callable[[], None] = nothing
    # Embeddings have four bytes.
    images: ImageStore | None = None
    encoder: ImageEncoder | None = None
    # Of the encoder that is loaded next.
    encoder_identity: str = ""

    @property
    def host_pages(self) -> HostPageBytes | None:
        return self.inner.host_pages

    @property
    def device_pages(self) -> DevicePageBytes | None:
        return self.inner.device_pages

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        return self.inner.peer_copies

    @property
    def adapters(self) -> AdapterStore | None:
        return self.inner.adapters

    def read_expert_load(self) -> ExpertLoad | None:
        return self.expert_load

    def join_pass(self, number: int) -> bool:
        self.calls.append(f"join {number}")
        self.before_join()
        return True

    @property
    def open_rows(self) -> int:
        return self.inner.open_rows

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        self.calls.append("configure")
        self.ends_with_group = self.meets_once and spec.world_size > 1
        report(0.5, "half way")
        self.before_configure()
        capacity = replace(self.inner.configure(spec, report), encoder_identity=self.encoder_identity)
        return capacity if self.images is None else replace(capacity, embedding_bytes=4)

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        self.inner.settle(is_wanted)

    def execute(self, plan: StepPlan, emit: Emit, is_overtaken: IsOvertaken = never_overtaken) -> None:
        self.before_execute()
        self.plans.append(plan)
        self.inner.execute(plan, emit, is_overtaken)

    def prepare(self, spec: EngineSpec) -> bool:
        self.calls.append(f"prepare {spec.model}")
        self.before_prepare()
        return True

    def drop_prepared(self) -> None:
        self.calls.append("drop_prepared")

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        self.calls.append("sleep")
        self.before_sleep()
        return self.inner.sleep(level, keeps_host_pages=keeps_host_pages) + 1000

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        self.calls.append("wake")
        self.before_sleep()
        return self.inner.wake(parts, report)

    def keep_warm(self) -> None:
        self.calls.append("keep_warm")

    def reset(self) -> None:
        self.calls.append("reset")
        self.inner.reset()

    def close(self) -> None:
        self.calls.append("close")
        self.pass_calls = None
        self.inner.close()


def wait_for(event: threading.Event, begun: threading.Event | None = None) -> Callable[[], None]:
    """Return a hook that sets `begun`, and blocks until `event` is set."""

    def hook() -> None:
        if begun is not None:
            begun.set()
        assert event.wait(timeout=60), "the test never let the engine go on"

    return hook


def raises(error: Exception) -> Callable[[], None]:
    """Return a hook that raises `error`."""

    def hook() -> None:
        raise error

    return hook
