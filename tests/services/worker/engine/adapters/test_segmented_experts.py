"""Adapters of experts by programs for GPUs: against the loop over experts, and whole models against PEFT."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from common.errors import ConfigurationError
from services.worker.engine.adapters.active import AdapterProducts, GroupedAdapters
from services.worker.engine.adapters.segmented import SegmentedAdapters
from services.worker.engine.adapters.sites import AdapterWeights, PartFactors, Site, SiteFactors, SitePart
from services.worker.engine.kernels.composed import ExpertLoop
from services.worker.engine.kernels.gpu.adapter_products import TokenTiles
from services.worker.engine.kernels.gpu.experts import GpuExperts
from services.worker.engine.kernels.torch.kernels import TorchKernels
from services.worker.engine.model.config import Activation
from services.worker.engine.quantization.fp8 import quantise
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION
from tests.services.worker.engine.adapters.test_products import PROMPTS, check, logits_of, save_four
from tests.services.worker.engine.adapters.test_segmented import in_interpreter, interpreted
from tests.services.worker.engine.driving import load
from tests.services.worker.engine.kernels.gpu.test_experts import (
    COLUMNS,
    DTYPE,
    HIDDEN,
    TOLERANCE,
    matrices,
    quantised,
    routed,
)

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.interface import Experts

__all__ = ["interpreted"]

EXPERTS, SLOTS = 5, 4
# An ordinary product before the experts' and one after them.
OTHERS = tuple(Site((SitePart(name, slice(None)),)) for name in ("before", "after"))
SITES = [
    (
        Site(tuple(SitePart(f"experts.{i}.{name}", slice(None)) for name in ("gate", "up"))),
        Site((SitePart(f"experts.{i}.down", slice(None)),)),
    )
    for i in range(EXPERTS)
]


def adapter(rank: int, changed: dict[int, str], device: torch.device, seed: int) -> AdapterWeights:
    """Return an adapter that changes `changed`: of an expert g, u and d for gate, up and down."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 4).to(device, DTYPE)

    sites = {}
    for expert, parts in changed.items():
        gate_up, down = SITES[expert]
        halves, ranks = [], 0
        for first, letter in ((0, "g"), (COLUMNS, "u")):
            if letter in parts:
                halves.append(PartFactors(first, slice(ranks, ranks + rank), drawn(COLUMNS, rank)))
                ranks += rank
        if halves:
            sites[gate_up.name] = SiteFactors(drawn(ranks, HIDDEN), tuple(halves))
        if "d" in parts:
            sites[down.name] = SiteFactors(drawn(rank, COLUMNS), (PartFactors(0, slice(0, rank), drawn(HIDDEN, rank)),))
    return AdapterWeights(f"adapter {seed}", rank, sites, None)


def adapters_in(products: AdapterProducts, device: torch.device) -> None:
    """Fill all slots but the last one, of which no token uses any."""
    changes = [{0: "gud", 3: "g", 4: "d"}, {1: "u", 3: "gud", 4: "gu"}, {}]
    for slot, (rank, changed) in enumerate(zip((8, 33, 4), changes, strict=True)):
        products.put(slot, adapter(rank, changed, device, slot))


def on_gpu(device: torch.device, **options: Any) -> tuple[GpuExperts, SegmentedAdapters, Experts]:
    plain = GpuExperts(
        EXPERTS, iter(options.pop("made", None) or matrices(EXPERTS, **options)), Activation.SILU, DTYPE, device
    )
    segmented = SegmentedAdapters(SLOTS, device, changes_experts=True)
    segmented.sites.append(OTHERS[0])
    changed = segmented.experts(plain, SITES, Activation.SILU)
    segmented.sites.append(OTHERS[1])
    return plain, segmented, changed


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 40, pytest.param(300, marks=pytest.mark.slow)])
def test_pairs_get_what_the_adapters_of_their_tokens_add_to_their_experts(
    tokens: int, has_biases: bool, device: torch.device
) -> None:
    cpu = torch.device("cpu")
    loop = ExpertLoop(
        TorchKernels(torch.float32, cpu), EXPERTS, iter(matrices(EXPERTS, has_biases=has_biases)), Activation.SILU
    )
    grouped = GroupedAdapters(SLOTS)
    reference = grouped.experts(loop, SITES, Activation.SILU)
    plain, segmented, changed = on_gpu(device, has_biases=has_biases)
    adapters_in(grouped, cpu)
    adapters_in(segmented, device)
    inputs, ids, weights = routed(tokens, EXPERTS, 0.0)
    slots = torch.randint(-1, 3, (tokens,), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    slots[0] = 1
    grouped.use(slots)
    segmented.use(slots.to(device))
    moved = inputs.to(device), ids.to(device), weights.to(device)
    got = changed(*moved)
    wanted = reference(inputs.float(), ids, weights.float())
    torch.testing.assert_close(got.cpu().float(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    without = torch.isin(slots, torch.tensor([-1, 2])).to(device)
    base = plain(*moved)
    assert torch.equal(got[without], base[without]), "tokens without factors get the bits of the base model"
    assert not torch.equal(got, base)


def test_adapters_are_added_to_products_of_quantised_experts(device: torch.device) -> None:
    made = [quantised(each, quantise) for each in matrices(EXPERTS)]
    cpu = torch.device("cpu")
    grouped = GroupedAdapters(SLOTS)
    loop = ExpertLoop(TorchKernels(torch.float32, cpu), EXPERTS, iter(made), Activation.SILU)
    reference = grouped.experts(loop, SITES, Activation.SILU)
    _, segmented, changed = on_gpu(device, made=made)
    adapters_in(grouped, cpu)
    adapters_in(segmented, device)
    inputs, ids, weights = routed(24, EXPERTS, 0.5)
    slots = torch.arange(24, dtype=torch.int32) % 4 - 1
    grouped.use(slots)
    segmented.use(slots.to(device))
    got = changed(inputs.to(device), ids.to(device), weights.to(device)).cpu().float()
    wanted = reference(inputs.float(), ids, weights.float())
    # What lies between two values may be rounded the other way between the products.
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.06


def test_experts_run_as_one_program_unless_some_adapter_changes_them(device: torch.device) -> None:
    plain, segmented, changed = on_gpu(device)
    given_ = tuple(each.to(device) for each in routed(6, EXPERTS, 0.0))
    slots = torch.zeros(6, dtype=torch.int32, device=device)
    only_before = SiteFactors(torch.ones(4, HIDDEN, dtype=DTYPE, device=device), ())
    segmented.put(0, AdapterWeights("0", 4, {}, None))
    with patch.object(GpuExperts, "changed", side_effect=AssertionError("no adapter changes experts")):
        assert torch.equal(changed(*given_), plain(*given_)), "no token has an adapter"
        factors = PartFactors(0, slice(0, 4), torch.ones(HIDDEN, 4, dtype=DTYPE, device=device))
        segmented.put(0, AdapterWeights("0", 4, {OTHERS[0].name: SiteFactors(only_before.a, (factors,))}, None))
        segmented.use(slots)
        assert torch.equal(changed(*given_), plain(*given_)), "the adapter changes other products"
    segmented.put(1, adapter(4, {2: "gud"}, device, 1))
    segmented.use(slots + 1)
    found = changed(*given_)
    assert not torch.equal(found, plain(*given_))
    segmented.put(1, None)
    segmented.use(slots)
    assert torch.equal(changed(*given_), plain(*given_)), "its slot is empty again"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 9), st.integers(1, 3),
    st.lists(st.integers(-1, 5), min_size=1, max_size=150), st.integers(0, 2**31),
)  # fmt: skip
@example(6, 9, 3, [5] * 150, 0)
@example(1, 1, 1, [-1], 0)
def test_tiles_have_every_pair_once(
    device: torch.device, slots: int, experts: int, chosen: int, of_tokens: list[int], seed: int
) -> None:
    of_tokens = [min(slot, slots - 1) for slot in of_tokens]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (len(of_tokens), chosen), generator=generator)
    lines = [
        0 if slot < 0 else expert * (1 + slots) + 1 + slot
        for slot, row in zip(of_tokens, ids.tolist(), strict=True)
        for expert in row
    ]
    made = TokenTiles.of_pairs(torch.tensor(of_tokens, dtype=torch.int32).to(device), ids.to(device), 1 + slots)
    seen, used, counts, of_tiles = [], [], set(), []
    for line, first, stop, count in made.tiles.tolist():
        used.append(stop > first)
        counts.add(count)
        of_tiles += [line] * (stop > first)
        assert stop - first <= made.rows
        members = made.order[first:stop].tolist()
        assert all(lines[pair] == line for pair in members)
        seen += members
    assert used == sorted(used, reverse=True)
    assert counts == {sum(used)}
    assert of_tiles == sorted(of_tiles)
    assert sorted(seen) == list(range(len(lines)))
    assert seen == sorted(seen, key=lambda pair: (lines[pair], pair))


@pytest.mark.slow
@in_interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_models_give_the_logits_of_peft(family: str, tmp_path: Path) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model, adapters = save_four(tmp_path, family, ATTENTION, target_parameters=targets)
    runner = load(model, backend="torch", adapter_slots=4, adapter_experts=True)
    assert len(PROMPTS) == len(adapters)
    with patch.object(GpuExperts, "changed", autospec=True, side_effect=partial(GpuExperts.changed)) as changed:
        check(model, adapters, logits_of(runner, adapters))
    assert changed.called


@in_interpreter
@pytest.mark.usefixtures("interpreted")
def test_adapters_of_experts_are_refused_unless_they_may_change_them(tmp_path: Path) -> None:
    model, adapters = save_four(tmp_path, "qwen3 moe", ATTENTION, target_parameters=["mlp.experts.down_proj"])
    runner = load(model, backend="torch", adapter_slots=4)
    with pytest.raises(ConfigurationError, match=r"changes experts; on a GPU that takes scheduler\.adapters\.experts"):
        logits_of(runner, adapters)
