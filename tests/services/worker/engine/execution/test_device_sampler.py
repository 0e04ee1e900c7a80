"""What the device makes of logits against what the host's sampler makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from common.steps import EngineSpec, RowOpen, StepPlan
from common.types import RowSlot, SamplingParams, StepId, TokenLogprob
from services.worker.engine.measuring.capacity import sampler_bytes
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.sampler import sample
from services.worker.engine.sampling.table import SamplingTable
from tests.services.worker.engine.execution.asked import GRAMMAR, EveryThird, random_sampling
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("triton", reason="its interpreter runs the programs where there is no GPU")

from services.worker.engine.execution.device_batch import DeviceBatch
from services.worker.engine.execution.device_sampler import DeviceSampler, SamplingMode
from services.worker.engine.kernels.gpu.logprobs import LogprobBuffers

# More than two chunks, and no whole number of words or blocks.
VOCABULARY = 5001
CONTEXT = 64


@dataclass
class Both:
    """The same rows for the host's sampler and for the device's."""

    max_rows: int
    device: torch.device
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        self.rows = RowStates(self.max_rows, CONTEXT, 16)
        self.table = SamplingTable(self.max_rows, self.vocabulary)
        self.table.grammars = EveryThird(self.vocabulary)  # type: ignore[assignment]  # stands in for `RowMasks`
        self.device_batch = DeviceBatch(self.max_rows, CONTEXT // 16, 99, self.vocabulary, self.device)
        self.sampler = DeviceSampler(EngineSpec("none", max_rows=self.max_rows), self.device_batch, self.table)
        self._steps = 0

    def open(self, opens: Sequence[RowOpen]) -> None:
        for opened in opens:
            self.rows.open(opened)
            self.table.open(opened)
            self.sampler.open(opened)
        self.device_batch.mirror(StepPlan(StepId(1), opens=tuple(opens)), self.rows, self.table.needs)

    def step(self, logits: torch.Tensor, members: list[int]) -> tuple[list[int], list[int]]:
        """Sample a token for each of `members` with both; rows get the host's. Return the device's and the host's."""
        slots, sampler = np.array(members), self.sampler
        assert sampler.can_choose(slots)
        sampler.upload()
        on_device = torch.tensor(members, dtype=torch.int32, device=self.device)
        token_ids = torch.empty(len(members), dtype=torch.int32, device=self.device)
        sampler.follow(slots, self.rows)
        given = logits.to(self.device)
        sampler.choose(given, on_device, token_ids, sampler.mode_of(slots, self.rows))
        assert torch.equal(given.cpu(), logits), "logits stay as the model gave them"
        expected = sample(logits.float(), slots, self.rows, self.table)
        chosen = expected.token_ids.to(torch.int32)
        report = LogprobBuffers.empty(len(members), self.vocabulary, self.device)
        sampler.report(given, on_device, chosen.to(self.device), report)
        arrived = LogprobBuffers(report.values.cpu(), report.top_ids.cpu())
        if sampler.reports(slots):
            got = sampler.launched(arrived, slots, np.arange(len(members))).entries()
            assert_same_logprobs(got, expected.logprobs)
        sampler.append(on_device, chosen.to(self.device), counts=sampler.counts(slots))
        self.rows.append_tokens(slots, chosen.numpy())
        return token_ids.tolist(), chosen.tolist()


def assert_same_logprobs(
    got: Sequence[tuple[RowSlot, TokenLogprob]], expected: Sequence[tuple[RowSlot, TokenLogprob]]
) -> None:
    assert [slot for slot, _ in got] == [slot for slot, _ in expected]
    for (_, one), (_, other) in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-5)
        assert one.asked == pytest.approx(other.asked, abs=2e-5)
        # Equally likely tokens may come in any order, and any of them may be the last.
        last = other.top_logprobs[-1] if other.top_logprobs else 0.0
        surely = [{i for i, value in zip(x.top_token_ids, x.top_logprobs, strict=True) if value > last + 1e-4}
                  for x in (one, other)]  # fmt: skip
        assert surely[0] == surely[1]
        assert len(set(one.top_token_ids)) == len(other.top_token_ids)


def logits_of(rows: int, seed: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def random_open(random: Random, row: int) -> RowOpen:
    length = random.randint(1, 40)
    # Few different ids, so that many are repeated; what follows the prompt was sampled before a retraction.
    ids = [random.randrange(60) for _ in range(length)]
    return open_row(
        row, ids, range(4), prompt=random.randint(1, length), total=CONTEXT, stop=tuple(random.sample(range(60), 9)),
        min_new=random.choice([0, 0, length + 3]), sampling=random_sampling(random, VOCABULARY),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(4 if torch.cuda.is_available() else 1))
def test_random_sampling_options_give_the_same_tokens_as_the_host(
    device: torch.device, seed: int, dtype: torch.dtype
) -> None:
    random, both = Random(seed), Both(7, device)
    both.open([random_open(random, row) for row in range(7)])
    differing = 0
    for step in range(5):
        members = sorted(random.sample(range(7), random.randint(1, 7)))
        got, expected = both.step(logits_of(len(members), 100 * seed + step, dtype), members)
        differing += sum(one != other for one, other in zip(got, expected, strict=True))
        # Slots change hands; what the last tenant asked for is forgotten.
        row = random.randrange(7)
        both.rows.close(RowSlot(row))
        both.open([random_open(random, row)])
    # Sums are rounded in another order: a token at the edge of its share may be its neighbour.
    assert differing <= 1


def test_penalties_count_tokens_sampled_on_the_device(device: torch.device) -> None:
    both = Both(2, device)
    punished = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)
    both.open([open_row(0, [3, 3, 5], range(4), total=CONTEXT, sampling=punished)])
    logits = torch.full((1, VOCABULARY), -50.0)
    # 3 and 5 are in the prompt; each token drops by 2 whenever it was sampled, and once to two thirds.
    logits[0, [3, 5, 7, 9]] = torch.tensor([12.0, 10.0, 7.5, 6.0])
    chosen = [both.step(logits.half(), [0]) for _ in range(9)]
    assert [got for got, _ in chosen] == [expected for _, expected in chosen]
    # Worth: 3: 8, 6, 4; 5: 6.67, 4.67; 7: 7.5, then 5 - 2; 9: 6, then 4 - 2.
    assert [got[0] for got, _ in chosen] == [3, 7, 5, 3, 9, 5, 3, 7, 5]


def test_a_reopened_row_is_penalised_for_its_earlier_output(device: torch.device) -> None:
    punished = SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.7)
    logits = torch.full((1, VOCABULARY), -50.0)
    logits[0, [3, 5, 7, 9]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    whole, first, second = (Both(2, device) for _ in range(3))
    for both in (whole, first):
        both.open([open_row(1, [4, 5, 6], range(4), total=CONTEXT, sampling=punished)])
    outputs = [whole.step(logits.half(), [1])[0][0] for _ in range(8)]
    before = [first.step(logits.half(), [1])[0][0] for _ in range(5)]
    second.open([open_row(0, [4, 5, 6, *before], range(4), prompt=3, total=CONTEXT, sampling=punished)])
    after = [second.step(logits.half(), [0])[0][0] for _ in range(3)]
    assert before + after == outputs
    assert after != outputs[:3], "what it had sampled makes a difference"


@pytest.mark.parametrize("members", [[0], [0, 1]])
def test_stop_ids_are_out_of_reach_until_the_minimum(device: torch.device, members: list[int]) -> None:
    both = Both(2, device)
    other = SamplingParams(0.0, presence_penalty=0.1)
    both.open([
        open_row(0, [1, 2], range(4), total=9, stop=(40, 99999), min_new=2, sampling=SamplingParams(0.0)),
        open_row(1, [1, 2], range(4), total=9, sampling=other),
    ])  # fmt: skip
    logits = torch.zeros(len(members), VOCABULARY)
    logits[:, 40], logits[:, 30] = 9.0, 5.0
    ways = []
    for _ in range(3):
        ways.append(both.sampler.mode_of(np.array(members), both.rows))
        got, expected = both.step(logits.half(), members)
        assert got == expected
    assert ways == [
        SamplingMode.PROCESSED,
        SamplingMode.PROCESSED,
        SamplingMode.PROCESSED if 1 in members else SamplingMode.PLAIN,
    ]
    assert both.rows.token_ids[0, 2:5].tolist() == [30, 30, 40]


def test_a_sequence_is_banned_but_not_its_tokens(device: torch.device) -> None:
    both = Both(1, device)
    banned = SamplingParams(0.0, banned_sequences=((40, 40), (40, 30, 40), (20,)))
    both.open([open_row(0, [40, 40], range(4), total=12, sampling=banned)])
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [20, 40, 30, 10]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    chosen = [both.step(logits.half(), [0]) for _ in range(6)]
    assert [got for got, _ in chosen] == [expected for _, expected in chosen]
    assert [got[0] for got, _ in chosen] == [40, 30, 30, 40, 30, 30]


def test_a_batch_uses_the_cheapest_sampling_mode_that_its_rows_need(device: torch.device) -> None:
    both = Both(4, device)
    asked = [
        SamplingParams(0.0),
        SamplingParams(1.0, top_k=3),
        SamplingParams(1.0, presence_penalty=0.1),
        SamplingParams(0.0, top_logprobs=0),
    ]
    both.open([open_row(row, [1, 2], range(4), sampling=each) for row, each in enumerate(asked)])
    ways = [both.sampler.mode_of(np.array(rows), both.rows) for rows in ([0], [0, 1], [0, 1, 2], [0, 3])]
    assert ways == [SamplingMode.PLAIN, SamplingMode.FILTERED, SamplingMode.PROCESSED, SamplingMode.PLAIN]
    assert [both.sampler.reports(np.array(rows)) for rows in ([0, 1, 2], [0, 3])] == [False, True]


def test_options_that_exceed_the_tables_are_left_to_the_host(device: torch.device) -> None:
    both = Both(6, device)
    sampling = SamplingParams(0.0)
    asked = [
        replace(sampling, top_logprobs=21),
        replace(sampling, top_logprobs=1, logprob_token_ids=tuple(range(129))),
        replace(sampling, logit_bias=dict.fromkeys(range(1025), 1.0)),
        replace(sampling, grammar=GRAMMAR),
        replace(sampling, banned_sequences=((5,), (3, 4))),
        replace(sampling, frequency_penalty=1.0, banned_sequences=((5,), (6,))),
    ]
    both.open([open_row(row, [1, 2], range(4), sampling=each) for row, each in enumerate(asked)])
    slots = [np.array([row]) for row in range(6)]
    assert [both.sampler.can_choose(one) for one in slots] == [False] * 3 + [True] * 3
    # Grammars and sequences are followed on the host, which has to know the tokens for that.
    assert [both.sampler.needs_history(one) for one in slots] == [True] * 5 + [False]


def test_sampler_tables_fit_in_the_memory_reserved_for_them() -> None:
    both = Both(3, torch.device("cpu"))
    adjustments = both.sampler._processors
    assert adjustments is not None
    tables = [getattr(adjustments._tables, name) for name in adjustments._tables.__slots__]
    tables += [adjustments._processed, both.sampler._named]
    assert sum(tensor.numel() * tensor.itemsize for tensor in tables) <= sampler_bytes(3, VOCABULARY)
