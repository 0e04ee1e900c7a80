from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.engine.sampling.logprobs import token_logprobs


@pytest.mark.parametrize("vocabulary", [7, 100, 5000])
def test_log_probabilities_are_those_of_the_softmax(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    sampled = torch.tensor([0, 5, vocabulary - 1])
    entries = token_logprobs(logits, sampled, np.array([4, 0, 2]), np.array([0, 5, 20]))
    exact = logits.double().log_softmax(-1)
    assert [slot for slot, _ in entries] == [4, 0, 2]
    for row, (_, logprob) in enumerate(entries):
        wanted = [0, min(5, vocabulary), min(20, vocabulary)][row]
        best = exact[row].sort(descending=True)
        assert logprob.logprob == pytest.approx(float(exact[row, sampled[row]]), abs=1e-5)
        assert list(logprob.top_token_ids) == best.indices[:wanted].tolist()
        assert logprob.top_logprobs == pytest.approx(best.values[:wanted].tolist(), abs=1e-5)
