"""The device's sampler against the host's: the same tokens from the same logits, parameters, seeds and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.steps import StepPlan
from common.types import SamplingParams, StepId
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.table import SamplingTable
from tests.services.worker.engine.scenario import open_row

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.execution.device_batch import DeviceBatch
from services.worker.engine.kernels.gpu.sampling import TokenChooser

PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 700]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    seed=st.integers(0, 2**64 - 1),
)


def choose(
    logits: torch.Tensor, asked: list[SamplingParams], device: torch.device, *, filtered: bool = True
) -> tuple[list[int], list[int]]:
    """Return the host's and the device's choice for each row."""
    count, vocabulary = logits.shape
    rows, device_batch = RowStates(count, 300, 16), DeviceBatch(count, 20, 99, vocabulary, device)
    table = SamplingTable(count, vocabulary)
    opens = tuple(
        open_row(i, [1] * (5 + 7 * i % 280), range(4), total=290, sampling=each) for i, each in enumerate(asked)
    )
    for opened in opens:
        rows.open(opened)
        table.open(opened)
    device_batch.mirror(StepPlan(StepId(1), opens=opens), rows, table.needs)
    device_batch.upload()
    slots = torch.arange(count, dtype=torch.int32, device=device)
    token_ids = torch.empty(count, dtype=torch.int32, device=device)
    chooser = TokenChooser(count, vocabulary, device)
    chooser.choose(logits.to(device), slots, device_batch.cells, token_ids, filtered=filtered)
    expected = sample(logits.float(), np.arange(count), rows, table).token_ids
    return expected.tolist(), token_ids.tolist()


@settings(max_examples=60 if torch.cuda.is_available() else 10, deadline=None)
@given(
    asked=st.lists(PARAMETERS, min_size=1, max_size=6),
    scale=st.sampled_from([0.5, 3.0, 8.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_the_device_chooses_as_the_host_does(
    device: torch.device, asked: list[SamplingParams], scale: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(asked), 9000, generator=generator) * scale).to(dtype)
    expected, got = choose(logits, asked, device)
    # Sums are rounded in another order: a token at the very edge of its share of the mass may be its neighbour.
    differing = [i for i in range(len(asked)) if expected[i] != got[i]]
    assert len(differing) <= 1
    for i in differing:
        assert is_near_edge(logits[i].float(), asked[i], expected[i], got[i])


def is_near_edge(logits: torch.Tensor, asked: SamplingParams, one: int, other: int) -> bool:
    """Whether so little mass lies between two tokens that rounding can decide, or the filters' border between them."""
    shares = torch.softmax(logits / asked.temperature, dim=-1).double()
    low, high = sorted((one, other))
    between = float(shares[low + 1 : high].sum())
    border = shares.sort(descending=True).values.cumsum(0)
    has_tie_at_border = asked.top_p < 1 and float((border - asked.top_p).abs().min()) < 1e-2
    return between < 1e-5 or has_tie_at_border


def test_filter_parameters_are_ignored_when_filtering_is_off(device: torch.device) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).half()
    narrow = [SamplingParams(temperature=0.7, top_k=2, seed=seed) for seed in range(3)]
    wide = [SamplingParams(temperature=0.7, seed=seed) for seed in range(3)]
    assert choose(logits, narrow, device, filtered=False)[1] == choose(logits, wide, device)[0]


def test_tokens_come_as_often_as_their_probability_says(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, 1.0]]).half().repeat(400, 1)
    asked = [SamplingParams(temperature=1.0, seed=seed) for seed in range(400)]
    _, got = choose(logits, asked, device)
    counts = np.bincount(got, minlength=5)
    wanted = torch.softmax(logits[0].float(), dim=-1).numpy() * 400
    assert counts[3] == 0
    # Chi-squared with 3 degrees of freedom exceeds 16.3 once in a thousand; seeds are fixed.
    assert float(((counts - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum()) < 16.3
