"""Products with FP8 in blocks beside peers': what is missing is reported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from deploy.evaluation.experiments.peers.fp8_block_kernels import main, peer_product
from services.worker.engine.quantization.fp8 import quantise_blocks

if TYPE_CHECKING:
    from pathlib import Path


def test_a_machine_without_a_hopper_gpu_is_reported(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(SystemExit, match="there is no Hopper GPU"):
        main([str(shape)])


def test_a_missing_flashinfer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", None)
    with pytest.raises(SystemExit, match="FlashInfer has no product of FP8 in blocks"):
        peer_product(quantise_blocks(torch.ones(128, 128)))
