"""Which sizes are captured, and what happens to those that memory does not suffice for."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from common.errors import ConfigurationError
from services.worker.engine.execution.cuda_graphs import CudaGraphs

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1, 2, 4, 8, 16)


@dataclass
class MadeUpPass:
    """Stands in for a pass on a GPU."""

    size: int
    fails: Callable[[int], Exception | None]
    is_captured: bool = False
    releases: int = 0

    def capture(self, _pool: object) -> None:
        error = self.fails(self.size)
        if error is not None:
            raise error
        self.is_captured = True

    def release(self) -> None:
        self.releases += 1

    def has_memory(self) -> bool:
        return self.size < 16


@dataclass
class Ladder:
    fails: Callable[[int], Exception | None] = lambda _size: None
    made: list[MadeUpPass] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    passes: CudaGraphs[MadeUpPass] = field(init=False)

    def capture(self, budget_s: float = 60.0, agree: Callable[[bool], bool] | None = None) -> None:
        def make(size: int) -> MadeUpPass:
            self.made.append(MadeUpPass(size, self.fails))
            return self.made[-1]

        self.passes = CudaGraphs(SIZES, make)
        self.passes.capture(self.shares.append, budget_s, None, agree)

    @property
    def captured(self) -> list[int]:
        return [one.size for one in self.made if one.is_captured]


def short_above(size: int) -> Callable[[int], Exception | None]:
    return lambda asked: torch.OutOfMemoryError("made up") if asked > size else None


def cut_short(asked: int) -> Exception | None:
    """Return what torch raises when a capture cannot even be ended any more."""
    if asked < 16:
        return None
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("made up")
    return error


def test_capture_sizes_without_memory_are_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    one = Ladder(short_above(4))
    with caplog.at_level(logging.WARNING):
        one.capture()
    assert one.captured == [1, 2, 4]
    assert [made.size for made in one.made if made.releases] == [8, 16]
    assert one.shares[-1] == 1.0
    (message,) = [record.getMessage() for record in caplog.records]
    assert "8, 16 rows" in message
    assert "scheduler.memory_fraction" in message
    # The smallest with room, if it was captured: a larger one would compute more padding than is saved.
    for size, found in ((1, 1), (3, 4), (5, None), (16, None), (17, None)):
        captured = one.passes.captured(size)
        assert (captured.size if captured else None) == found
    assert one.passes.of(5).size == 8


def test_a_capture_interrupted_by_lack_of_memory_counts_as_out_of_memory() -> None:
    one = Ladder(cut_short)
    one.capture()
    assert one.captured == [1, 2, 4, 8]


def test_ranks_skip_the_same_batch_sizes_when_one_lacks_memory() -> None:
    # This rank has memory for all but 16 rows, the other one for all but 4.
    theirs = iter([True, True, False, True, True])
    asked: list[bool] = []

    def agree(holds: bool) -> bool:
        asked.append(holds)
        return next(theirs) and holds

    one = Ladder()
    one.capture(agree=agree)
    assert asked == [False, True, True, True, True]
    assert one.captured == [1, 2, 8]


def test_a_failed_capture_on_one_of_several_ranks_names_the_settings_to_change() -> None:
    with pytest.raises(ConfigurationError, match="8 rows; make"):
        Ladder(short_above(4)).capture(agree=lambda holds: holds)


def test_other_capture_errors_are_not_treated_as_out_of_memory() -> None:
    with pytest.raises(ValueError, match="made up"):
        Ladder(lambda _size: ValueError("made up")).capture()


def test_batch_sizes_beyond_the_time_budget_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    one = Ladder()
    with caplog.at_level(logging.WARNING):
        one.capture(budget_s=0.0)
    assert one.captured == [16]
    assert "1 of 5 batch sizes" in caplog.text


class Replaced:
    """Stands in for graphs of a model that another one has replaced: only a collection frees them."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("fails", [lambda _size: None, lambda _size: RuntimeError("made up")])
def test_garbage_is_collected_before_graphs_are_captured_and_not_meanwhile(
    fails: Callable[[int], Exception | None],
) -> None:
    replaced = weakref.ref(Replaced())
    seen: list[tuple[bool, bool]] = []

    def look(size: int) -> Exception | None:
        seen.append((replaced() is None, gc.isenabled()))
        return fails(size)

    with contextlib.suppress(RuntimeError):
        Ladder(look).capture()
    assert set(seen) == {(True, False)}
    assert gc.isenabled()
