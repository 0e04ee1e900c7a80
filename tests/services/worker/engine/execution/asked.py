"""What rows may ask of the sampler, at random, and a grammar that any vocabulary has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.grammars import Grammar, GrammarKind
from common.types import SamplingParams

if TYPE_CHECKING:
    from random import Random

    from numpy.typing import NDArray

    from common.steps import RowOpen
    from services.worker.engine.plans.rows import RowIndices, RowStates

# Tokens; of these there are too many pairs to ban enough of them.
MANY = 1000
GRAMMAR = Grammar(GrammarKind.REGEX, "every third", "regex")


class EveryThird:
    """Stands in for `RowMasks`: which third of the vocabulary may come next depends on the ids before."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size

    def open(self, opened: RowOpen) -> None:
        pass

    def masks(self, slots: RowIndices, rows: RowStates) -> NDArray[np.int32]:
        flags = np.zeros((slots.size, -(-self._vocabulary_size // 32) * 32), np.uint8)
        for line, slot in zip(flags, slots.tolist(), strict=True):
            first = int(rows.token_ids[slot, : rows.lengths[slot]].sum()) % 3
            line[first : self._vocabulary_size : 3] = 1
        return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def random_sampling(random: Random, vocabulary: int, *, is_bound: bool = True) -> SamplingParams:
    """Return parameters of which few rows have many and some have none; `is_bound` if they may depend on tokens."""
    ids = range(vocabulary)
    options: dict[str, Any] = {
        "top_k": random.choice([1, 3, 50]),
        "top_p": random.choice([0.3, 0.9]),
        "min_p": random.choice([0.02, 0.2]),
        "repetition_penalty": random.choice([0.7, 1.3, 2.0]),
        "presence_penalty": random.choice([-1.5, 0.5, 2.0]),
        "frequency_penalty": random.choice([-0.5, 0.25, 1.5]),
        "logit_bias": {id_: random.choice([-100.0, -1.0, 3.0, 100.0]) for id_ in random.sample(ids, 12)},
        "top_logprobs": random.choice([0, 1, 5, 20]),
        "allowed_token_ids": tuple(random.sample(ids, vocabulary // 2)),
        "banned_sequences": tuple((id_,) for id_ in random.sample(ids, 30)),
    }
    if is_bound:
        options["grammar"] = GRAMMAR
        # A twentieth of all pairs, so that some do come up.
        sequences = ((random.choice(ids), random.choice(ids)) for _ in range(vocabulary * vocabulary // 20))
        if vocabulary < MANY:
            options["banned_sequences"] += tuple(sequences)
    chosen = random.sample(sorted(options), random.choice([0, 1, 1, 2, 4, len(options)]))
    sampling = SamplingParams(
        temperature=random.choice([0.0, 0.4, 1.0, 1.7]), seed=random.getrandbits(64), **{n: options[n] for n in chosen}
    )
    if sampling.top_logprobs is not None and random.random() < 0.5:
        sampling = replace(sampling, logprob_token_ids=tuple(random.sample(ids, random.choice([1, 7, 128]))))
    return sampling
