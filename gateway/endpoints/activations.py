"""From the outputs of a classification head to probabilities and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.heads import HeadActivation

if TYPE_CHECKING:
    from gateway.delivery.collecting import WholeChoice

Values: TypeAlias = NDArray[np.float32]


def activated(outputs: Values, activation: HeadActivation) -> Values:
    """Return the activation of outputs [..., labels]."""
    match activation:
        case HeadActivation.NONE:
            return outputs
        case HeadActivation.SIGMOID:
            # Of the negative absolute value, so that nothing overflows.
            small = np.exp(-np.abs(outputs))
            return np.where(outputs >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
        case HeadActivation.SOFTMAX:
            powers = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
            shares: Values = powers / powers.sum(axis=-1, keepdims=True)
            return shares


def outputs_of(choice: WholeChoice, labels: int) -> Values:
    """Return a choice's outputs, [labels] or, of a head of each token, [tokens * labels] in rows of `labels`."""
    assert choice.embedding is not None, "the request asked for them"
    return np.frombuffer(choice.embedding, "<f4").reshape(-1, labels)
