from __future__ import annotations

import pytest

from common.steps import EngineSpec, StepPlan, StepResult
from common.types import StepId
from services.worker.engine.fake_engine import FakeEngine, FakeOptions
from services.worker.engine.select import SelectedEngine


def test_the_load_format_decides_between_fake_and_real() -> None:
    made: list[str] = []

    def make(kind: str, vocabulary: int) -> FakeEngine:
        made.append(kind)
        return FakeEngine(FakeOptions(vocabulary_size=vocabulary))

    engine = SelectedEngine(lambda: make("fake", 100), lambda: make("real", 200))
    vocabularies = [
        engine.configure(EngineSpec("model", load_format), lambda _fraction, _stage: None).vocabulary_size
        for load_format in ("fake", "fake", "auto", "gguf", "fake")
    ]
    assert vocabularies == [100, 100, 200, 200, 100]
    assert made == ["fake", "real", "fake"]


def test_an_engine_that_was_never_configured_can_be_reset_and_closed() -> None:
    engine = SelectedEngine(FakeEngine, FakeEngine)
    engine.reset()
    engine.close()
    assert engine.open_rows == 0
    with pytest.raises(AssertionError):
        engine.execute(StepPlan(StepId(1)), _ignore)


def _ignore(_result: StepResult) -> None:
    """Take no notice."""
