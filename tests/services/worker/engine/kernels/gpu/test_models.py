"""Whole models with the GPU's kernels against `transformers`, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.services.worker.engine.driving import Driver, load, random_ids
from tests.services.worker.engine.families import (
    ALSO_INTERPRETED,
    FAMILIES,
    INTERPRETED,
    VOCABULARY,
    reference_logits,
    save_model,
)

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")
from services.worker.engine.kernels.gpu.backend import GpuBackend

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.interface import KernelBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="execution/test_families.py runs them on the GPU"),
]


class _Interpreted(GpuBackend):
    """The same kernels, for a runner that captures no graphs."""

    name = "interpreted"


@pytest.mark.parametrize(
    "family", [*INTERPRETED, *(pytest.param(each, marks=pytest.mark.extended) for each in ALSO_INTERPRETED)]
)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(
        _library: object, dtype: torch.dtype, device: torch.device, _threads: int, _blocks: object
    ) -> KernelBackend:
        return _Interpreted(dtype, device, max_rows=2)

    monkeypatch.setattr("services.worker.engine.rank_model.select_backend", select)
    name, options = FAMILIES[family]
    # Of models with recurrent layers one of each kind.
    changed = {**options, "num_hidden_layers": 2, "full_attention_interval": 2}
    if "layer_types" in options:
        changed["layer_types"] = options["layer_types"][-2:]
    driver = Driver(load(save_model(tmp_path, name, changed), backend="torch"))
    prompt = random_ids(7, VOCABULARY)
    row = driver.open(len(prompt))
    # A prompt in one pass, and single tokens after it.
    got = [driver.run([(row, prompt[:5])]), *(driver.run([(row, [token])]) for token in prompt[5:])]
    expected = reference_logits(tmp_path, prompt)[4:]
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-3, rtol=1e-3)
