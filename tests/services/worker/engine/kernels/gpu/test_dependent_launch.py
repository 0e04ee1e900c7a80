"""Launches that overlap with the program before: where the GPU can do it, and programs are short."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="launches are Triton's")

from services.worker.engine.kernels.gpu import dependent_launch
from services.worker.engine.kernels.gpu.dependent_launch import MOST_TOKENS, launch_options

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def forgetting() -> Iterator[None]:
    dependent_launch._can_overlap.cache_clear()
    yield
    dependent_launch._can_overlap.cache_clear()


@pytest.mark.usefixtures("forgetting")
@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_launches_overlap_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlaps: bool
) -> None:
    monkeypatch.setattr(dependent_launch, "_IS_COMPILED", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
    assert launch_options(MOST_TOKENS)["OVERLAPS"] is overlaps
    assert launch_options(MOST_TOKENS).get("launch_pdl", False) is overlaps
    assert launch_options(MOST_TOKENS + 1) == {"OVERLAPS": False}
