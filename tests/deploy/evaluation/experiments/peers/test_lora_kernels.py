"""Adapters' programs beside those of a peer: the same sums are compared, and wrong ones and missing peers reported."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from deploy.evaluation.experiments.peers.kernel_times import checked
from deploy.evaluation.experiments.peers.lora_kernels import main, products_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES = ["--adapters", "1", "3", "--rows", "1", "5", "--prompt", "70", "--rank", "8", "--seconds", "0"]
PASSES = [f"{count} adapters, {rows} rows" for count in (1, 3) for rows in (1, 5, 70)]
# A package with the names of vLLM's, which computes row by row.
PEER = {
    "__init__": "__version__ = '0'",
    "lora/__init__": "",
    "lora/ops/__init__": "",
    "lora/ops/triton_ops/__init__": "",
    "lora/ops/triton_ops/utils": "_LORA_A_PTR_DICT, _LORA_B_PTR_DICT = {}, {}",
    "lora/ops/triton_ops/lora_shrink_op": """
def lora_shrink(inputs, a, shrunk, used, scale):
    for part, factor in enumerate(a):
        for row, adapter in enumerate(used.tolist()):
            shrunk[part, row] = scale * (factor[adapter, 0].float() @ inputs[row].float())
""",
    "lora/ops/triton_ops/lora_expand_op": """
def lora_expand(shrunk, b, sums, used, offset_start, add_inputs):
    assert add_inputs
    for part, factor in enumerate(b):
        outputs = factor.shape[2]
        for row, adapter in enumerate(used.tolist()):
            sums[row, offset_start : offset_start + outputs] += factor[adapter, 0].float() @ shrunk[part, row]
        offset_start += outputs
""",
    "lora/ops/triton_ops/lora_kernel_metadata": """
class LoRAKernelMeta:
    @classmethod
    def make(cls, slots, most_rows, device):
        return cls()

    def prepare_tensors(self, used):
        self.used = used

    def meta_args(self, rows, specialize_active_lora):
        assert rows == len(self.used)
        return (self.used,)
""",
}


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Path]:
    """A directory with the package; other tests do not import it."""
    directory, path = tmp_path / "peer", list(sys.path)
    for name, text in PEER.items():
        file = directory / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    yield directory
    sys.path[:] = path
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="loops over rows cannot be captured in a graph")
def test_engine_and_peer_agree_with_the_reference(shape: Path, peer: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    main([str(shape), "--peer", str(peer), *SIZES, "--json", str(path)])
    entries = json.loads(path.read_text())
    wanted = [f"{each}: {product.name}, error" for each in PASSES for product in products_of(shape)]
    for label in ("pando", "vllm 0"):
        figures = {entry["metric"]: entry["value"] for entry in entries if entry["label"] == label}
        assert sorted(figures) == sorted(wanted)
        assert all(0 <= value < 0.5 for value in figures.values())


def test_the_engine_is_measured_alone_without_a_peer(shape: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    main([str(shape), *SIZES, "--json", str(path)])
    assert {entry["label"] for entry in json.loads(path.read_text())} == {"pando"}


def test_a_directory_without_the_peer_is_reported(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="cannot import vLLM's programs of adapters"):
        main([str(shape), "--peer", str(tmp_path / "nothing"), *SIZES])


def test_without_a_gpu_and_the_interpreter_the_reason_is_reported(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit, match="there is no GPU; with TRITON_INTERPRET=1"):
        main([str(shape), *SIZES])


def test_results_that_are_not_numbers_or_others_are_reported() -> None:
    reference = torch.ones(4)
    assert checked("same", reference * 1.01, reference) == pytest.approx(0.01, rel=1e-3)
    for wrong in (reference * 1.03, torch.full((4,), torch.nan)):
        with pytest.raises(SystemExit, match="a product: the result differs"):
            checked("a product", wrong, reference)
