"""Every attention back end against the definition of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.kernels.cpu.attention import CpuAttention, fits
from services.worker.engine.kernels.interface import AttentionBackend, AttentionShape, KvLayer, KvScales, QkNorm
from services.worker.engine.kernels.torch.attention import TorchAttention
from services.worker.engine.kernels.torch.kernels import rms_norm
from tests.examples import examples
from tests.services.worker.engine.kernels.attention_cases import Case, cases, token_major, widened

if TYPE_CHECKING:
    from services.worker.engine.kernels.cpu.library import CpuLibrary

KV_TYPES = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LOG2_E = torch.tensor(1.44269504)


def backends(library: CpuLibrary, shape: AttentionShape) -> list[AttentionBackend]:
    angles = torch.rand(256, shape.head_dim // 2, generator=torch.Generator().manual_seed(9)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return [TorchAttention(shape, table), *(CpuAttention(library, shape, table, threads) for threads in (1, 3))]


def rounds(library: CpuLibrary, backend: AttentionBackend, dtype: torch.dtype) -> bool:
    """Return whether `backend` rounds queries and shares to `dtype`, that of keys and values."""
    return isinstance(backend, CpuAttention) and dtype == torch.bfloat16 and library.attends_by_tiles


def seen_queries(queries: torch.Tensor, shape: AttentionShape, *, rounds: bool) -> torch.Tensor:
    """Return queries as attention by tiles rounds them: scaled, for powers of two unless scores are capped."""
    if not rounds:
        return queries
    factor = torch.tensor(shape.scale) * (1.0 if shape.attention_softcap else LOG2_E)
    return (queries * factor).bfloat16().double() / factor.double()


def defined(case: Case, queries: torch.Tensor, layer: KvLayer, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attend token by token and head by head, in double precision."""
    batch, shape = case.batch(), case.shape
    group, size = shape.query_heads // shape.kv_heads, shape.page_size
    outputs = torch.empty(queries.shape)
    for row in range(batch.rows):
        length = int(batch.key_lengths[row])
        places = torch.arange(length)
        pages, offsets = batch.page_table[row, places // size].long(), places % size
        keys, values = layer.keys[pages, offsets].double(), layer.values[pages, offsets].double()
        for token in range(int(batch.query_starts[row]), int(batch.query_starts[row + 1])):
            position = int(batch.positions[token])
            if shape.window_left is None:
                first = 0
            elif shape.is_chunked:
                first = position // (shape.window_left + 1) * (shape.window_left + 1)
            else:
                first = max(0, position - shape.window_left)
            end = position + 1
            for block_row, start, stop in case.blocks:
                if block_row == row and start <= token - int(batch.query_starts[row]) < stop:
                    end = case.rows[row][0] + stop
            seen = slice(first, end)
            heads = queries[token].double().view(shape.kv_heads, group, shape.head_dim)
            scores = torch.einsum("hgd,thd->hgt", heads, keys[seen]) * shape.scale
            if shape.attention_softcap is not None:
                scores = torch.tanh(scores / shape.attention_softcap) * shape.attention_softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(shape.kv_heads, group, 1)], dim=-1)
            shares = scores.softmax(-1)[..., : end - first]
            outputs[token] = torch.einsum("hgt,thd->hgd", shares, values[seen]).float().flatten()
    return outputs


@examples(20)
@given(cases())
def test_attention_follows_its_definition(library: CpuLibrary, case: Case) -> None:
    queries = case.qkv()[:, : case.shape.query_width].contiguous()
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, torch.float32)
        expected = defined(case, queries, token_major(layer, backend.layout), case.sinks())
        got = backend.attend(queries, layer, case.batch(), case.sinks())
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window_left", [None, 20])
@pytest.mark.parametrize("sink", [-100.0, 0.0, 60.0])
def test_sinks_take_their_part_of_the_softmax(library: CpuLibrary, sink: float, window_left: int | None) -> None:
    case = Case(AttentionShape(6, 2, 64, 16, window_left=window_left), [(150, 1), (3, 1), (130, 30)], seed=1)
    queries, sinks = case.qkv()[:, : case.shape.query_width].contiguous(), torch.zeros(6)
    sinks[4] = sink
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, torch.float32)
        expected = defined(case, queries, token_major(layer, backend.layout), sinks)
        got = backend.attend(queries, layer, case.batch(), sinks)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
        assert bool((got[:, 256:320].abs() < 1e-5).all()) == (sink == 60.0)


def test_scores_without_a_scale_are_divided_by_the_root_of_their_width() -> None:
    assert AttentionShape(4, 2, 64, 16).scale == 1 / 8
    assert AttentionShape(4, 2, 64, 16, score_scale=0.5).scale == 0.5


def test_pages_before_all_windows_are_never_read(library: CpuLibrary) -> None:
    case = Case(AttentionShape(6, 2, 64, 16, window_left=20), [(150, 1), (70, 1), (130, 30)], seed=1)
    queries, batch = case.qkv()[:, : case.shape.query_width].contiguous(), case.batch()
    table = batch.page_table.clone()
    for row, (old, _) in enumerate(case.rows):
        # These pages were given to somebody else.
        table[row, : (old - 20) // 16] = table[(row + 1) % 3, 3]
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, torch.float32)
        expected = backend.attend(queries, layer, batch)
        assert torch.equal(backend.attend(queries, layer, replace(batch, page_table=table)), expected)


def test_a_query_sees_its_own_chunk_only(library: CpuLibrary) -> None:
    shape = AttentionShape(6, 2, 64, 16, window_left=31, is_chunked=True)
    # At a chunk's first and last token, across two borders, and within one.
    case = Case(shape, [(64, 1), (63, 1), (40, 1), (20, 60), (32, 10)], seed=1)
    queries, batch = case.qkv()[:, : shape.query_width].contiguous(), case.batch()
    table = batch.page_table.clone()
    for row, (old, _) in enumerate(case.rows):
        # These pages were given to another row.
        table[row, : old // 32 * 2] = table[(row + 1) % 5, 4]
    for backend in backends(library, shape):
        layer = case.layer(backend.layout, torch.float32)
        expected = defined(case, queries, token_major(layer, backend.layout))
        got = backend.attend(queries, layer, replace(batch, page_table=table))
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cap", [0.5, 2.0, 50.0])
def test_scores_are_capped(library: CpuLibrary, cap: float) -> None:
    shape = AttentionShape(4, 2, 32, 16, window_left=30, score_scale=0.7, attention_softcap=cap)
    case = Case(shape, [(100, 1), (3, 1), (20, 30)], seed=1)
    queries = case.qkv()[:, : shape.query_width].contiguous()
    for backend in backends(library, shape):
        layer = case.layer(backend.layout, torch.float32)
        expected = defined(case, queries, token_major(layer, backend.layout))
        torch.testing.assert_close(backend.attend(queries, layer, case.batch()), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", KV_TYPES)
def test_attention_reads_every_type_of_kv(library: CpuLibrary, dtype: torch.dtype) -> None:
    case = Case(AttentionShape(6, 2, 64, 16), [(100, 1), (3, 1), (20, 30)], seed=1)
    queries = case.qkv()[:, : case.shape.query_width].contiguous()
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, dtype)
        # The values were rounded when they were stored; reading them is exact.
        expected = defined(case, queries, token_major(layer, backend.layout))
        tolerance = 2e-2 if rounds(library, backend, dtype) else 2e-5
        got = backend.attend(queries, layer, case.batch())
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@examples(20)
@given(cases(), st.sampled_from([None, 2.0, 50.0]))
def test_attention_by_tiles_only_rounds_queries_and_shares(library: CpuLibrary, case: Case, cap: float | None) -> None:
    case = replace(case, shape=replace(case.shape, attention_softcap=cap))
    queries, dtype = case.qkv()[:, : case.shape.query_width].contiguous(), torch.bfloat16
    for backend in backends(library, case.shape):
        is_rounded = rounds(library, backend, dtype)
        layer, seen = case.layer(backend.layout, dtype), seen_queries(queries, case.shape, rounds=is_rounded)
        plain, half_unit = token_major(layer, backend.layout), 2.0**-8 if is_rounded else 0.0
        expected = defined(case, seen, plain, case.sinks())
        magnitude = defined(case, seen, replace(plain, values=plain.values.abs()), case.sinks())
        got = backend.attend(queries, layer, case.batch(), case.sinks())
        assert bool(((got - expected).abs() <= half_unit * magnitude + 3e-5 * (1 + expected.abs())).all())


@settings(max_examples=12)
@given(cases())
def test_attention_multiplies_keys_and_values_in_float8_by_their_scales(library: CpuLibrary, case: Case) -> None:
    queries = case.qkv()[:, : case.shape.query_width].contiguous()
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, torch.float8_e4m3fn)
        expected = defined(case, queries, widened(token_major(layer, backend.layout)), case.sinks())
        got = backend.attend(queries, layer, case.batch(), case.sinks())
        torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)


@settings(max_examples=12)
@given(cases())
def test_keys_and_values_are_rounded_to_float8_as_torch_rounds_them(library: CpuLibrary, case: Case) -> None:
    batch = case.batch()
    for backend in backends(library, case.shape):
        exact, rounded = (case.layer(backend.layout, dtype) for dtype in (torch.float32, torch.float8_e4m3fn))
        assert rounded.scales is not None
        wanted = backend.store(case.qkv(), exact, None, batch)
        assert torch.equal(backend.store(case.qkv(), rounded, None, batch), wanted)
        exact, stored = token_major(exact, backend.layout), token_major(rounded, backend.layout)
        pages, offsets = batch.write_slots // case.shape.page_size, batch.write_slots % case.shape.page_size
        for numbers, result, scales in (
            (exact.keys, stored.keys, rounded.scales.keys),
            (exact.values, stored.values, rounded.scales.values),
        ):
            expected = (numbers[pages, offsets] / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(result[pages, offsets].view(torch.uint8), expected.view(torch.uint8))


def test_every_number_is_rounded_to_float8_alike_and_large_ones_are_limited(library: CpuLibrary) -> None:
    shape = AttentionShape(1, 1, 64, 16)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every[every.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    around = torch.cat([between, between.nextafter(torch.tensor(1e9)), between.nextafter(torch.tensor(-1e9))])
    large = torch.tensor([449.0, 464.0, 465.0, 1e4, 3e38, torch.inf]).repeat(2, 1) * torch.tensor([[1.0], [-1.0]])
    values = torch.cat([numbers, around, large.flatten(), torch.tensor([1e-9, -1e-40, -0.0])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 64)
    tokens = len(values)
    case = Case(shape, [(0, tokens)], seed=1)
    qkv = torch.cat([torch.zeros(tokens, 128), values], dim=1)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert bool(expected.float().isfinite().all())
    for backend in backends(library, shape):
        layer = case.layer(backend.layout, torch.float8_e4m3fn)
        layer = replace(layer, scales=KvScales(torch.ones(1), torch.ones(1)))
        backend.store(qkv.clone(), layer, None, case.batch())
        batch, plain = case.batch(), token_major(layer, backend.layout)
        stored = plain.values[batch.write_slots // 16, batch.write_slots % 16, 0]
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
        if not isinstance(backend, CpuAttention):
            continue
        # The compiled attention reads each number as torch does: a single key has the whole softmax.
        reader = CpuAttention(library, replace(shape, window_left=0), backend.angles, 1)
        for token in range(tokens):
            one = replace(Case(shape, [(token, 1)], seed=1).batch(), page_table=batch.page_table)
            assert torch.equal(reader.attend(torch.zeros(1, 64), layer, one)[0], expected[token].float())


@settings(max_examples=25)
@given(cases())
def test_back_ends_store_the_same_keys_and_values(library: CpuLibrary, case: Case) -> None:
    torch.manual_seed(case.seed)
    norms = QkNorm(torch.rand(case.shape.head_dim), torch.rand(case.shape.head_dim), 1e-6)
    reference, *others = backends(library, case.shape)
    for chosen in (None, norms):
        wanted = case.layer(reference.layout, torch.float32)
        queries = reference.store(case.qkv(), wanted, chosen, case.batch())
        for backend in others:
            layer = case.layer(backend.layout, torch.float32)
            torch.testing.assert_close(backend.store(case.qkv(), layer, chosen, case.batch()), queries)
            plain = token_major(layer, backend.layout)
            torch.testing.assert_close(plain.keys, wanted.keys)
            assert torch.equal(plain.values, wanted.values)


@pytest.mark.parametrize(("dtype", "tolerance"), KV_TYPES.items())
def test_stored_tokens_are_rotated_normalised_and_rounded(
    library: CpuLibrary, dtype: torch.dtype, tolerance: float
) -> None:
    case = Case(AttentionShape(4, 2, 32, 16), [(5, 1), (0, 20)], seed=2)
    norms = QkNorm(torch.rand(32), torch.rand(32), 1e-6)
    batch, (queries, keys, values) = case.batch(), case.qkv().view(21, 8, 32).tensor_split([4, 6], dim=1)
    for backend in backends(library, case.shape):
        layer = case.layer(backend.layout, dtype)
        got = backend.store(case.qkv(), layer, norms, batch).view(21, 4, 32)
        plain = token_major(layer, backend.layout)
        pages, offsets = batch.write_slots // 16, batch.write_slots % 16
        angles = torch.rand(256, 16, generator=torch.Generator().manual_seed(9)) * 6
        turn = torch.polar(torch.ones(21, 1, 16), angles[batch.positions][:, None])
        for heads, weight, result in (
            (queries, norms.query, got),
            (keys, norms.key, plain.keys[pages, offsets]),
        ):
            first, second = rms_norm(heads, weight, 1e-6).chunk(2, dim=-1)
            turned = torch.view_as_real(torch.complex(first, second) * turn)
            expected = torch.cat((turned[..., 0], turned[..., 1]), dim=-1)
            torch.testing.assert_close(result.float(), expected, atol=tolerance * 3, rtol=tolerance)
        assert torch.equal(plain.values[pages, offsets], values.to(dtype))


@pytest.mark.parametrize("window_left", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_gets_the_same_bits_in_every_chunk(
    library: CpuLibrary, window_left: int | None, dtype: torch.dtype
) -> None:
    shape = AttentionShape(6, 2, 64, 16, window_left)
    whole = Case(shape, [(0, 150)], seed=3)
    queries = whole.qkv()[:, : shape.query_width].contiguous()
    for backend in backends(library, shape)[1:]:
        layer = whole.layer(backend.layout, dtype)
        expected = backend.attend(queries, layer, whole.batch())
        for old, new in ((149, 1), (100, 50), (63, 1), (64, 1), (65, 3), (20, 130)):
            part = Case(shape, [(old, new)], seed=3).batch()
            batch = whole.batch()
            object.__setattr__(part, "page_table", batch.page_table)
            got = backend.attend(queries[old : old + new].contiguous(), layer, part)
            assert torch.equal(got, expected[old : old + new])


@pytest.mark.parametrize("window_left", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_gets_the_same_bits_in_every_chunk(
    library: CpuLibrary, window_left: int | None, dtype: torch.dtype
) -> None:
    shape = AttentionShape(6, 2, 64, 16, window_left)
    whole = Case(shape, [(0, 150)], seed=3, blocks=((0, 30, 95), (0, 100, 101)))
    queries = whole.qkv()[:, : shape.query_width].contiguous()
    for backend in backends(library, shape)[1:]:
        layer = whole.layer(backend.layout, dtype)
        expected = backend.attend(queries, layer, whole.batch())
        part = Case(shape, [(30, 70)], seed=3, blocks=((0, 0, 65),)).batch()
        part = replace(part, page_table=whole.batch().page_table)
        assert torch.equal(backend.attend(queries[30:100].contiguous(), layer, part), expected[30:100])
        causal = backend.attend(queries, layer, replace(whole.batch(), blocks=None))
        same = (causal == expected).all(dim=1)
        # The last token of a block sees no more than without it.
        assert same.tolist() == [True] * 30 + [False] * 64 + [True] * 56


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_attention_scores_do_not_overflow(library: CpuLibrary, dtype: torch.dtype) -> None:
    case = Case(AttentionShape(2, 1, 16, 16), [(90, 1), (10, 70)], seed=4)
    queries = case.qkv()[:, :32].contiguous() * 300
    for backend in backends(library, case.shape):
        layer, is_rounded = case.layer(backend.layout, dtype), rounds(library, backend, dtype)
        got = backend.attend(queries, layer, case.batch())
        seen = seen_queries(queries, case.shape, rounds=is_rounded)
        expected, tolerance = defined(case, seen, token_major(layer, backend.layout)), 1e-2 if is_rounded else 1e-3
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_shapes_that_fill_no_register_are_not_for_compiled_attention(library: CpuLibrary) -> None:
    assert fits(library, AttentionShape(9, 3, 64, 16))
    assert not fits(library, AttentionShape(9, 3, 64, 5))
    assert not fits(library, AttentionShape(9, 3, 6, 16))
    assert not fits(library, AttentionShape(9, 3, 512, 16))
