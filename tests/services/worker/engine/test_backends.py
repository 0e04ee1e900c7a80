from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.errors import ConfigurationError
from common.host import available_cores
from common.steps import EngineSpec
from services.worker.engine.backends import (
    DTYPES,
    RunnerOptions,
    count_threads,
    find_library,
    ranks_on_host,
    select_backend,
    select_device,
    select_dtype,
    select_gpu_backend,
    select_kv_dtype,
)
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.kernels.cpu.build import build_library, find_openmp
from services.worker.engine.kernels.cpu.library import CpuLibrary
from services.worker.engine.kernels.interface import AttentionShape
from services.worker.engine.quantization.formats import Int8Format
from tests.services.worker.engine.parallel.test_shards import SMOL

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HEADS = AttentionShape(4, 2, 64, 16)


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(RunnerOptions()) == CPU
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        select_device(RunnerOptions(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device(RunnerOptions(device_index=3)) == torch.device("cuda", 3)
    assert select_device(RunnerOptions(device="cpu")) == CPU
    with pytest.raises(ConfigurationError, match="'tpu' is not one of"):
        select_device(RunnerOptions(device="tpu"))


def test_types_follow_the_device_unless_chosen() -> None:
    assert select_dtype("auto", SMOL, CPU, None) == torch.float32
    assert select_dtype("auto", SMOL, CUDA, None) == torch.float32
    assert select_dtype("bfloat16", SMOL, CPU, None) == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        backend = select_backend(None, dtype, CPU, threads=1)
        assert select_kv_dtype("auto", backend, [HEADS]) == dtype
        assert select_kv_dtype("float16", backend, [HEADS]) == torch.float16


@pytest.mark.parametrize("has_tiles", [True, False])
def test_keys_and_values_are_bfloat16_where_tiles_multiply_them(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CpuLibrary(build_library(find_openmp()))
    monkeypatch.setattr(library, "attends_by_tiles", has_tiles)
    backend = CpuBackend(library, torch.bfloat16, 1)
    assert select_kv_dtype("auto", backend, [HEADS]) == (torch.bfloat16 if has_tiles else torch.float32)
    assert select_kv_dtype("float32", backend, [HEADS]) == torch.float32
    # Weights that are not rounded, and heads that compiled attention does not serve.
    assert select_kv_dtype("auto", CpuBackend(library, torch.float32, 1), [HEADS]) == torch.float32
    assert select_kv_dtype("auto", backend, [HEADS, replace(HEADS, page_size=5)]) == torch.float32


def test_activations_that_would_overflow_are_refused() -> None:
    gemma = replace(SMOL, family="gemma3_text", overflows_float16=True)
    assert select_dtype("float16", gemma, CPU, None) == torch.float16
    with pytest.raises(ConfigurationError, match="overflow in float16; use dtype=bfloat16"):
        select_dtype("float16", gemma, CUDA, None)
    assert select_dtype("auto", replace(gemma, dtype="float16"), CUDA, None) == torch.bfloat16
    assert select_dtype("auto", replace(gemma, dtype="float32"), CUDA, None) == torch.float32
    assert select_dtype("auto", replace(SMOL, dtype="float16"), CUDA, None) == torch.float16


@pytest.mark.parametrize(
    ("world_size", "rendezvous", "ranks"),
    [(1, "", 1), (4, "127.0.0.1:5000", 4), (4, "localhost:5000", 4), (2, "[::1]:5000", 2), (4, "10.0.0.7:5000", 1)],
)
def test_ranks_that_meet_over_the_loopback_share_a_host(world_size: int, rendezvous: str, ranks: int) -> None:
    spec = EngineSpec("model", world_size=world_size, rendezvous=rendezvous)
    assert ranks_on_host(spec) == ranks
    assert count_threads(RunnerOptions(), spec) == max(1, available_cores() // ranks)
    assert count_threads(RunnerOptions(threads=3), spec) == 3


def test_compiled_operators_are_for_cpus() -> None:
    with pytest.raises(ConfigurationError, match="backend=compiled runs on CPUs"):
        find_library(RunnerOptions(backend="compiled"), CUDA)
    assert find_library(RunnerOptions(backend="torch"), CPU) is None
    assert select_backend(None, torch.float32, CPU, threads=1).name == "torch"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_whose_own_kernels_cannot_be_had_computes_with_torch_or_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.worker.engine.backends.has_triton", lambda: dtype == torch.float32)
    reason = "not torch.float32" if dtype == torch.float32 else "Triton is not installed"
    assert select_gpu_backend(RunnerOptions(), dtype, CPU, max_rows=4).name == "torch"
    assert reason in caplog.text
    with pytest.raises(ConfigurationError, match=f"backend=gpu: .*{reason}"):
        select_gpu_backend(RunnerOptions(backend="gpu"), dtype, CPU, max_rows=4)


def test_weights_on_processors_that_multiply_pairs_of_bfloat16_are_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CpuLibrary(build_library(find_openmp()))
    monkeypatch.setattr(library, "rounds_inputs", True)
    assert select_dtype("auto", SMOL, CPU, library) == torch.bfloat16
    assert select_dtype("float32", SMOL, CPU, library) == torch.float32


def test_weights_on_other_processors_have_the_type_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CpuLibrary(build_library(find_openmp()))
    monkeypatch.setattr(library, "rounds_inputs", False)
    for name in ("float32", "bfloat16", "float16"):
        config = replace(SMOL, dtype=name)
        assert select_dtype("auto", config, CPU, library) == DTYPES[name]
        assert select_dtype("float32", config, CPU, library) == torch.float32
        assert select_dtype("auto", replace(config, stored_format=Int8Format()), CPU, library) == torch.float32
        assert select_dtype("auto", config, CPU, None) == torch.float32
    assert select_dtype("auto", replace(SMOL, dtype="float64"), CPU, library) == torch.float32
