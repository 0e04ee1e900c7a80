from __future__ import annotations

from dataclasses import replace

import torch

from services.worker.engine.kernels.interface import AttentionShape
from services.worker.engine.model.transformer import sampled_rows
from tests.services.worker.engine.kernels.attention_cases import Case

MIXED = Case(AttentionShape(2, 1, 16, 16), [(40, 1), (3, 1), (0, 20), (16, 5)], seed=0).batch()


def test_only_sampled_rows_go_on_and_each_with_its_last_token() -> None:
    batch = replace(MIXED, sample_indices=torch.tensor([0, 26]))
    reduced = sampled_rows(batch)
    assert reduced is not None
    assert reduced.query_starts.tolist() == [0, 1, 2]
    assert reduced.key_lengths.tolist() == [41, 21]
    assert reduced.positions.tolist() == [40, 20]
    assert torch.equal(reduced.page_table, MIXED.page_table[[0, 3]])
    assert torch.equal(reduced.write_slots, MIXED.write_slots[[0, 26]])
    assert (reduced.decode_rows, reduced.max_query_length) == (2, 1)


def test_samples_may_come_in_any_order() -> None:
    reduced = sampled_rows(replace(MIXED, sample_indices=torch.tensor([26, 1])))
    assert reduced is not None
    assert reduced.key_lengths.tolist() == [21, 4]


def test_a_batch_of_decoding_rows_stays_as_it_is() -> None:
    decoding = Case(AttentionShape(2, 1, 16, 16), [(40, 1), (3, 1)], seed=0).batch()
    assert sampled_rows(decoding) is None


def test_a_token_in_the_middle_of_a_chunk_needs_the_whole_batch() -> None:
    assert sampled_rows(replace(MIXED, sample_indices=torch.tensor([1, 7]))) is None
