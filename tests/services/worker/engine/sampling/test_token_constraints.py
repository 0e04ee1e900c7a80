from __future__ import annotations

import numpy as np
import pytest
import torch

from common.types import SamplingParams
from tests.services.worker.engine.sampling.rows_of import sample_rows
from tests.services.worker.engine.scenario import open_row

VOCABULARY = 128
LIKELY = torch.arange(VOCABULARY, dtype=torch.float32)[None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled(temperature: float) -> None:
    allowed = (3, 70, 9)
    for seed in range(20):
        sampling = SamplingParams(temperature=temperature, seed=seed, allowed_token_ids=allowed)
        found = sample_rows(LIKELY, [open_row(0, [1, 2], sampling=sampling)])
        assert int(found.token_ids[0]) in allowed


def test_token_constraints_do_not_affect_other_rows() -> None:
    opens = [open_row(0, [1]), open_row(1, [1], sampling=SamplingParams(temperature=0, allowed_token_ids=(5,)))]
    assert sample_rows(LIKELY.repeat(2, 1), opens).token_ids.tolist() == [VOCABULARY - 1, 5]


@pytest.mark.parametrize(
    ("banned", "output", "expected"),
    [
        (((127,),), [], 126),
        (((127,), (126,)), [4], 125),
        (((4, 127),), [4], 126),
        (((4, 127),), [5], 127),
        (((4, 127),), [], 127),
        (((3, 4, 127),), [3, 4], 126),
        (((3, 4, 127),), [4], 127),
    ],
)
def test_the_end_of_a_banned_sequence_is_not_drawn(
    banned: tuple[tuple[int, ...], ...], output: list[int], expected: int
) -> None:
    """What stands in the prompt counts for nothing: [3, 4] there begins no banned sequence."""
    sampling = SamplingParams(temperature=0, banned_sequences=banned)
    opened = open_row(0, [3, 4, *output], prompt=2, sampling=sampling)
    assert int(sample_rows(LIKELY, [opened]).token_ids[0]) == expected


def test_a_row_without_allowed_tokens_still_gets_a_token() -> None:
    sampling = SamplingParams(temperature=1.0, allowed_token_ids=(5,), banned_sequences=((5,),))
    (token,) = sample_rows(LIKELY, [open_row(0, [1], sampling=sampling)]).token_ids.tolist()
    assert 0 <= token < VOCABULARY


def test_log_probabilities_ignore_token_constraints() -> None:
    sampling = SamplingParams(temperature=0, allowed_token_ids=(5,), top_logprobs=1, logprob_token_ids=(5, 7))
    samples = sample_rows(LIKELY, [open_row(0, [1], sampling=sampling)])
    ((_, told),) = samples.logprobs
    expected = torch.log_softmax(LIKELY[0], dim=-1)
    assert told.logprob == pytest.approx(float(expected[5]))
    assert told.top_token_ids == (VOCABULARY - 1,)
    np.testing.assert_allclose(told.asked, expected[[5, 7]], rtol=1e-5)
