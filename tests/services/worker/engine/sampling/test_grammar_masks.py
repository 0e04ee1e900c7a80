from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.engine.sampling.logits_processors import apply_masks


@pytest.mark.parametrize("vocabulary", [32, 64, 100, 49_152, 50_257])
@pytest.mark.parametrize("samples", [[0, 1, 2], [1], [2, 0]])
def test_exactly_the_disallowed_tokens_become_impossible(vocabulary: int, samples: list[int]) -> None:
    random = np.random.default_rng(1)
    allowed = random.random((len(samples), vocabulary)) < 0.3
    padded = np.zeros((len(samples), -(-vocabulary // 32) * 32), np.uint8)
    padded[:, :vocabulary] = allowed
    masks = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(3, vocabulary)
    expected = logits.clone()
    for row, sample in enumerate(samples):
        expected[sample, torch.from_numpy(~allowed[row])] = -torch.inf
    apply_masks(logits, np.array(samples), masks)
    torch.testing.assert_close(logits, expected)
