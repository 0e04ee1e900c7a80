"""The GPU's attention against plain torch, on random shapes and rows."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.kernels.gpu.libraries import has_flashinfer
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout, KvScales, QkNorm
from services.worker.engine.kernels.torch.attention import TorchAttention
from tests.services.worker.engine.kernels.attention_cases import WINDOWS, Case, blocks_of

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu import decode_attention
from services.worker.engine.kernels.gpu.attention import GpuAttention, TorchChunkAttention
from services.worker.engine.kernels.gpu.decode_attention import DecodeAttention, DecodeTuning

HAS_GPU = torch.cuda.is_available()
# float32 in the interpreter, which has no tensor cores that would round.
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOLERANCE = 2e-2 if HAS_GPU else 2e-5
FLOAT8 = torch.float8_e4m3fn
TOKEN_MAJOR, HEAD_MAJOR = KvLayout.TOKEN_MAJOR, KvLayout.HEAD_MAJOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.kernels.interface import AttentionBackend
    from services.worker.engine.model.batch import ForwardBatch


@st.composite
def cases(draw: st.DrawFn, *, head_dims: tuple[int, ...] = (16, 48, 64, 128, 256)) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 8]))
    page_size = draw(st.sampled_from([1, 5, 16, 64]))
    longest = 2000 if HAS_GPU else 150
    decoding = draw(st.lists(st.integers(0, longest), max_size=4))
    chunks = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(2, 70)), min_size=not decoding, max_size=2))
    head_dim, scale = draw(st.sampled_from(head_dims)), draw(st.sampled_from([None, 0.3]))
    cap = draw(st.sampled_from([None, 2.0, 50.0]))
    window = draw(WINDOWS)
    is_chunked = window is not None and draw(st.booleans())
    shape = AttentionShape(
        kv_heads * group, kv_heads, head_dim, page_size, window, scale, cap, is_chunked=is_chunked
    )  # fmt: skip
    blocks = draw(blocks_of(len(decoding), chunks))
    return Case(shape, [*((old, 1) for old in decoding), *chunks], draw(st.integers(0, 2**31)), blocks)


def for_flashinfer(shape: AttentionShape) -> AttentionShape:
    """Return a shape that FlashInfer serves: it cuts sequences between pages."""
    is_cut = shape.is_chunked and shape.window_left is not None and (shape.window_left + 1) % 16 == 0
    return replace(shape, page_size=16, is_chunked=is_cut)


def moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    # Their types differ by name.
    tensors: dict[str, Any] = {name: value.to(device) for name, value in values.items() if torch.is_tensor(value)}
    return replace(batch, **tensors)


def head_major(layer: KvLayer, device: torch.device) -> KvLayer:
    return KvLayer(*(tensor.transpose(1, 2).contiguous().to(device, DTYPE) for tensor in (layer.keys, layer.values)))


def table(shape: AttentionShape) -> torch.Tensor:
    angles = torch.rand(2200, shape.head_dim // 2, generator=torch.Generator().manual_seed(9)) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def check(case: Case, device: torch.device, make: Callable[[AttentionShape], AttentionBackend]) -> None:
    """Store and attend with both; compare queries, pool and outputs."""
    torch.manual_seed(case.seed)
    first, second = torch.rand(2, case.shape.head_dim).to(DTYPE)
    norms = QkNorm(first, second, 1e-6) if case.seed % 2 else None
    on_device = QkNorm(first.to(device), second.to(device), 1e-6) if norms else None
    reference, attention = TorchAttention(case.shape, table(case.shape)), make(case.shape)
    layer = case.layer(KvLayout.TOKEN_MAJOR, DTYPE)
    mine, batch = head_major(layer, device), case.batch()
    qkv = case.qkv().to(DTYPE)
    queries = reference.store(qkv.clone(), layer, norms, batch)
    got = attention.store(qkv.to(device, copy=True), mine, on_device, moved(batch, device))
    for expected, stored in ((layer.keys, mine.keys), (layer.values, mine.values)):
        torch.testing.assert_close(stored.transpose(1, 2).cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(got.cpu(), queries, atol=TOLERANCE, rtol=TOLERANCE)
    # From the same inputs, in double the precision, so that only the attention itself is compared.
    sinks = case.sinks()
    my_sinks = None if sinks is None else sinks.to(device)
    exact = KvLayer(*(tensor.transpose(1, 2).float().cpu() for tensor in (mine.keys, mine.values)))
    expected = reference.attend(got.float().cpu().contiguous(), exact, batch, sinks)
    # The second time with a program that is compiled, on another layer's pool.
    for pool in (mine, KvLayer(mine.keys.clone(), mine.values.clone())):
        attended = attention.attend(got, pool, moved(batch, device), my_sinks).float().cpu()
        torch.testing.assert_close(attended, expected, atol=TOLERANCE, rtol=TOLERANCE)
    again = head_major(case.layer(KvLayout.TOKEN_MAJOR, DTYPE), device)
    at_once = attention.store_and_attend(qkv.to(device, copy=True), again, on_device, moved(batch, device), my_sinks)
    torch.testing.assert_close(at_once.float().cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(again.keys, mine.keys, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(again.values, mine.values)


@settings(max_examples=60 if HAS_GPU else 12, deadline=None)
@given(case=cases())
def test_rows_of_every_shape_attend_as_in_plain_torch(case: Case, device: torch.device) -> None:
    def make(shape: AttentionShape) -> GpuAttention:
        return GpuAttention(shape, table(shape).to(device), TorchChunkAttention(shape), 4)

    check(case, device, make)


class Launches:
    """Stands in for the program: notes how it is launched, by grid, positional and named arguments."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.compiled: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_launch(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants))
            return Relaunched(self.again)

        return compile_and_launch


class Relaunched:
    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *arguments: self._launches.append((grid, arguments))


def test_a_launch_like_an_earlier_one_uses_its_program_with_all_arguments_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = AttentionShape(8, 2, 16, 4)
    program = Launches(decode_attention._decode.arg_names)
    monkeypatch.setattr(decode_attention, "_decode", program)
    attention = DecodeAttention(shape, 4, torch.device("cpu"))
    table_of_pages, lengths = torch.zeros(4, 3, dtype=torch.int32), torch.ones(4, dtype=torch.int32)

    def launch(rows: int, pool: torch.Tensor, *, sinks: torch.Tensor | None = None, skipped: int = 0) -> torch.Tensor:
        queries = torch.zeros(skipped + rows * 128)[skipped:].view(rows, 128)
        of_rows = torch.arange(rows, dtype=torch.int32)
        return attention(queries, KvLayer(pool, pool), table_of_pages, of_rows, lengths[:rows], sinks)

    first, second = (torch.zeros(5, 2, 4, 16) for _ in range(2))
    launch(2, first)
    assert (len(program.compiled), len(program.again)) == (1, 0)
    outputs = launch(2, second)
    (compiled,), (again,) = program.compiled, program.again
    assert again[0] == compiled[0]
    named = dict(zip(program.arg_names, again[1], strict=True))
    assert named["keys"] is second
    assert named["outputs"] is outputs
    positional = dict(zip(program.arg_names, compiled[1], strict=False))
    given = {"qkv", "keys", "values", "outputs", "rows", "lengths", "positions", "angles", "query_norm", "key_norm"}
    for name, value in positional.items():
        assert named[name] is value or name in given or named[name] == value, name
    constants = {name: compiled[2][name] for name in program.arg_names[len(positional) :]}
    assert {name: named[name] for name in constants} == constants
    # Other programs: of more rows, with sinks, of strides that are other multiples, of addresses that are no multiples
    # of 16 bytes, which no launch may take for one of those, and of other types.
    launch(3, first)
    launch(2, first, sinks=torch.zeros(8))
    launch(2, torch.zeros(5, 4, 4, 16)[:, ::2])
    for _ in range(2):
        launch(2, first, skipped=1)
    assert (len(program.compiled), len(program.again)) == (6, 1)
    launch(2, first)
    assert (len(program.compiled), len(program.again)) == (6, 2)
    lengths = lengths.long()
    launch(2, first)
    assert (len(program.compiled), len(program.again)) == (7, 2)


def check_float8(case: Case, device: torch.device, make: Callable[[AttentionShape], GpuAttention]) -> None:
    """Store and attend in FP8 with both; compare bytes of the pool, and outputs."""
    case = replace(case, shape=replace(case.shape, has_float8_kv=True))
    reference, attention = TorchAttention(case.shape, table(case.shape)), make(case.shape)
    layer, mine, again = (case.layer(layout, FLOAT8) for layout in (TOKEN_MAJOR, HEAD_MAJOR, HEAD_MAJOR))
    mine, again = on_device(mine, device), on_device(again, device)
    batch, qkv = case.batch(), case.qkv().to(DTYPE)
    reference.store(qkv.clone(), layer, None, batch)
    got = attention.store(qkv.to(device, copy=True), mine, None, moved(batch, device))
    sinks = case.sinks()
    my_sinks = None if sinks is None else sinks.to(device)
    at_once = attention.store_and_attend(qkv.to(device, copy=True), again, None, moved(batch, device), my_sinks)
    for name in ("keys", "values"):
        expected, stored, repeated = (getattr(kv, name).cpu() for kv in (layer, mine, again))
        # Rotated keys may differ by roundings, and then lie on the other side of a border.
        is_other = as_bytes(stored.transpose(1, 2)) != as_bytes(expected)
        assert float(is_other.float().mean()) <= (0.01 if name == "keys" else 0.0)
        assert float((as_bytes(repeated) != as_bytes(stored)).float().mean()) <= (0.01 if name == "keys" else 0.0)
        numbers, wanted = stored.transpose(1, 2).float(), expected.float()
        assert bool(((numbers - wanted).abs() <= wanted.abs() / 8 + 2**-9).all())
    same = replace(layer, keys=mine.keys.transpose(1, 2).cpu(), values=mine.values.transpose(1, 2).cpu())
    expected = reference.attend(got.float().cpu().contiguous(), same, batch, sinks)
    attended = attention.attend(got, mine, moved(batch, device), my_sinks).float().cpu()
    tolerance = 2 * TOLERANCE * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=TOLERANCE)
    same = replace(layer, keys=again.keys.transpose(1, 2).cpu(), values=again.values.transpose(1, 2).cpu())
    expected = reference.attend(got.float().cpu().contiguous(), same, batch, sinks)
    torch.testing.assert_close(at_once.float().cpu(), expected, atol=tolerance, rtol=TOLERANCE)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def on_device(layer: KvLayer, device: torch.device) -> KvLayer:
    assert layer.scales is not None
    scales = KvScales(layer.scales.keys.to(device), layer.scales.values.to(device))
    return KvLayer(layer.keys.to(device), layer.values.to(device), scales=scales)


@pytest.mark.parametrize(
    "case",
    [
        Case(AttentionShape(4, 2, 16, 16), [(40, 1), (0, 1), (3, 5)], seed=1),
        Case(AttentionShape(3, 1, 32, 16, window_left=20), [(70, 1)], seed=2),
        Case(AttentionShape(2, 2, 16, 5, attention_softcap=2.0), [(20, 1), (33, 1)], seed=3),
    ],
    ids=["chunks", "window", "sinks and cap"],
)
def test_keys_and_values_in_float8_are_stored_and_read_as_in_plain_torch(case: Case, device: torch.device) -> None:
    def make(shape: AttentionShape) -> GpuAttention:
        return GpuAttention(shape, table(shape).to(device), TorchChunkAttention(shape), 4)

    check_float8(case, device, make)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@settings(max_examples=20, deadline=None)
@given(case=cases(head_dims=(64, 128)))
def test_flashinfer_reads_keys_and_values_in_float8(case: Case, device: torch.device) -> None:
    pytest.importorskip("flashinfer")
    from services.worker.engine.kernels.gpu.flashinfer_prefill import FlashInferPrefill

    case = replace(case, shape=for_flashinfer(case.shape))

    def make(shape: AttentionShape) -> GpuAttention:
        return GpuAttention(shape, table(shape).to(device), FlashInferPrefill(shape, device), 4)

    check_float8(case, device, make)


def test_numbers_beyond_the_range_of_float8_are_limited(device: torch.device) -> None:
    shape = AttentionShape(1, 1, 16, 16, has_float8_kv=True)
    attention = GpuAttention(shape, table(shape).to(device), TorchChunkAttention(shape), 1)
    values = torch.tensor([449.0, 463.0, 465.0, 6e4, torch.inf, 1.0, 0.001, 1e-6])
    values = torch.cat((values, -values))
    expected = values.to(DTYPE).float().clamp(-448, 448).to(FLOAT8)
    for stores_alone in (True, False):
        case = Case(shape, [(0, 1)], seed=1)
        layer = on_device(case.layer(HEAD_MAJOR, FLOAT8), device)
        layer = replace(layer, scales=KvScales(torch.ones(1, device=device), torch.ones(1, device=device)))
        qkv = torch.cat((torch.zeros(16), values.nan_to_num(posinf=3e38, neginf=-3e38), values)).to(device, DTYPE)[None]
        run = attention.store if stores_alone else attention.store_and_attend
        run(qkv, layer, None, moved(case.batch(), device))
        page = int(case.batch().page_table[0, 0])
        assert torch.equal(as_bytes(layer.values[page, 0, 0].cpu()), as_bytes(expected))
        assert bool(layer.keys.float().isfinite().all())


@pytest.mark.gpu
# FlashInfer compiles a kernel for each kind of shape.
@pytest.mark.timeout(900)
@settings(max_examples=60, deadline=None)
@given(case=cases(head_dims=(64, 128, 256)))
def test_flashinfer_attends_to_chunks_as_plain_torch_does(case: Case, device: torch.device) -> None:
    pytest.importorskip("flashinfer")
    from services.worker.engine.kernels.gpu.flashinfer_prefill import FlashInferPrefill

    case = replace(case, shape=for_flashinfer(case.shape))

    def make(shape: AttentionShape) -> GpuAttention:
        return GpuAttention(shape, table(shape).to(device), FlashInferPrefill(shape, device), 4)

    check(case, device, make)


@pytest.mark.skipif(has_flashinfer(), reason="where FlashInfer is, it is tested itself")
def test_rows_are_cut_at_the_borders_of_chunks_for_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "services.worker.engine.kernels.gpu.flashinfer_prefill"
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.delitem(sys.modules, module, raising=False)
    chunk_pages = import_module(module).chunk_pages
    # Of single tokens nothing is cut; one row goes over two borders, one begins at a border, one lies within a chunk.
    case = Case(AttentionShape(2, 1, 16, 16, 31, is_chunked=True), [(70, 1), (20, 60), (32, 10), (3, 5)], seed=1)
    batch = case.batch()
    parts = chunk_pages(batch, 16, 32)
    assert parts.query_starts.tolist() == [0, 12, 44, 60, 70, 75]
    assert parts.key_lengths.tolist() == [32, 32, 16, 10, 8]
    assert parts.page_starts.tolist() == [0, 2, 4, 5, 6, 7]
    table = batch.page_table.tolist()
    assert parts.pages.tolist() == [*table[1][:5], table[2][2], table[3][0]]
    whole = chunk_pages(batch, 16)
    assert whole.query_starts.tolist() == [0, 60, 70, 75]
    assert whole.pages.tolist() == [*table[1][:5], *table[2][:3], table[3][0]]
    sys.modules.pop(module)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window_left", [None, 90])
@pytest.mark.parametrize("programs", [1, 8, 64])
def test_a_row_cut_into_parts_gives_the_same_every_time(
    device: torch.device, programs: int, window_left: int | None, has_sinks: bool
) -> None:
    case = Case(AttentionShape(4, 2, 32, 16, window_left), [(5, 1), (140, 1), (0, 1)], seed=3)
    layer = head_major(case.layer(KvLayout.TOKEN_MAJOR, DTYPE), device)
    batch = moved(case.batch(), device)
    queries = case.qkv()[:, :128].to(device, DTYPE)
    decode = DecodeAttention(case.shape, 3, device, DecodeTuning(block=32, least_part=32, programs=programs))
    whole = DecodeAttention(case.shape, 3, device, DecodeTuning(block=32, programs=1))
    assert decode.parts_of(3) == {1: 1, 8: 1, 64: 8}[programs]
    rows = torch.arange(3, dtype=torch.int32, device=device)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=device) if has_sinks else None
    expected = whole(queries, layer, batch.page_table, rows, batch.key_lengths, sinks)
    for _ in range(3):
        got = decode(queries, layer, batch.page_table, rows, batch.key_lengths, sinks)
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_of_a_table_are_found_by_their_index(device: torch.device) -> None:
    case = Case(AttentionShape(2, 1, 16, 16), [(40, 1), (70, 1)], seed=5)
    layer, batch = head_major(case.layer(KvLayout.TOKEN_MAJOR, DTYPE), device), moved(case.batch(), device)
    queries = case.qkv()[:, :32].to(device, DTYPE)
    decode = DecodeAttention(case.shape, 2, device)
    rows = torch.arange(2, dtype=torch.int32, device=device)
    expected = decode(queries, layer, batch.page_table, rows, batch.key_lengths)
    got = decode(queries, layer, batch.page_table.flip(0).contiguous(), rows.flip(0).contiguous(), batch.key_lengths)
    torch.testing.assert_close(got, expected)
