"""Products with weights in 4 bits beside a peer's: both have the same weights, and what is missing is reported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from deploy.evaluation.experiments.peers.int4_kernels import (
    BITS,
    FORMATS,
    GROUP,
    Marlin,
    Weights,
    compile_kernels,
    main,
)
from deploy.evaluation.experiments.quantization_speed import Layer
from services.worker.engine.quantization.grouped import grouped_matrix

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_zero_points", FORMATS.values(), ids=FORMATS.keys())
def test_weights_are_those_of_the_engines_matrix(*, has_zero_points: bool) -> None:
    weights = Weights.random(Layer("qkv", 256, 48), CPU, 0, has_zero_points=has_zero_points)
    matrix = grouped_matrix(weights.values, BITS, weights.scales, weights.zero_points, GROUP)
    assert (matrix.shifts is not None) == has_zero_points
    torch.testing.assert_close(matrix.plain(torch.float32), weights.widened(), rtol=1e-5, atol=1e-7)
    assert weights.widened().std() == pytest.approx(256**-0.5, rel=0.2)


def test_a_machine_without_a_gpu_is_reported(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU"):
        main([str(shape)])


def test_a_directory_without_the_peer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="cannot import gptqmodel's layout of weights"):
        Marlin(tmp_path, CPU)
    with pytest.raises(SystemExit, match="no marlin_torch_bf16"):
        compile_kernels(tmp_path, CPU)
