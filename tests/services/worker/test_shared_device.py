"""Engines of models that share a device: one has memory there at a time, and one without a scheduler gives it up."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from common.errors import UnavailableError
from common.file_locks import FileLock, is_locked
from common.steps import EngineSpec, SleepLevel, SleepPart
from services.worker import rank as rank_module
from services.worker.engine.execution.device_claim import SharedDevice
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.fake_model import FakeModel, FakeOptions
from services.worker.rank import Rank
from services.worker.states import WorkerState
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.execution.interface import ProgressReport

SPEC = EngineSpec("anything", "fake", max_rows=4)


def quiet(_fraction: float, _stage: str) -> None:
    """Report nothing."""


def engine_on(device: Path, *, fails: bool = False) -> ModelEngine:
    def load(spec: EngineSpec, report: ProgressReport) -> FakeModel:
        if fails:
            raise RuntimeError("no memory")
        return FakeModel(spec, report, FakeOptions())

    return ModelEngine(load, device=SharedDevice(FileLock(device), timeout_s=0.2))


def test_one_engine_at_a_time_has_memory_on_the_device(tmp_path: Path) -> None:
    first, second = engine_on(tmp_path / "device"), engine_on(tmp_path / "device")
    first.configure(SPEC, quiet)
    stages: list[str] = []
    with pytest.raises(UnavailableError, match="another model"):
        second.configure(SPEC, lambda _fraction, stage: stages.append(stage))
    assert set(stages) == {"waiting for the device"}
    first.sleep(SleepLevel.HOST, keeps_host_pages=False)
    second.configure(SPEC, quiet)
    with pytest.raises(UnavailableError, match="another model"):
        first.wake(tuple(SleepPart), quiet)
    second.close()
    assert first.wake(tuple(SleepPart), quiet)
    assert is_locked(tmp_path / "device")
    first.close()
    assert not is_locked(tmp_path / "device")


def test_a_model_that_cannot_be_loaded_leaves_the_device(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        engine_on(tmp_path / "device", fails=True).configure(SPEC, quiet)
    assert not is_locked(tmp_path / "device")


async def test_a_rank_without_a_scheduler_unloads_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "UNUSED_S", 0.3)
    rank = Rank(engine_on(tmp_path / "device"))
    unloading = asyncio.create_task(rank.unload_when_unused())
    await rank.configure(SPEC, quiet)
    session = rank.open_session()
    await asyncio.sleep(1.0)
    assert rank.snapshot().state is WorkerState.READY
    rank.close_session(session)
    await until(lambda: not is_locked(tmp_path / "device"))
    assert rank.snapshot().state is WorkerState.IDLE
    # One that sleeps has nothing there, and stays as it is.
    await rank.configure(SPEC, quiet)
    await rank.sleep(SleepLevel.HOST, keeps_host_pages=False)
    assert not is_locked(tmp_path / "device")
    await asyncio.sleep(1.0)
    assert rank.snapshot().state is WorkerState.SLEEPING
    unloading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await unloading
    await rank.stop()
