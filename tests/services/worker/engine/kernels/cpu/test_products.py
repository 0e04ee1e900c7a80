"""oneDNN's products of blocks, and the choice between them and the operators' own."""

from __future__ import annotations

import ctypes
import itertools
import logging
from ctypes import c_bool, c_int64, c_void_p
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigurationError
from services.worker.engine import backends
from services.worker.engine.backends import agreed_backend, select_products
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.kernels.cpu.kernels import CpuKernels
from services.worker.engine.kernels.cpu.onednn import BlockFunctions, find_block_functions
from services.worker.engine.kernels.cpu.products import (
    MEASURED_ROWS,
    ChoiceStore,
    ProductBench,
    Products,
    ProductShape,
    choice_key,
    choose,
    measured_choice,
)
from services.worker.engine.kernels.torch.backend import TorchBackend
from services.worker.engine.model.config import Activation
from services.worker.engine.parallel.group import SingleRank
from services.worker.engine.quantization.grouped import GroupedMatrix
from tests.services.worker.engine.kernels.cpu.test_packed import matrix

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from services.worker.engine.kernels.cpu.library import CpuLibrary

SHAPES = (ProductShape(1024, 1024), ProductShape(1024, 96))


@pytest.fixture(scope="module")
def blocks(library: CpuLibrary) -> BlockFunctions:
    """oneDNN's products; in float32, as every processor with AVX2 has them."""
    functions = find_block_functions()
    if functions is None or not library.has_blocks(functions, torch.float32):
        pytest.skip("oneDNN has no products of blocks here")
    return functions


@pytest.fixture
def block_types(library: CpuLibrary, blocks: BlockFunctions) -> list[torch.dtype]:
    return [each for each in (torch.float32, torch.bfloat16) if library.has_blocks(blocks, each)]


# Rows on both sides of whole tiles and blocks, widths on both sides of panels.
@given(
    st.integers(1, 150), st.integers(1, 90), st.integers(1, 110), st.booleans(), st.integers(1, 3), st.integers(0, 9)
)
def test_products_are_as_exact_as_float64_allows(
    library: CpuLibrary, blocks: BlockFunctions, rows: int, pairs: int, width_out: int, has_bias: bool, threads: int,
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    weight, inputs, sums = torch.randn(width_out, 2 * pairs), torch.randn(rows, 2 * pairs), torch.randn(rows, width_out)
    bias = torch.randn(width_out) if has_bias else None
    for dtype in (torch.float32, torch.bfloat16):
        if not library.has_blocks(blocks, dtype):
            continue
        exact = inputs.to(dtype).double() @ weight.to(dtype).double().T + (bias if bias is not None else 0)
        linear = CpuKernels(library, dtype, threads, blocks).linear(weight, bias)
        torch.testing.assert_close(linear(inputs).double(), exact, atol=1e-4, rtol=1e-5)
        added = sums.clone()
        linear.add_to(inputs, added)
        torch.testing.assert_close(added.double(), sums + exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 17, 64, 95])
@pytest.mark.parametrize("bits", [0, 4, 6])
def test_gated_and_packed_products_are_those_of_the_operators(
    library: CpuLibrary, blocks: BlockFunctions, block_types: list[torch.dtype], rows: int, bits: int
) -> None:
    # Three times the inputs that are unpacked at a time, the last ones fewer.
    gate, up = (
        matrix(130, 20, 32, bits, shifted=True, seed=seed) if bits else torch.randn(130, 640) for seed in range(2)
    )
    # The operators' own products may not round packed weights.
    wide_gate, wide_up = (
        each.widened(torch.float32) if isinstance(each, GroupedMatrix) else each for each in (gate, up)
    )
    inputs = torch.randn(rows, 640) / 8
    for dtype in block_types:
        own, onednn = CpuKernels(library, dtype, 2), CpuKernels(library, dtype, 2, blocks)
        expected = own.linear(wide_up, None)(inputs)
        torch.testing.assert_close(onednn.linear(up, None)(inputs), expected, atol=1e-3, rtol=1e-4)
        expected = own.gated_linear(wide_gate, wide_up, None, Activation.SILU)(inputs)
        got = onednn.gated_linear(gate, up, None, Activation.SILU)(inputs)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [0, 4])
def test_a_row_gets_the_same_bits_in_any_batch(
    library: CpuLibrary, blocks: BlockFunctions, block_types: list[torch.dtype], bits: int
) -> None:
    weight = matrix(100, 18, 32, bits, shifted=True) if bits else torch.randn(100, 576)
    inputs = torch.randn(150, 576)
    for dtype in block_types:
        alone = CpuKernels(library, dtype, 1, blocks).linear(weight, None)
        together = CpuKernels(library, dtype, 3, blocks).linear(weight, None)(inputs)
        assert torch.equal(torch.cat([alone(row[None]) for row in inputs]), together)
        for first, last in itertools.pairwise((0, 3, 20, 84, 101, 150)):
            assert torch.equal(alone(inputs[first:last]), together[first:last])


def test_the_check_accepts_onednn(library: CpuLibrary, blocks: BlockFunctions, block_types: list[torch.dtype]) -> None:
    for dtype in block_types:
        assert ProductBench(library, blocks, dtype, SHAPES).agree()


MULTIPLY = ctypes.CFUNCTYPE(None, *[c_int64] * 6, c_bool, *[c_void_p] * 3, c_bool)


def numbers(address: int, rows: int, columns: int) -> torch.Tensor:
    memory = (ctypes.c_float * (rows * columns)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)


@pytest.mark.parametrize(
    ("error", "agrees"), [("none", True), ("transposed", False), ("bfloat16", False), ("in large batches", False)]
)
def test_the_check_rejects_products_that_are_wrong_or_depend_on_the_batch(
    library: CpuLibrary, blocks: BlockFunctions, error: str, agrees: bool
) -> None:
    def multiply(
        rows: int, columns: int, depth: int, stride: int, weight_stride: int, sum_stride: int, adds: bool,
        inputs: int, weights: int, sums: int, is_in_pairs: bool,
    ) -> None:  # fmt: skip
        assert (stride, weight_stride, sum_stride, adds, is_in_pairs) == (depth, columns, columns, False, False)
        left, right = numbers(inputs, rows, depth), numbers(weights, depth, columns)
        left = left.bfloat16().float() if error == "bfloat16" else left
        right = right.reshape(columns, depth).T if error == "transposed" else right
        product = (left[:, None].double() * right.T).sum(-1).float()
        scale = 1 + 2**-22 if error == "in large batches" and rows == 64 else 1
        numbers(sums, rows, columns).copy_(product * scale)

    function = MULTIPLY(multiply)
    fake = BlockFunctions(ctypes.cast(function, c_void_p).value, blocks.multiply_bfloat16, blocks.release)
    assert ProductBench(library, fake, torch.float32, (ProductShape(64, 64),)).agree() is agrees


def seconds(*values: float) -> Mapping[int, float]:
    return dict(zip(MEASURED_ROWS, values, strict=True))


class FakeBench:
    """Timings that are given, counted."""

    def __init__(self, own: Mapping[int, float], onednn: Mapping[int, float]) -> None:
        self.times = own, onednn
        self.measured = 0

    def measure(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        self.measured += 1
        return self.times


@pytest.mark.parametrize(
    ("onednn", "chosen"),
    [
        (seconds(1.0, 1.0, 1.0, 1.0), Products.ONEDNN),
        (seconds(2.0, 3.0, 5.0, 9.0), Products.OWN),
        # Within the noise.
        (seconds(1.8, 2.7, 4.5, 8.1), Products.OWN),
        # A fifth more for a single row, a fifth of the time for prompts.
        (seconds(2.4, 2.0, 2.0, 1.8), Products.ONEDNN),
        # A little less for prompts, several times as much for what follows.
        (seconds(8.0, 9.0, 20.0, 8.0), Products.OWN),
    ],
)
def test_the_way_that_is_faster_over_all_workloads_is_chosen(onednn: Mapping[int, float], chosen: Products) -> None:
    assert choose(seconds(2.0, 3.0, 5.0, 9.0), onednn).products is chosen


def test_a_choice_outlives_the_process_that_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = seconds(1.0, 1.0, 1.0, 1.0), seconds(2.0, 2.0, 2.0, 2.0)
    first, second, other = FakeBench(slow, fast), FakeBench(fast, slow), FakeBench(fast, slow)
    with caplog.at_level(logging.INFO):
        kept = measured_choice(first, ChoiceStore(tmp_path / "cache"), "key")
    assert measured_choice(second, ChoiceStore(tmp_path / "cache"), "key") == kept
    assert (kept.products, first.measured, second.measured) == (Products.ONEDNN, 1, 0)
    assert "products=onednn origin=measured onednn_speedup_by_rows=1:2.00 8:2.00 32:2.00 256:2.00" in caplog.text
    assert measured_choice(other, ChoiceStore(tmp_path / "cache"), "another key").products is Products.OWN


@pytest.mark.parametrize("content", ["", "[]", '{"products": "other", "own": {}, "onednn": {}}', '{"products": "own"}'])
def test_a_damaged_file_is_measured_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "products-key.json").write_text(content)
    bench = FakeBench(seconds(2.0, 2.0, 2.0, 2.0), seconds(1.0, 1.0, 1.0, 1.0))
    assert measured_choice(bench, ChoiceStore(tmp_path), "key").products is Products.ONEDNN
    assert bench.measured == 1
    assert ChoiceStore(tmp_path).read("key") is not None


def test_a_directory_that_cannot_be_written_to_only_costs_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    bench = FakeBench(seconds(2.0, 2.0, 2.0, 2.0), seconds(1.0, 1.0, 1.0, 1.0))
    assert measured_choice(bench, ChoiceStore(tmp_path / "file"), "key").products is Products.ONEDNN
    assert "measured again at the next start" in caplog.text


def test_choices_are_kept_by_type_and_shapes(library: CpuLibrary) -> None:
    keys = [
        choice_key(library, torch.float32, SHAPES),
        choice_key(library, torch.bfloat16, SHAPES),
        choice_key(library, torch.float32, SHAPES[:1]),
    ]
    assert len(set(keys)) == 3
    assert choice_key(library, torch.float32, SHAPES) == keys[0]


def test_a_measurement_covers_both_ways_and_all_rows(library: CpuLibrary, blocks: BlockFunctions) -> None:
    ticks = itertools.count()
    times = ProductBench(library, blocks, torch.float32, SHAPES).measure(lambda: float(next(ticks)))
    # The clock advances by one with each look, and so in each product.
    for way in times:
        assert way == dict.fromkeys(MEASURED_ROWS, float(len(SHAPES)))


class TestSelection:
    """`select_products`."""

    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv("PANDO_CACHE_DIR", str(tmp_path))
        return tmp_path

    def test_what_is_asked_for_is_not_measured(self, library: CpuLibrary, blocks: BlockFunctions, cache: Path) -> None:
        assert blocks is not None
        assert select_products("own", library, torch.float32, SHAPES) is None
        assert select_products("onednn", library, torch.float32, SHAPES) is not None
        assert not list(cache.iterdir())

    def test_auto_follows_the_measurement(
        self, library: CpuLibrary, blocks: BlockFunctions, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert blocks is not None
        times = [seconds(2.0, 2.0, 2.0, 2.0), seconds(1.0, 1.0, 1.0, 1.0)]
        monkeypatch.setattr(ProductBench, "measure", lambda _self: times)
        assert select_products("auto", library, torch.float32, SHAPES) is not None
        times.reverse()
        assert select_products("auto", library, torch.float32, SHAPES) is not None, "the choice was kept"
        for file in cache.iterdir():
            file.unlink()
        assert select_products("auto", library, torch.float32, SHAPES) is None

    def test_small_layers_are_not_measured(self, library: CpuLibrary, cache: Path) -> None:
        assert select_products("auto", library, torch.float32, SHAPES[1:]) is None
        assert not list(cache.iterdir())

    def test_without_onednn_the_operators_products_are_used(
        self, library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "find_block_functions", lambda: None)
        assert select_products("auto", library, torch.float32, SHAPES) is None
        with pytest.raises(ConfigurationError, match=r"worker\.products=onednn"):
            select_products("onednn", library, torch.float32, SHAPES)

    def test_a_type_that_onednn_cannot_multiply_here_is_found_out_by_trying(
        self, library: CpuLibrary, blocks: BlockFunctions
    ) -> None:
        # No processor has products of float16 weights with float32 inputs.
        assert not library.has_blocks(blocks, torch.float16)
        assert select_products("auto", library, torch.float16, SHAPES) is None

    def test_products_that_disagree_are_not_used(
        self, library: CpuLibrary, blocks: BlockFunctions, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        assert blocks is not None
        monkeypatch.setattr(ProductBench, "agree", lambda _self: False)
        assert select_products("onednn", library, torch.float32, SHAPES) is None
        assert "oneDNN's products are not used" in caplog.text

    def test_other_names_are_refused(self, library: CpuLibrary) -> None:
        with pytest.raises(ConfigurationError, match="products 'mkl' is not one of auto, own, onednn"):
            select_products("mkl", library, torch.float32, SHAPES)


class FakeGroup(SingleRank):
    """A rank beside others, of which one gives `least`."""

    def __init__(self, least: int) -> None:
        self.least = least

    def minimum(self, value: int) -> int:
        return min(value, self.least)


def test_ranks_use_onednn_together_or_not_at_all(library: CpuLibrary, blocks: BlockFunctions) -> None:
    backend = CpuBackend(library, torch.float32, 1, blocks)
    assert agreed_backend(backend, FakeGroup(1)) is backend
    agreed = agreed_backend(backend, FakeGroup(0))
    assert isinstance(agreed, CpuBackend)
    assert (backend.products, agreed.products) == (Products.ONEDNN, Products.OWN)
    own = CpuBackend(library, torch.float32, 1)
    assert agreed_backend(own, FakeGroup(1)) is own
    plain = TorchBackend(torch.float32, torch.device("cpu"))
    assert agreed_backend(plain, FakeGroup(0)) is plain
