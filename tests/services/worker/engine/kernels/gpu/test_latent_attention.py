"""The GPU's latent attention against plain torch, on random shapes and rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.kernels.gpu.libraries import has_flashinfer
from services.worker.engine.kernels.interface import AttentionShape, KvLayer, KvLayout
from services.worker.engine.kernels.torch.attention import TorchAttention
from tests.services.worker.engine.kernels.attention_cases import Case

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.kernels.gpu.latent_attention import GpuLatentAttention
from services.worker.engine.kernels.gpu.latent_programs import LatentRowAttention, LatentTuning
from tests.services.worker.engine.kernels.gpu.test_attention import DTYPE, HAS_GPU, TOLERANCE, moved

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.worker.engine.model.batch import Attend


SIZES = ((16, 8), (24, 16), (80, 64), (512, 64))


@st.composite
def cases(draw: st.DrawFn, *, sizes: tuple[tuple[int, int], ...] = SIZES) -> Case:
    latent, rotary = draw(st.sampled_from(sizes))
    heads, page_size = draw(st.sampled_from([1, 3, 17])), draw(st.sampled_from([1, 5, 16, 64]))
    longest, widest = (2000, 70) if HAS_GPU else (90, 6)
    decoding = draw(st.lists(st.integers(0, longest), max_size=3))
    chunks = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(2, widest)), min_size=not decoding, max_size=2))
    scale = draw(st.sampled_from([None, 0.1]))
    shape = AttentionShape(heads, 1, latent + rotary, page_size, score_scale=scale, latent_dim=latent)
    return Case(shape, [*((old, 1) for old in decoding), *chunks], draw(st.integers(0, 2**31)))


def on(device: torch.device, layer: KvLayer, dtype: torch.dtype = DTYPE) -> KvLayer:
    rows = layer.keys.to(device, dtype, copy=True)
    return KvLayer(rows, rows[..., : layer.values.shape[-1]], is_latent=True)


def table(shape: AttentionShape) -> torch.Tensor:
    half = (shape.head_dim - shape.value_dim) // 2
    angles = torch.rand(2200, half, generator=torch.Generator().manual_seed(9)) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def check(case: Case, device: torch.device, make: Callable[[AttentionShape], GpuLatentAttention]) -> None:
    """Store and attend with both; compare queries, pool and outputs."""
    reference, attention = TorchAttention(case.shape, table(case.shape)), make(case.shape)
    layer = case.layer(KvLayout.TOKEN_MAJOR, DTYPE)
    mine, batch = on(device, layer), case.batch()
    projected = case.qkv().to(DTYPE)
    queries = reference.store(projected.clone(), layer, None, batch)
    got = attention.store(projected.to(device, copy=True), mine, None, moved(batch, device))
    torch.testing.assert_close(mine.keys.cpu(), layer.keys, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(got.cpu(), queries, atol=TOLERANCE, rtol=TOLERANCE)
    # From the same inputs, in double the precision, so that only the attention itself is compared.
    expected = reference.attend(got.float().cpu(), on(torch.device("cpu"), mine, torch.float32), batch)
    attended = attention.attend(got, mine, moved(batch, device)).float().cpu()
    assert attended.shape == (case.tokens, case.shape.query_heads * case.shape.value_dim)
    torch.testing.assert_close(attended, expected, atol=TOLERANCE, rtol=TOLERANCE)
    again = on(device, case.layer(KvLayout.TOKEN_MAJOR, DTYPE))
    at_once = attention.store_and_attend(projected.to(device, copy=True), again, None, moved(batch, device))
    assert torch.equal(at_once.float().cpu(), attended)
    assert torch.equal(again.keys, mine.keys)


@settings(max_examples=60 if HAS_GPU else 5, deadline=None)
@given(case=cases())
def test_rows_of_every_shape_attend_as_in_plain_torch(case: Case, device: torch.device) -> None:
    check(case, device, lambda shape: GpuLatentAttention(shape, table(shape).to(device), None, 4))


@pytest.mark.gpu
@pytest.mark.timeout(900)
@settings(max_examples=60, deadline=None)
@given(case=cases(sizes=((512, 64),)))
def test_flashinfer_attends_to_chunks_as_plain_torch_does(case: Case, device: torch.device) -> None:
    pytest.importorskip("flashinfer")
    from services.worker.engine.kernels.gpu.flashinfer_latent import FlashInferLatent

    case = replace(case, shape=replace(case.shape, page_size=16))

    def make(shape: AttentionShape) -> GpuLatentAttention:
        return GpuLatentAttention(shape, table(shape).to(device), FlashInferLatent(shape, device), 4)

    check(case, device, make)


@pytest.mark.parametrize(("programs", "parts"), [(1, 1), (12, 2), (100, 16)])
def test_a_row_cut_into_parts_gives_the_same(device: torch.device, programs: int, parts: int) -> None:
    shape = AttentionShape(20, 1, 48, 16, latent_dim=32)
    case = Case(shape, [(5, 1), (140, 1), (0, 1)], seed=3)
    layer, batch = on(device, case.layer(KvLayout.TOKEN_MAJOR, DTYPE)), moved(case.batch(), device)
    queries = case.qkv()[:, : shape.query_width].to(device, DTYPE)
    rows = torch.arange(3, dtype=torch.int32, device=device)
    results = []
    for count in (1, programs):
        attention = LatentRowAttention(shape, device, LatentTuning(block=16, least_part=16, programs=count))
        outputs = torch.empty(3, shape.output_width, dtype=DTYPE, device=device)
        attention(queries, outputs, layer, batch.page_table, rows, batch.key_lengths)
        results.append(outputs)
    assert attention.parts_of(3) == parts
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_of_a_table_are_found_by_their_index(device: torch.device) -> None:
    shape = AttentionShape(2, 1, 24, 16, latent_dim=16)
    case = Case(shape, [(40, 1), (70, 1)], seed=5)
    layer, batch = on(device, case.layer(KvLayout.TOKEN_MAJOR, DTYPE)), moved(case.batch(), device)
    queries = case.qkv()[:, : shape.query_width].to(device, DTYPE)
    attention = GpuLatentAttention(shape, table(shape).to(device), None, 2)
    flipped = replace(
        batch, page_table=batch.page_table.flip(0), table_rows=torch.tensor([1, 0], dtype=torch.int32, device=device)
    )
    assert torch.equal(attention.attend(queries, layer, flipped), attention.attend(queries, layer, batch))


def test_attention_between_piecewise_graphs_gives_the_same(device: torch.device) -> None:
    shape = AttentionShape(3, 1, 24, 16, latent_dim=16)
    case = Case(shape, [(40, 1), (9, 5)], seed=6)
    layer, batch = on(device, case.layer(KvLayout.TOKEN_MAJOR, DTYPE)), moved(case.batch(), device)
    queries = case.qkv()[:, : shape.query_width].to(device, DTYPE)
    attention = GpuLatentAttention(shape, table(shape).to(device), None, 2)
    deferred: list[tuple[Attend, torch.Tensor, torch.Tensor]] = []

    def defer(attend: Attend, queries: torch.Tensor, outputs: torch.Tensor, *, in_window: bool) -> None:
        assert not in_window
        deferred.append((attend, queries, outputs))

    # A graph is captured with a batch of its own, which is larger.
    outputs = attention.attend(queries, layer, replace(batch, decode_rows=0, defer=defer))
    [(attend, given, filled)] = deferred
    assert filled.data_ptr() == outputs.data_ptr()
    attend(given, filled, batch)
    assert torch.equal(outputs, attention.attend(queries, layer, batch))


class StatedWrapper:
    """Computes what FlashInfer's documentation of `BatchMLAPagedAttentionWrapper` says, where FlashInfer is not."""

    def __init__(self, workspace: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8
        self.plans = 0

    def plan(
        self, starts: torch.Tensor, page_starts: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor,
        *rest: Any,  # of several types
    ) -> None:  # fmt: skip
        assert {each.dtype for each in (starts, page_starts, pages, lengths)} == {torch.int32}
        self.plans += 1
        self.rows = [each.tolist() for each in (starts, page_starts, pages, lengths)]
        self.rest = rest

    def run(
        self, queries: torch.Tensor, turned: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        starts, page_starts, pages, lengths = self.rows
        heads, rank, rotary, page_size, is_causal, scale, dtype, kv_dtype = self.rest
        assert (queries.shape[1:], turned.shape[1:]) == ((heads, rank), (heads, rotary))
        assert (is_causal, dtype, kv_dtype) == (True, queries.dtype, latent.dtype)
        for row, length in enumerate(lengths):
            own = torch.tensor(pages[page_starts[row] : page_starts[row + 1]])
            assert len(own) == -(-length // page_size)
            values, keys = (part[own].flatten(0, 1)[:length] for part in (latent, rotated))
            for token in range(starts[row], starts[row + 1]):
                seen = length - (starts[row + 1] - token) + 1
                scores = (queries[token] @ values[:seen].T + turned[token] @ keys[:seen].T) * scale
                out[token] = scores.softmax(-1) @ values[:seen]


@pytest.mark.skipif(has_flashinfer(), reason="where FlashInfer is, it is tested itself")
def test_flashinfer_is_called_as_its_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    described = ModuleType("flashinfer.mla")
    described.BatchMLAPagedAttentionWrapper = StatedWrapper  # type: ignore[attr-defined]  # made for this test
    gpu = "services.worker.engine.kernels.gpu"
    modules = [f"{gpu}.flashinfer_prefill", f"{gpu}.flashinfer_latent"]
    assert not set(modules) & set(sys.modules), "FlashInfer is not installed"
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", described)
    cpu, make = torch.device("cpu"), import_module(modules[1]).FlashInferLatent
    # What was made of the stand-in is not for other tests.
    for name in modules:
        del sys.modules[name]
    shape = AttentionShape(3, 1, 24, 16, latent_dim=16)
    case = Case(shape, [(40, 1), (2, 1), (30, 9), (0, 5), (31, 2)], seed=7)
    check(case, cpu, lambda shape: GpuLatentAttention(shape, table(shape), make(shape, cpu), 2))
