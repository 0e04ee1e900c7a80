"""What is compiled ahead is what is asked for later; needs neither GPU nor FlashInfer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.worker.engine.kernels.gpu.prebuild import attention_specs, is_missing

if TYPE_CHECKING:
    from pathlib import Path

HOPPER = (9, 0)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Stand in for FlashInfer; the test fills in what has been compiled: (backend, dtype, head_dim, has_window)."""
    known: set[tuple[Any, ...]] = set()

    def generate(backend: str, *arguments: Any) -> SimpleNamespace:
        dtype, stored, _, _, size, _, _, window, cap, half = arguments
        assert (cap, half) == (False, False)
        name = (backend, dtype, size, window, *(() if stored == dtype else (stored,)))
        return SimpleNamespace(name=name, is_aot=name in known, is_compiled=name in known)

    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flashinfer.jit.attention"], "gen_batch_prefill_module", generate, raising=False)
    return known


def test_hopper_gets_separate_attention_kernels(compiled: set[tuple[Any, ...]]) -> None:
    specs: Any = attention_specs("8.0 8.9 9.0a", [64], [torch.bfloat16], [False, True])
    assert [spec.name[0] for spec in specs] == ["fa2", "fa2", "fa3", "fa3"]


def test_keys_in_float8_need_kernels_of_their_own(
    compiled: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")

    def misses(*, has_float8_kv: bool) -> bool:
        return is_missing(64, torch.bfloat16, has_window=False, has_float8_kv=has_float8_kv, capability=HOPPER)

    compiled.add(("fa3", torch.bfloat16, 64, False))
    assert (misses(has_float8_kv=False), misses(has_float8_kv=True)) == (False, True)
    compiled.add(("fa2", torch.bfloat16, 64, False, torch.float8_e4m3fn))
    assert not misses(has_float8_kv=True)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where CUDA's compiler is."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.touch()
    return compiler


@pytest.mark.parametrize("reason", ["forbidden", "no compiler"])
def test_only_an_installation_that_compiles_nothing_can_miss_kernels(
    reason: str, compiled: set[tuple[Any, ...]], compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_missing(64, torch.bfloat16, has_window=False, capability=HOPPER)
    if reason == "forbidden":
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    else:
        compiler.unlink()
    assert is_missing(64, torch.bfloat16, has_window=False, capability=HOPPER)
    compiled.add(("fa3", torch.bfloat16, 64, False))
    assert not is_missing(64, torch.bfloat16, has_window=False, capability=HOPPER)
    assert is_missing(64, torch.bfloat16, has_window=True, capability=HOPPER)
    assert is_missing(64, torch.float16, has_window=False, capability=HOPPER)
    assert is_missing(64, torch.bfloat16, has_window=False, capability=(8, 0))
