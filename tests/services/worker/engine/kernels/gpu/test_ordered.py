"""The GPU's programs of `model.deterministic`: right everywhere, and on a GPU the same bits in every batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import linear

from common.errors import ConfigurationError
from services.worker.engine.kernels.interface import AttentionShape, ExpertMatrices, KvLayout, QkNorm
from services.worker.engine.model.config import Activation
from tests.services.worker.engine.kernels.attention_cases import Case

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.logprobs import MOST_NAMED, LogprobBuffers, report
from services.worker.engine.kernels.gpu.ordered_attention import OrderedAttention, OrderedTuning, QueryTile
from services.worker.engine.kernels.gpu.ordered_kernels import OrderedKernels
from services.worker.engine.kernels.gpu.ordered_product import TILES, OrderedMatrix, OrderedTile
from tests.services.worker.engine.kernels.gpu.test_attention import (
    DTYPE,
    cases,
    check,
    head_major,
    moved,
    table,
)
from tests.services.worker.engine.kernels.gpu.test_kernels import close

HAS_GPU = torch.cuda.is_available()
UNCUT = OrderedTuning(programs=1)

if TYPE_CHECKING:
    from services.worker.engine.model.batch import ForwardBatch


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tokens", [1, 70, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_any_size(device: torch.device, tokens: int, has_bias: bool) -> None:
    inputs, weight, sums = numbers(tokens, 200), numbers(300, 200, seed=1), numbers(tokens, 300, seed=2)
    bias = numbers(300, seed=3) if has_bias else None
    expected = linear(inputs.double(), weight.double(), bias.double() if bias is not None else None)
    product = OrderedKernels(DTYPE, device).linear(weight, bias)
    close(product(inputs.to(device)), expected)
    given_outputs = torch.full((tokens, 300), torch.nan, dtype=DTYPE, device=device)
    assert product(inputs.to(device), given_outputs) is given_outputs
    close(given_outputs, expected)
    added = sums.to(device, copy=True)
    product.add_to(inputs.to(device), added)
    close(added, sums.double() + expected)


def test_nothing_is_multiplied_without_tokens(device: torch.device) -> None:
    product = OrderedKernels(DTYPE, device).linear(numbers(24, 16), None)
    assert product(numbers(0, 16).to(device)).shape == (0, 24)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_are_right_with_every_tile(device: torch.device, tile: OrderedTile) -> None:
    inputs, weight = numbers(70, 136), numbers(90, 136, seed=1)
    outputs = torch.full((70, 90), torch.nan, dtype=DTYPE, device=device)
    OrderedMatrix(weight.to(device)).write(inputs.to(device), None, outputs, tile=tile)
    close(outputs, linear(inputs.double(), weight.double()))


def test_matrices_whose_rows_begin_at_odd_places_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="matrices of 90 inputs, which are no multiple of 8"):
        OrderedMatrix(numbers(8, 90, dtype=torch.bfloat16))


@pytest.mark.gpu  # Triton's interpreter does not multiply bfloat16
def test_products_in_float32_are_exact_to_its_rounding(device: torch.device) -> None:
    inputs, weight = numbers(5, 64, dtype=torch.bfloat16), numbers(40, 64, seed=1, dtype=torch.float32)
    got = OrderedKernels(DTYPE, device).wide_linear(weight)(inputs.to(device))
    assert got.dtype == torch.float32
    expected = linear(inputs.double(), weight.double())
    torch.testing.assert_close(got.cpu().double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=60 if HAS_GPU else 6, deadline=None)
@given(case=cases())
def test_rows_of_every_shape_attend_as_in_plain_torch(case: Case, device: torch.device) -> None:
    tuning = (UNCUT, OrderedTuning())[case.seed // 2 % 2]

    def make(shape: AttentionShape) -> OrderedAttention:
        return OrderedAttention(shape, table(shape).to(device), 8, tuning)

    check(replace(case, blocks=()), device, make)


@pytest.mark.parametrize("window_left", [None, 300])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_that_are_cut_into_segments_get_the_same_bits(
    device: torch.device, window_left: int | None, has_sinks: bool
) -> None:
    shape = AttentionShape(4, 2, 32, 16, window_left)
    case = Case(shape, [(520, 1), (0, 1), (255, 1), (256, 1), (250, 12)], seed=3)
    layer, batch = head_major(case.layer(KvLayout.TOKEN_MAJOR, DTYPE), device), moved(case.batch(), device)
    queries = case.qkv()[:, : shape.query_width].to(device, DTYPE).contiguous()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=device) if has_sinks else None
    whole, *cut = (
        OrderedAttention(shape, table(shape).to(device), 8, OrderedTuning(programs=programs))
        for programs in (1, 40, 500)
    )
    expected = whole.attend(queries, layer, batch, sinks)
    assert bool(expected.isfinite().all())
    for attention in cut:
        for _ in range(2):
            assert torch.equal(attention.attend(queries, layer, batch, sinks), expected)


def test_log_probabilities_are_those_of_plain_torch(device: torch.device) -> None:
    logits = numbers(3, 9001).to(device)
    chosen = torch.tensor([5, 9000, 17], dtype=torch.int32, device=device)
    named = torch.zeros(3, MOST_NAMED, dtype=torch.int64, device=device)
    buffers = LogprobBuffers.empty(3, 9001, device)
    report(logits, chosen, named, buffers)
    expected = torch.log_softmax(logits.float(), dim=1).gather(1, chosen.long()[:, None])[:, 0]
    torch.testing.assert_close(buffers.values[:, 0], expected, atol=1e-4, rtol=1e-4)


# What follows compares bits, which only matrix units of a GPU give in a fixed order.


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "width"), [(6144, 4096), (28672, 4096), (4096, 14336), (1000, 200)])
def test_bits_of_products_depend_neither_on_tokens_nor_on_tiles(device: torch.device, outputs: int, width: int) -> None:
    weight, inputs = numbers(outputs, width).to(device) / 50, numbers(1100, width, seed=1).to(device)
    matrix, whole = OrderedMatrix(weight), torch.empty(1100, outputs, dtype=DTYPE, device=device)
    matrix.write(inputs, None, whole)
    for first, count in itertools.product((0, 37), (1, 2, 15, 16, 17, 64, 65, 128, 129, 256, 300, 700)):
        part = torch.full((count, outputs), torch.nan, dtype=DTYPE, device=device)
        matrix.write(inputs[first : first + count], None, part)
        assert torch.equal(part, whole[first : first + count]), (first, count)
    for tile in TILES:
        again = torch.full_like(whole, torch.nan)
        matrix.write(inputs, None, again, tile=tile)
        assert torch.equal(again, whole), tile


@pytest.mark.gpu
def test_bits_of_experts_do_not_depend_on_tokens(device: torch.device) -> None:
    matrices = (
        ExpertMatrices(*(numbers(*shape, seed=7 * i + j) / 20 for j, shape in enumerate([(96, 256)] * 2 + [(256, 96)])))
        for i in range(16)
    )
    kernels = OrderedKernels(DTYPE, device)
    experts = kernels.experts(16, matrices, Activation.SILU)
    router = kernels.wide_linear(numbers(16, 256, dtype=torch.float32).to(device))
    inputs = numbers(600, 256, seed=1).to(device)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        weights, ids = router(tokens).softmax(dim=-1).topk(4)
        return experts(tokens, ids, weights.to(DTYPE))

    whole = compute(inputs)
    for first, count in itertools.product((0, 37), (1, 2, 17, 64, 256, 500)):
        assert torch.equal(compute(inputs[first : first + count]), whole[first : first + count]), (first, count)


def of_row(case: Case, batch: ForwardBatch, row: int, old: int, new: int) -> ForwardBatch:
    """Return a batch of the tokens [old, old + new) of one row of `case`."""
    size, pages = case.shape.page_size, batch.page_table[row]
    places = torch.arange(old, old + new, device=pages.device)
    return replace(
        batch, token_ids=places, positions=places,
        query_starts=torch.tensor([0, new], dtype=torch.int32, device=pages.device),
        key_lengths=torch.tensor([old + new], dtype=torch.int32).to(pages.device), page_table=pages[None],
        write_slots=pages[places // size].long() * size + places % size, sample_indices=places[-1:],
        decode_rows=int(new == 1), max_query_length=new, max_key_length=old + new,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(32, 8, 128, 16),
        AttentionShape(14, 2, 64, 16, 200, 0.3, 30.0),
        AttentionShape(8, 4, 256, 16, 511),
        AttentionShape(6, 6, 80, 64),
        AttentionShape(16, 1, 128, 16, 255, is_chunked=True),
    ],
    ids=["llama", "window and cap", "gemma", "one head each", "chunked"],
)
def test_bits_of_attention_depend_neither_on_chunks_nor_on_rows(device: torch.device, shape: AttentionShape) -> None:
    tokens = 1100
    case = Case(shape, [(0, tokens)], seed=5)
    layer = head_major(case.layer(KvLayout.TOKEN_MAJOR, DTYPE), device)
    norms = QkNorm(numbers(shape.head_dim, seed=8).to(device), numbers(shape.head_dim, seed=9).to(device), 1e-6)
    tuning = OrderedTuning()
    others = [
        OrderedTuning(programs=1),
        replace(tuning, decode=QueryTile(16, 4, 3), chunk=QueryTile(16, 2, 2)),
    ]
    attention, *varied = (OrderedAttention(shape, table(shape).to(device), 300, each) for each in (tuning, *others))
    batch, qkv = moved(case.batch(), device), case.qkv().to(device, DTYPE)
    whole = attention.store_and_attend(qkv.clone(), layer, norms, batch)
    stored = layer.keys.clone()
    assert bool(whole.isfinite().all())
    for each in varied:
        assert torch.equal(each.store_and_attend(qkv.clone(), layer, norms, batch), whole)
    for borders in ([0, 7, 300, tokens], [0, 512, 1024, tokens], [0, 1000, *range(1001, tokens + 1)]):
        for old, end in itertools.pairwise(borders):
            part = of_row(case, batch, 0, old, end - old)
            got = attention.store_and_attend(qkv[old:end].clone(), layer, norms, part)
            assert torch.equal(got, whole[old:end]), (borders, old)
            assert torch.equal(layer.keys, stored)
    # The last 200 tokens as rows that decode, which share pages; then beside the chunk of all tokens.
    last = torch.arange(tokens - 200, tokens, device=device)
    rows = replace(
        batch, token_ids=last, positions=last, query_starts=torch.arange(201, dtype=torch.int32, device=device),
        key_lengths=(last + 1).int(), page_table=batch.page_table.expand(200, -1).contiguous(),
        write_slots=batch.write_slots[last], decode_rows=200, max_query_length=1,
    )  # fmt: skip
    assert torch.equal(attention.store_and_attend(qkv[last].clone(), layer, norms, rows), whole[last])
    together = replace(
        rows, positions=torch.cat((last, batch.positions)),
        write_slots=torch.cat((rows.write_slots, batch.write_slots)),
        query_starts=torch.cat((rows.query_starts[:-1], batch.query_starts + 200)),
        key_lengths=torch.cat((rows.key_lengths, batch.key_lengths)),
        page_table=torch.cat((rows.page_table, batch.page_table)), max_query_length=tokens,
    )  # fmt: skip
    got = attention.store_and_attend(torch.cat((qkv[last], qkv)), layer, norms, together)
    assert torch.equal(got, torch.cat((whole[last], whole)))


@pytest.mark.gpu
def test_bits_of_log_probabilities_do_not_depend_on_rows(device: torch.device) -> None:
    for vocabulary in (128256, 151669, 262144):
        logits = numbers(256, vocabulary, seed=1).to(device)
        chosen = torch.arange(256, dtype=torch.int32, device=device)
        named = torch.arange(256 * MOST_NAMED, device=device).view(256, MOST_NAMED) % vocabulary
        whole = LogprobBuffers.empty(256, vocabulary, device)
        report(logits, chosen, named, whole)
        for first, count in ((0, 1), (3, 1), (200, 7), (64, 64)):
            part, rows = LogprobBuffers.empty(count, vocabulary, device), slice(first, first + count)
            report(logits[rows].contiguous(), chosen[rows], named[rows], part)
            assert torch.equal(part.values, whole.values[rows]), (vocabulary, first, count)
            assert torch.equal(part.top_ids, whole.top_ids[rows]), (vocabulary, first, count)
