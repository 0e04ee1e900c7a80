"""Products of adapters by programs for GPUs: against those of the grouped ones, and whole models against PEFT."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from common.errors import ConfigurationError
from services.worker.engine.adapters.active import AdapterProducts, GroupedAdapters
from services.worker.engine.adapters.segmented import MOST_RANKS, SegmentedAdapters
from services.worker.engine.adapters.sites import (
    AdapterWeights,
    EmbeddingFactors,
    PartFactors,
    Site,
    SiteFactors,
    SitePart,
)
from services.worker.engine.kernels.gpu import adapter_products, elementwise
from services.worker.engine.kernels.gpu.adapter_products import TokenTiles
from services.worker.engine.kernels.gpu.backend import GpuBackend
from services.worker.engine.kernels.gpu.kernels import GpuGatedLinear
from services.worker.engine.model.config import Activation
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION, EVERYTHING, FEED_FORWARD, save_adapter
from tests.services.worker.engine.adapters.test_products import PROMPTS, check, logits_of, save_four
from tests.services.worker.engine.driving import load

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.interface import KernelBackend

SLOTS, HIDDEN, VOCABULARY = 5, 200, 50
# Of queries, keys and values, as far as an adapter changes them.
HEIGHTS = (96, 32, 40)
SITE = Site(tuple(SitePart(name, slice(None)) for name in ("q", "k", "v")))
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's kernels do not compute in float32")


def draw(generator: torch.Generator, device: torch.device, divisor: int, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) / divisor).to(device, torch.float16)


def random_adapter(rank: int, changed: tuple[bool, bool, bool], device: torch.device, seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    drawn = partial(draw, generator, device, 8)
    parts, first, ranks = [], 0, 0
    for index, height in enumerate(HEIGHTS):
        if changed[index]:
            parts.append(PartFactors(first, slice(ranks, ranks + rank), drawn(height, rank)))
            ranks += rank
        first += height
    sites = {SITE.name: SiteFactors(drawn(ranks, HIDDEN), tuple(parts))} if parts else {}
    embedding = EmbeddingFactors(drawn(VOCABULARY, rank), drawn(HIDDEN, rank)) if seed % 2 else None
    return AdapterWeights(f"adapter {seed}", rank, sites, embedding)


def results(
    adapters: AdapterProducts, slots: torch.Tensor, inputs: torch.Tensor, sums: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    adapters.use(slots)
    with adapters.start(SITE, inputs) as started:
        sums = sums.clone()
    adapters.add(SITE, inputs, sums, started)
    return sums, adapters.embed(token_ids, inputs)


@pytest.mark.parametrize("tokens", [1, 7, 40, pytest.param(300, marks=pytest.mark.slow)])
def test_any_ranks_in_one_pass_give_the_sums_of_one_adapter_after_the_other(tokens: int, device: torch.device) -> None:
    both = GroupedAdapters(SLOTS), SegmentedAdapters(SLOTS, device)
    changed = ((True, True, True), (True, False, True), (False, True, False), (False, False, False))
    for adapters in both:
        adapters.sites.append(SITE)
        for slot, (rank, parts) in enumerate(zip((8, 256, 33, 16), changed, strict=True)):
            adapters.put(slot, random_adapter(rank, parts, device, seed=slot))
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randint(-1, 4, (tokens,), generator=generator, dtype=torch.int32).to(device)
    inputs = torch.randn(tokens, HIDDEN, generator=generator).to(device, torch.float16)
    sums = torch.randn(tokens, sum(HEIGHTS), generator=generator).to(device, torch.float16)
    token_ids = torch.randint(VOCABULARY, (tokens,), generator=generator).to(device)
    wanted, found = (results(adapters, slots, inputs, sums, token_ids) for adapters in both)
    for reference, got in zip(wanted, found, strict=True):
        torch.testing.assert_close(got, reference, atol=0.03, rtol=0.01)
    without = slots == -1
    assert torch.equal(found[0][without], sums[without]), "tokens without an adapter are left alone"
    assert torch.equal(found[1][without], inputs[without])


@pytest.mark.parametrize("tokens", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_wide_inputs_are_shrunk_in_shares(tokens: int, device: torch.device) -> None:
    """Shares of inputs give the sums of whole ones."""
    slots, width, heights, rank = 5, 2100, (160, 40), 40
    site = Site(tuple(SitePart(name, slice(None)) for name in ("gate", "up")))
    generator = torch.Generator().manual_seed(0)
    drawn = partial(draw, generator, device, 8)
    both = GroupedAdapters(slots), SegmentedAdapters(slots, device)
    for adapters in both:
        adapters.sites.append(site)
    for slot in range(4):
        parts = (
            PartFactors(0, slice(0, rank), drawn(heights[0], rank)),
            PartFactors(heights[0], slice(rank, 2 * rank), drawn(heights[1], rank)),
        )
        weights = AdapterWeights(f"{slot}", rank, {site.name: SiteFactors(drawn(2 * rank, width), parts)}, None)
        for adapters in both:
            adapters.put(slot, weights)
    chosen = torch.randint(-1, 4, (tokens,), generator=generator, dtype=torch.int32).to(device)
    inputs, sums = drawn(tokens, width), drawn(tokens, sum(heights))
    found = []
    for adapters in both:
        adapters.use(chosen)
        found.append(sums.clone())
        adapters.add(site, inputs, found[-1])
    assert not torch.equal(found[0], sums)
    torch.testing.assert_close(found[1], found[0], atol=0.03, rtol=0.01)


@pytest.mark.parametrize("changed", [(True, True), (True, False), (False, True)], ids=["both", "gate", "up"])
@pytest.mark.parametrize("tokens", [23, 50, pytest.param(300, marks=pytest.mark.slow)])
def test_halves_get_their_sums_before_they_are_gated(
    tokens: int, changed: tuple[bool, bool], device: torch.device
) -> None:
    """Whichever half an adapter changes, and of an odd height; tokens without one get the bits of the plain gate.

    Tiles of 23 tokens are half empty at least, and those of 50 are fuller.
    """
    hidden, height, rank = 96, 77, 6
    site = Site(tuple(SitePart(name, slice(None)) for name in ("gate", "up")))
    generator = torch.Generator().manual_seed(tokens)
    drawn = partial(draw, generator, device, 4)
    product = GpuGatedLinear(drawn(2 * height, hidden), None, Activation.SILU)
    grouped, segmented = GroupedAdapters(SLOTS), SegmentedAdapters(SLOTS, device)
    for adapters in (grouped, segmented):
        adapters.sites.append(site)
    for slot in range(3):
        parts, ranks = [], 0
        for index, is_changed in enumerate(changed):
            if is_changed:
                parts.append(PartFactors(index * height, slice(ranks, ranks + rank), drawn(height, rank)))
                ranks += rank
        weights = AdapterWeights(f"{slot}", rank, {site.name: SiteFactors(drawn(ranks, hidden), tuple(parts))}, None)
        for adapters in (grouped, segmented):
            adapters.put(slot, weights)
    slots = (torch.arange(tokens, dtype=torch.int32) % 4 - 1)[torch.randperm(tokens, generator=generator)].to(device)
    inputs = drawn(tokens, hidden)
    for adapters in (grouped, segmented):
        adapters.use(slots)
    found = segmented.gate(product, site, Activation.SILU, inputs)
    wanted = grouped.gate(product, site, Activation.SILU, inputs)
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0.01)
    plain = elementwise.gate(product.halves(inputs), Activation.SILU)
    without = slots == -1
    assert torch.equal(found[without], plain[without])
    assert not torch.equal(found, plain)


def test_each_token_can_have_an_adapter_of_its_own(device: torch.device) -> None:
    """There are more tiles then than programs find room at a time."""
    tokens, width, height, rank = 40, 48, 208, 4
    assert tokens > 4 * adapter_products._INTERPRETED_MULTIPROCESSORS
    site = Site((SitePart("out", slice(None)),))
    generator = torch.Generator().manual_seed(0)
    drawn = partial(draw, generator, device, 4)
    both = GroupedAdapters(tokens), SegmentedAdapters(tokens, device)
    for adapters in both:
        adapters.sites.append(site)
    for slot in range(tokens):
        factors = SiteFactors(drawn(rank, width), (PartFactors(0, slice(0, rank), drawn(height, rank)),))
        for adapters in both:
            adapters.put(slot, AdapterWeights(f"{slot}", rank, {site.name: factors}, None))
    slots = torch.randperm(tokens, generator=generator, dtype=torch.int32).to(device)
    inputs, sums = drawn(tokens, width), drawn(tokens, height)
    found = []
    for adapters in both:
        adapters.use(slots)
        found.append(sums.clone())
        adapters.add(site, inputs, found[-1])
    torch.testing.assert_close(found[1], found[0], atol=0.01, rtol=0.01)


def test_slots_are_filled_again_and_emptied(device: torch.device) -> None:
    adapters = SegmentedAdapters(SLOTS, device)
    adapters.sites.append(SITE)
    inputs = torch.randn(4, HIDDEN).to(device, torch.float16)
    slots, token_ids = torch.full((4,), 3, dtype=torch.int32, device=device), torch.arange(4, device=device)
    seen = []
    for seed in (1, 2, 1):
        adapters.put(3, random_adapter(8, (True, True, True), device, seed))
        seen.append(results(adapters, slots, inputs, inputs.new_zeros(4, sum(HEIGHTS)), token_ids)[0])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    adapters.clear()
    assert not results(adapters, slots, inputs, inputs.new_zeros(4, sum(HEIGHTS)), token_ids)[0].any()


@st.composite
def slots_of_tokens(draw: st.DrawFn) -> tuple[int, list[int]]:
    count = draw(st.sampled_from((1, 7, 31, 32, 100)))
    return count, draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=draw(st.sampled_from((40, 400)))))


@settings(max_examples=60, deadline=None)
@given(slots_of_tokens())
@example((2, [1] * 256))
@example((1, [-1]))
def test_tiles_have_every_token_once(device: torch.device, case: tuple[int, list[int]]) -> None:
    slots, of_tokens = case
    made = TokenTiles.of(torch.tensor(of_tokens, dtype=torch.int32).to(device), slots)
    seen, used, lines, counts = [], [], [], set()
    for line, first, stop, count in made.tiles.tolist():
        used.append(stop > first)
        counts.add(count)
        lines += [line] * (stop > first)
        assert stop - first <= made.rows
        members = made.order[first:stop].tolist()
        assert all(of_tokens[token] == line - 1 for token in members)
        seen += members
    assert used == sorted(used, reverse=True)
    assert counts == {sum(used)}
    assert lines == sorted(lines)
    assert sorted(seen) == list(range(len(of_tokens)))
    assert seen == sorted(seen, key=lambda token: (of_tokens[token], token))


class _Interpreted(GpuBackend):
    """The same kernels, for a runner that captures no graphs."""

    name = "interpreted"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(_library: object, dtype: torch.dtype, device: torch.device, _threads: int, _b: object) -> KernelBackend:
        return _Interpreted(dtype, device, max_rows=8)

    monkeypatch.setattr("services.worker.engine.rank_model.select_backend", select)


@pytest.mark.slow
@in_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("family", "modules"), [("llama tied", EVERYTHING), ("qwen2 moe", (*ATTENTION, *FEED_FORWARD))]
)
def test_models_give_the_logits_of_peft(family: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    model, adapters = save_four(tmp_path, family, modules)
    runner = load(model, backend="torch", adapter_slots=4)
    assert len(PROMPTS) == len(adapters)
    check(model, adapters, logits_of(runner, adapters))


@in_interpreter
@pytest.mark.usefixtures("interpreted")
def test_a_rank_beyond_the_buffers_of_graphs_is_refused(tmp_path: Path) -> None:
    model, _ = save_four(tmp_path, "llama", ATTENTION)
    large = save_adapter(model, tmp_path / "large", ("q_proj",), r=MOST_RANKS + 1)
    runner = load(model, backend="torch", adapter_slots=1)
    assert runner.adapters is not None
    with pytest.raises(ConfigurationError, match="rank 513 is above 512"):
        runner.adapters.read(large)
