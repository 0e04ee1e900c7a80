from __future__ import annotations

import pytest

from common.settings import Settings
from common.steps import EngineSpec, StepPlan, StepResult
from common.types import StepId
from services.worker.__main__ import make_engine
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.fake_model import FakeModel, FakeOptions
from services.worker.engine.grammars.library import GrammarLibrary
from tests.fakes.model_runner import CheckingRunner


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


def test_an_engine_that_was_never_configured_can_be_reset_and_closed() -> None:
    engine = ModelEngine(lambda spec, report: FakeModel(spec, report, FakeOptions()))
    engine.reset()
    engine.close()
    assert engine.open_rows == 0
    with pytest.raises(AssertionError):
        engine.execute(StepPlan(StepId(1)), _ignore)


def _ignore(_result: StepResult) -> None:
    """Take no notice."""
