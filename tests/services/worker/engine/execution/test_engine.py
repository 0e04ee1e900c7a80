from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.settings import Settings
from common.steps import EngineSpec, StepPlan, StepResult
from common.types import StepId
from services.worker.__main__ import make_engine
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.fake_model import FakeModel, FakeOptions
from services.worker.engine.grammars.library import GrammarLibrary
from tests.fakes.model_runner import CheckingRunner

if TYPE_CHECKING:
    from services.worker.engine.execution.interface import ProgressReport


def test_the_load_format_selects_between_fake_and_real_models(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def load(spec: EngineSpec, *_: object) -> CheckingRunner:
        made.append(spec.load_format)
        return CheckingRunner()

    monkeypatch.setattr("services.worker.engine.loader.load_model", load)
    engine = make_engine(Settings().worker, GrammarLibrary())
    devices = [
        engine.configure(EngineSpec("model", load_format, page_size=4), lambda *_: None).device
        for load_format in ("fake", "fake", "auto", "gguf", "fake")
    ]
    assert devices == ["fake", "fake", "cpu", "cpu", "fake"]
    assert made == ["auto", "gguf"]


def test_another_configuration_closes_the_model_before_it_loads_the_next() -> None:
    calls: list[str] = []

    class Closable(FakeModel):
        def close(self) -> None:
            calls.append("close")

    def load(spec: EngineSpec, report: object) -> FakeModel:
        calls.append(f"load {spec.model}")
        return Closable(spec, lambda *_: None, FakeOptions())

    engine = ModelEngine(load)
    for name in ("one", "one", "two"):
        engine.configure(EngineSpec(name, "fake"), lambda *_: None)
    assert calls == ["load one", "close", "load two"]


def loads(*specs: EngineSpec, prepares: EngineSpec | None = None) -> int:
    """Configure an engine as each of `specs`; return the number of times that it loads a model.

    Before the last, weights of `prepares` are read ahead.
    """
    loaded: list[str] = []

    def load(spec: EngineSpec, report: ProgressReport) -> FakeModel:
        loaded.append(spec.model)
        return FakeModel(spec, report, FakeOptions())

    engine = ModelEngine(load, lambda _spec, _serving: load)
    for spec in specs[:-1]:
        engine.configure(spec, lambda *_: None)
    if prepares is not None:
        assert engine.prepare(prepares)
    engine.configure(specs[-1], lambda *_: None)
    return len(loaded)


OPEN = EngineSpec("model", "fake", host_bytes=1 << 20)
CHOSEN = replace(
    OPEN, device_pages=64, host_pages=16, window_pages=0, snapshots=0, host_snapshots=0, chosen_device_pages=True,
    chosen_host_pages=True,
)  # fmt: skip


def test_settings_that_leave_numbers_of_pages_open_are_met_by_those_that_an_earlier_scheduler_was_given() -> None:
    assert loads(CHOSEN, CHOSEN) == 1
    assert loads(CHOSEN, OPEN) == 1
    assert loads(CHOSEN, replace(OPEN, weight_version="", base_model="other")) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (replace(CHOSEN, chosen_device_pages=False), OPEN),
        (replace(CHOSEN, chosen_host_pages=False), OPEN),
        (CHOSEN, replace(OPEN, device_pages=65)),
        (CHOSEN, replace(OPEN, host_pages=17)),
        (CHOSEN, replace(OPEN, host_bytes=1 << 21)),
        (CHOSEN, replace(CHOSEN, snapshots=1)),
        (CHOSEN, replace(OPEN, model="other")),
    ],
)
def test_pages_that_settings_named_before_or_name_otherwise_now_are_allocated_anew(
    before: EngineSpec, after: EngineSpec
) -> None:
    assert loads(before, after) == 2


def test_weights_that_are_replaced_by_others_of_the_same_path_are_loaded() -> None:
    newer = replace(CHOSEN, reload_weights=True)
    assert loads(CHOSEN, newer) == 2
    assert loads(CHOSEN, newer, prepares=newer) == 2
    assert loads(newer, CHOSEN) == 1


def test_an_engine_that_was_never_configured_can_be_reset_and_closed() -> None:
    engine = ModelEngine(lambda spec, report: FakeModel(spec, report, FakeOptions()))
    engine.reset()
    engine.close()
    assert engine.open_rows == 0
    with pytest.raises(AssertionError):
        engine.execute(StepPlan(StepId(1)), _ignore)


def _ignore(_result: StepResult) -> None:
    """Take no notice."""
