"""Products with FP8 in blocks by FlashInfer: their use, their preparation, and their results on a Hopper GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

from services.worker.engine.kernels.gpu.libraries import has_flashinfer
from services.worker.engine.kernels.torch.kernels import gated
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization import fp8
from services.worker.engine.quantization.formats import FP8_BLOCK

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import flashinfer_products
from services.worker.engine.kernels.gpu.backend import GpuBackend, has_flashinfer_products
from services.worker.engine.kernels.gpu.flashinfer_products import FlashInferProducts, prepared_tokens
from services.worker.engine.kernels.gpu.kernels import GpuKernels
from services.worker.engine.kernels.gpu.prebuild import find_compiler
from tests.services.worker.engine.kernels.gpu.matrices import DTYPE, EPSILON, check, exact, random, tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator

OUTPUTS, WIDTH = 256, 384


class Library:
    """Computes what FlashInfer's functions do, and notes the tokens and shape of each product."""

    def __init__(self) -> None:
        self.products: list[tuple[int, tuple[int, ...]]] = []
        self._has_workspace = False

    def configure_workspace(self, workspace: torch.Tensor) -> None:
        self._has_workspace = workspace.numel() > 0

    def fp8_quantize_1x128(
        self, inputs: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, in_powers_of_two: bool
    ) -> None:
        assert inputs.is_contiguous()
        assert not in_powers_of_two
        tokens, width = inputs.shape
        assert scales.shape == (width // FP8_BLOCK, -(-tokens // 4) * 4)
        rounded, of_groups = fp8.quantise_groups(inputs)
        values.copy_(rounded)
        scales.fill_(float("nan"))  # of padding
        scales[:, :tokens] = of_groups.t()

    def run_gemm(
        self, values: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, scales: torch.Tensor,
        weight_scales: torch.Tensor,
    ) -> None:  # fmt: skip
        assert self._has_workspace
        assert outputs.is_contiguous()
        tokens = values.shape[0]
        self.products.append((tokens, tuple(weight.shape)))
        inputs = values.float() * scales[:, :tokens].t().repeat_interleave(FP8_BLOCK, dim=1)
        spread = weight_scales.repeat_interleave(FP8_BLOCK, dim=0).repeat_interleave(FP8_BLOCK, dim=1)
        outputs.copy_(inputs @ (weight.float() * spread).t())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(flashinfer_products, "load_runner", lambda: library)
    return library


def matrix(outputs: int = OUTPUTS, width: int = WIDTH, seed: int = 0) -> fp8.Fp8BlockMatrix:
    return fp8.quantise_blocks(random(outputs, width, seed=seed).float() * width**-0.5)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (40, [16, 24, 31, 40]),
        (200, [16, 24, 31, 64, 128, 200]),
        (256, [16, 24, 31, 64, 128, 256]),
        (512, [16, 24, 31, 64, 128, 256]),
        (1023, [16, 24, 31, 64, 128, 256]),
        (1024, [16, 24, 31, 64, 128, 256, 1024]),
        (1300, [16, 24, 31, 64, 128, 256, 1024, 1152, 1280, 1300]),
    ],
)
def test_one_number_of_tokens_is_prepared_for_each_choice_of_a_kernel(most: int, expected: list[int]) -> None:
    assert list(prepared_tokens(most)) == expected


def test_nothing_is_served_that_was_not_prepared(library: Library) -> None:
    products = FlashInferProducts(torch.device("cpu"))
    GpuKernels(DTYPE, torch.device("cpu"), products).linear(matrix(), None)
    shape = torch.Size((OUTPUTS, WIDTH))
    assert not products.serves(shape, 1, is_plain=True)
    products.prepare(2000)
    served = {tokens for tokens in range(1, 3000) if products.serves(shape, tokens, is_plain=True)}
    assert served == {*range(1, 257), *range(1024, 2001)}
    # Another program adds: for few tokens the engine's own, which does both, is as fast.
    added = {tokens for tokens in range(1, 3000) if products.serves(shape, tokens, is_plain=False)}
    assert added == {*range(17, 257), *range(1024, 2001)}
    assert not products.serves(torch.Size((OUTPUTS, 2 * WIDTH)), 1, is_plain=True)


def test_each_shape_is_prepared_once(library: Library) -> None:
    device = torch.device("cpu")
    products = FlashInferProducts(device)
    kernels = GpuKernels(DTYPE, device, products)
    for seed in range(3):
        kernels.linear(matrix(seed=seed), None)
    kernels.gated_linear(matrix(), matrix(seed=1), None, Activation.SILU)
    assert library.products == []
    products.prepare(100)
    tokens = [16, 24, 31, 64, 100]
    assert library.products == [(n, (out, WIDTH)) for out in (OUTPUTS, 2 * OUTPUTS) for n in tokens]
    products.prepare(100)
    assert len(library.products) == 2 * len(tokens)


def test_a_model_without_fp8_in_blocks_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise AssertionError("it is not needed")

    monkeypatch.setattr(flashinfer_products, "load_runner", load)
    products = FlashInferProducts(torch.device("cpu"))
    GpuKernels(DTYPE, torch.device("cpu"), products).linear(random(OUTPUTS, WIDTH), None)
    products.prepare(100)


@pytest.mark.parametrize("fails", ["loading", "compiling"])
def test_without_the_library_the_engines_own_programs_multiply(
    fails: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Library):
        def run_gemm(self, *_tensors: torch.Tensor) -> None:
            raise RuntimeError("nvcc failed")

    def load() -> Library:
        if fails == "loading":
            raise RuntimeError("there is no nvcc")
        return Broken()

    monkeypatch.setattr(flashinfer_products, "load_runner", load)
    products = FlashInferProducts(device)
    weights, inputs = matrix(), random(20, WIDTH, seed=1)
    linear = GpuKernels(DTYPE, device, products).linear(weights, None)
    products.prepare(100)
    assert "cannot be used" in caplog.text
    assert "nvcc" in caplog.text
    check(linear, inputs, exact(inputs, weights), tolerance(inputs, weights), device)


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [WIDTH, 576])  # the last block of the second is not full
def test_what_is_served_is_multiplied_by_the_library(
    library: Library, device: torch.device, tokens: int, has_bias: bool, width: int
) -> None:
    products = FlashInferProducts(device)
    weights, bias = matrix(width=width), random(OUTPUTS, seed=2) if has_bias else None
    linear = GpuKernels(DTYPE, device, products).linear(weights, None if bias is None else bias.to(device))
    products.prepare(100)
    library.products.clear()
    inputs, sums = random(tokens, width, seed=1), random(tokens, OUTPUTS, seed=3)
    expected = exact(inputs, weights) + (0 if bias is None else bias.double())
    placed, added = torch.empty_like(sums).to(device), sums.clone().to(device)
    got = linear(inputs.to(device))
    assert linear(inputs.to(device), placed) is placed
    linear.add_to(inputs.to(device), added)
    for result, like in ((got, expected), (placed, expected), (added, expected + sums.double())):
        assert float((result.cpu().double() - like).norm() / like.norm()) < 4 * EPSILON
    calls = (2 if tokens > 16 or not has_bias else 0) + (tokens > 16)
    assert len(library.products) == calls


def test_gated_products_are_activated_after_the_librarys(library: Library, device: torch.device) -> None:
    products = FlashInferProducts(device)
    both = matrix(), matrix(seed=1)
    linear = GpuKernels(DTYPE, device, products).gated_linear(*both, None, Activation.SILU)
    products.prepare(100)
    library.products.clear()
    inputs = random(5, WIDTH, seed=2)
    got = linear(inputs.to(device)).cpu().double()
    wanted = gated(exact(inputs, both[0]), exact(inputs, both[1]), Activation.SILU)
    torch.testing.assert_close(got, wanted, atol=3e-2, rtol=3e-2)
    assert library.products == [(5, (2 * OUTPUTS, WIDTH))]


def test_matrices_with_parts_of_blocks_are_not_the_librarys(library: Library, device: torch.device) -> None:
    products = FlashInferProducts(device)
    whole = matrix()
    upper = fp8.Fp8BlockMatrix(whole.values[:192], whole.scales[:192], whole.inputs)
    kernels = GpuKernels(DTYPE, device, products)
    for weights in (upper, fp8.stacked_blocks([upper, matrix(192, seed=1)])):
        kernels.linear(weights, None)
    products.prepare(100)
    assert library.products == []


def test_only_hopper_gpus_with_bfloat16_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed, capability = True, (9, 0)
    monkeypatch.setattr("services.worker.engine.kernels.gpu.backend.has_flashinfer", lambda: is_installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    gpu = torch.device("cuda", 0)
    assert has_flashinfer_products(torch.bfloat16, gpu)
    assert not has_flashinfer_products(torch.float16, gpu)
    assert not has_flashinfer_products(torch.bfloat16, torch.device("cpu"))
    capability = (10, 0)
    assert not has_flashinfer_products(torch.bfloat16, gpu)
    is_installed, capability = False, (9, 0)
    assert not has_flashinfer_products(torch.bfloat16, gpu)


def test_deterministic_kernels_do_without(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(
        "services.worker.engine.kernels.gpu.backend.has_flashinfer_products", lambda _dtype, _device: True
    )
    cpu = torch.device("cpu")
    usual = GpuBackend(DTYPE, cpu, max_rows=2)
    usual.kernels.linear(matrix(), None)
    usual.prepare(8)
    assert len(library.products) == 1
    ordered = GpuBackend(DTYPE, cpu, max_rows=2, is_deterministic=True)
    ordered.kernels.linear(random(OUTPUTS, WIDTH), None)
    ordered.prepare(8)
    assert len(library.products) == 1


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Stands for the package, and has one function of it."""
    package, gemm, base = (ModuleType(name) for name in ("flashinfer", "flashinfer.gemm", "flashinfer.gemm.gemm_base"))
    runner = object()
    package.__version__ = "1.2.3"  # type: ignore[attr-defined]
    base.get_fp8_blockscale_gemm_runner_sm90 = lambda: runner  # type: ignore[attr-defined]
    for module in (package, gemm, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in (flashinfer_products.COMPILER_VARIABLE, flashinfer_products.KERNELS_VARIABLE, "CUDA_PATH"):
        # Set first, so that what the code sets is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("PANDO_CACHE_DIR", str(tmp_path / "pando"))
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    return runner


def test_the_library_gets_a_compiler_and_a_directory_of_its_version(flashinfer: object, tmp_path: Path) -> None:
    assert flashinfer_products.load_runner() is flashinfer
    assert os.environ["TRTLLM_DG_NVCC_COMPILER"] == str(tmp_path / "cuda" / "bin" / "nvcc")
    kernels = tmp_path / "pando" / "flashinfer-1.2.3"
    assert os.environ["TRTLLM_DG_CACHE_DIR"] == str(kernels)
    # The library would end the process if it could not make them.
    assert {path.name for path in kernels.iterdir()} == {"cache", "tmp"}
    (tmp_path / "cuda" / "bin" / "nvcc").unlink()
    with pytest.raises(RuntimeError, match="nvcc"):
        flashinfer_products.load_runner()


@pytest.mark.usefixtures("flashinfer")
def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        flashinfer_products.load_runner()


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not has_flashinfer()
    or find_compiler() is None,
    reason="needs a Hopper GPU, FlashInfer and nvcc",
)
# Whole blocks, and a shard of Llama 3.1 8B's down projection on 8 ranks, whose 14 blocks cuBLAS does not multiply.
SHAPES = ((768, 1024), (512, 1792))
MOST = 1100


@pytest.fixture(scope="module")
def prepared(device: torch.device) -> Iterator[FlashInferProducts]:
    """FlashInfer's products of SHAPES and up to MOST tokens."""
    products = FlashInferProducts(device)
    for outputs, width in SHAPES:
        GpuKernels(DTYPE, device, products).linear(matrix(outputs, width), None)
    with torch.inference_mode():
        products.prepare(MOST)
    yield products
    torch.cuda.synchronize()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [1, 17, 64, 256, 1000, 1024, 1100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_as_exact_as_the_engines_own(
    prepared: FlashInferProducts, device: torch.device, tokens: int, shape: tuple[int, int], has_bias: bool
) -> None:
    outputs, width = shape
    assert prepared.serves(torch.Size(shape), tokens, is_plain=True) == (tokens != 1000)
    weights = matrix(outputs, width).to(device)
    inputs = random(tokens, width, seed=1).to(device)
    bias = random(outputs, seed=2).to(device) if has_bias else None
    sums = random(tokens, outputs, seed=3).to(device)
    placed, added, own_added = torch.empty_like(sums), sums.clone(), sums.clone()
    linear = GpuKernels(DTYPE, device, prepared).linear(weights, bias)
    own = GpuKernels(DTYPE, device).linear(weights, bias)
    got, like = linear(inputs), own(inputs)
    linear(inputs, placed)
    linear.add_to(inputs, added)
    own.add_to(inputs, own_added)
    for result, expected in ((got, like), (placed, like), (added, own_added)):
        # A quotient half way between two values of FP8 may round the other way.
        assert float((result.float() - expected.float()).norm() / expected.float().norm()) < 2 * EPSILON
    unquantised = inputs.double() @ weights.widened(torch.float64).t() + (0 if bias is None else bias.double())
    errors = [float((result.double() - unquantised).norm() / unquantised.norm()) for result in (got, like)]
    assert errors[0] < 1.05 * errors[1]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tokens", [1, 17, 64, 256, 1024])
def test_captured_products_are_the_same_each_time(
    prepared: FlashInferProducts, device: torch.device, tokens: int
) -> None:
    outputs, width = SHAPES[0]
    linear = GpuKernels(DTYPE, device, prepared).linear(matrix(outputs, width), None)
    inputs, sums = random(tokens, width).to(device), random(tokens, outputs).to(device)
    graph, captured_sums = torch.cuda.CUDAGraph(), sums.clone()
    # The engine's own program, which adds for few tokens, is compiled now.
    linear.add_to(inputs, captured_sums)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = linear(inputs)
        linear.add_to(inputs, captured_sums)
    for seed in (7, 8, 8):
        inputs.copy_(random(tokens, width, seed=seed))
        captured_sums.copy_(sums)
        graph.replay()
        expected_sums = sums.clone()
        linear.add_to(inputs, expected_sums)
        assert torch.equal(captured, linear(inputs))
        assert torch.equal(captured_sums, expected_sums)


@pytest.mark.gpu
@needs_hopper
def test_nothing_is_compiled_after_it_was_prepared(prepared: FlashInferProducts, device: torch.device) -> None:
    folder = Path(os.environ[flashinfer_products.KERNELS_VARIABLE]) / "cache"
    before = sorted(folder.iterdir())
    assert len(before) >= 2 * len(SHAPES)
    linears = [GpuKernels(DTYPE, device, prepared).linear(matrix(*shape), None) for shape in SHAPES]
    for linear, (_, width) in zip(linears, SHAPES, strict=True):
        for tokens in (*range(1, 257), *range(1024, MOST + 1, 7)):
            linear(torch.zeros(tokens, width, dtype=DTYPE, device=device))
    assert sorted(folder.iterdir()) == before
