from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.types import SamplingParams
from services.worker.engine.sampling.logits_processors import add_bias, mask_stops, penalise
from tests.services.worker.engine.sampling.rows_of import tables
from tests.services.worker.engine.scenario import open_row

if TYPE_CHECKING:
    from common.steps import RowOpen

VOCABULARY = 20

penalties = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
)
histories = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)


@st.composite
def opened_rows(draw: st.DrawFn) -> list[RowOpen]:
    count = draw(st.integers(1, 5))
    return [
        open_row(row, tokens, prompt=draw(st.integers(1, len(tokens))), sampling=draw(penalties))
        for row in range(count)
        for tokens in [draw(histories)]
    ]


def penalised_naively(logits: list[float], opened: RowOpen) -> list[float]:
    sampling, tokens = opened.sampling, opened.token_ids.tolist()
    counts = Counter(tokens[opened.prompt_tokens :])
    out = list(logits)
    for token in range(VOCABULARY):
        if token in tokens:
            factor = sampling.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (counts[token] > 0)
    return out


@given(opened_rows(), st.integers(0, 2**32))
def test_penalties_are_those_of_the_definition(opens: list[RowOpen], seed: int) -> None:
    rows, table = tables(opens, VOCABULARY)
    # Rows of logits in another order than slots, with one in between that is not to be touched.
    slots = np.array([opened.row for opened in reversed(opens)], np.int64)
    logits = torch.randn(len(opens) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    samples = np.append(np.arange(len(opens) - 1), len(opens))
    before = logits.tolist()
    penalise(logits, samples, slots, rows, table)
    for sample, opened in zip(samples, reversed(opens), strict=True):
        np.testing.assert_allclose(logits[sample], penalised_naively(before[sample], opened), atol=1e-5)
    assert logits[len(opens) - 1].tolist() == before[len(opens) - 1]


@given(
    st.lists(
        st.dictionaries(st.integers(0, VOCABULARY + 5), st.floats(-100, 100, width=32), max_size=8),
        min_size=1,
        max_size=4,
    )
)
def test_biases_are_added_and_ids_beyond_the_vocabulary_ignored(biases: list[dict[int, float]]) -> None:
    opens = [open_row(i, [1], sampling=SamplingParams(logit_bias=bias)) for i, bias in enumerate(biases)]
    _, table = tables(opens, VOCABULARY)
    logits = torch.zeros(len(opens), VOCABULARY)
    add_bias(logits, np.arange(len(opens)), np.arange(len(opens)), table)
    assert logits.tolist() == [[bias.get(token, 0.0) for token in range(VOCABULARY)] for bias in biases]


def test_stop_ids_become_impossible_and_nothing_else() -> None:
    opens = [open_row(0, [1], stop=(3, 5, 7), min_new=1), open_row(1, [1], stop=(19, 999), min_new=4)]
    _, table = tables(opens, VOCABULARY)
    logits = torch.zeros(2, VOCABULARY)
    mask_stops(logits, np.arange(2), np.arange(2), table)
    assert [row.isinf().nonzero()[:, 0].tolist() for row in logits] == [[3, 5, 7], [19]]
