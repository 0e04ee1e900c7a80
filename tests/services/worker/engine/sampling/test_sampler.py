from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.types import SamplingParams
from tests.services.worker.engine.sampling.rows_of import (
    chi_square_is_plausible,
    kept_tokens,
    repeated,
    sample_rows,
    softmax,
)
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from random import Random

    from common.steps import RowOpen

VOCABULARY = 700

parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.9]),
    top_p=st.just(1.0) | st.floats(0.05, 0.99),
    top_k=st.none() | st.integers(1, VOCABULARY + 1),
    min_p=st.just(0.0) | st.floats(0, 1),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-5, 5, width=32), max_size=3),
    top_logprobs=st.none() | st.integers(0, 3),
)


@st.composite
def requests(draw: st.DrawFn) -> list[RowOpen]:
    return [
        open_row(
            row,
            draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=20)),
            prompt=1,
            sampling=draw(parameters),
            stop=(1, 2),
            min_new=draw(st.sampled_from([0, 0, 5])),
        )
        for row in range(draw(st.integers(2, 8)))
    ]


def logits_of(rows: int, seed: int = 0, vocabulary: int = VOCABULARY, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@given(requests(), st.randoms(use_true_random=False))
def test_a_row_gets_the_same_token_alone_and_in_any_batch(opens: list[RowOpen], random: Random) -> None:
    logits = logits_of(len(opens))
    alone = [sample_rows(logits[i : i + 1], [replace(opens[i], row=opens[-1 - i].row)]) for i in range(len(opens))]
    order = list(range(len(opens)))
    random.shuffle(order)
    together = sample_rows(logits[order], [opens[i] for i in order])
    assert [int(samples.token_ids[0]) for samples in alone] == [
        int(together.token_ids[order.index(i)]) for i in range(len(opens))
    ]


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.4, 1.0, 1.7]),
    st.none() | st.integers(1, 60),
    st.just(1.0) | st.floats(0.05, 0.99),
    st.just(0.0) | st.floats(0.001, 1),
)
def test_filtered_tokens_are_never_drawn(
    seed: int, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(1, seed)
    opens = repeated(sampling, range(64))
    drawn = set(sample_rows(logits.repeat(64, 1), opens).token_ids.tolist())
    probabilities = softmax(logits[0].double().numpy() / temperature)
    nucleus = top_p if top_p == 1 else top_p * (1 + 1e-5)
    assert drawn <= kept_tokens(probabilities, top_k or VOCABULARY, nucleus, min_p * (1 - 1e-5))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=12),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_probability_says(sampling: SamplingParams) -> None:
    logits = logits_of(1, seed=3)
    count = 4096
    drawn = torch.cat(
        [sample_rows(logits.repeat(count, 1), repeated(sampling, range(i * count, (i + 1) * count))).token_ids
         for i in range(5)]
    )  # fmt: skip
    probabilities = softmax(logits[0].double().numpy() / sampling.temperature)
    kept = kept_tokens(probabilities, sampling.top_k or VOCABULARY, sampling.top_p, sampling.min_p)
    expected = np.where(np.isin(np.arange(VOCABULARY), list(kept)), probabilities, 0)
    observed = np.bincount(drawn.numpy(), minlength=VOCABULARY)
    assert observed[expected == 0].sum() == 0
    assert chi_square_is_plausible(observed, expected / expected.sum())


def test_a_wrong_distribution_would_be_noticed() -> None:
    logits = logits_of(1, seed=3)
    drawn = sample_rows(logits.repeat(4096, 1), repeated(SamplingParams(temperature=1.1), range(4096))).token_ids
    observed = np.bincount(drawn.numpy(), minlength=VOCABULARY)
    assert not chi_square_is_plausible(observed, softmax(logits[0].double().numpy()))


def test_the_token_depends_on_the_position() -> None:
    opens = [open_row(i, range(i + 1), sampling=SamplingParams(seed=9)) for i in range(100)]
    assert len(set(sample_rows(torch.zeros(100, VOCABULARY), opens).token_ids.tolist())) > 80


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[1, [30, 20]] = 5.0
    opens = [open_row(i, [1], sampling=SamplingParams(temperature=0)) for i in range(2)]
    assert sample_rows(logits, opens).token_ids.tolist() == [0, 20]


def test_top_k_of_one_is_greedy() -> None:
    logits = logits_of(50)
    opens = repeated(SamplingParams(temperature=1.5, top_k=1), range(50))
    assert torch.equal(sample_rows(logits, opens).token_ids, logits.argmax(-1))


def test_penalties_and_biases_change_the_greedy_choice() -> None:
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 10], logits[:, 11], logits[:, 12] = 3.0, 2.9, 2.0
    changes: list[dict[str, object]] = [
        {},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.1},
        {"logit_bias": {12: 50.0}},
    ]
    opens = [
        open_row(i, [10, 10], prompt=1, sampling=SamplingParams(temperature=0, **change))  # type: ignore[arg-type]
        for i, change in enumerate(changes)
    ]
    assert sample_rows(logits, opens).token_ids.tolist() == [10, 11, 11, 12]


def test_stop_ids_are_not_chosen_before_the_minimum() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 2], logits[:, 7] = 9.0, 5.0
    greedy = SamplingParams(temperature=0)
    opens = [open_row(i, range(4 + i), prompt=4, stop=(2,), min_new=2, sampling=greedy) for i in range(3)]
    assert sample_rows(logits, opens).token_ids.tolist() == [7, 7, 2]


def test_log_probabilities_are_of_the_unmodified_logits_and_only_for_rows_that_request_them() -> None:
    logits = logits_of(3)
    sampling = SamplingParams(temperature=0, top_logprobs=2, logit_bias={5: 100.0}, repetition_penalty=1.5)
    opens = [open_row(0, [1]), open_row(1, [1], sampling=sampling), open_row(2, [1])]
    samples = sample_rows(logits, opens)
    ((slot, logprob),) = samples.logprobs
    exact = logits[1].log_softmax(-1)
    assert slot == 1
    assert samples.token_ids[1] == 5
    assert logprob.logprob == pytest.approx(float(exact[5]), abs=1e-5)
    assert logprob.top_token_ids == tuple(exact.topk(2).indices.tolist())


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    logits = logits_of(64)
    opens = repeated(SamplingParams(temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.1), range(64))
    on_gpu = sample_rows(logits.cuda(), opens).token_ids.cpu()
    assert (on_gpu == sample_rows(logits, opens).token_ids).float().mean() > 0.95
