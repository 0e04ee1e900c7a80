"""Random prompts of given lengths, without common prefixes."""

from __future__ import annotations

import random

from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession


def random_sessions(
    count: int,
    input_tokens: int,
    output_tokens: int,
    *,
    length_spread: float = 0.0,
    name: str = "random",
    seed: int = 0,
) -> list[WorkloadSession]:
    """Return `count` requests; lengths are uniform within ±`length_spread` (a share of the length).

    Different `name`s give different prompts of the same lengths, so that repeats do not hit a cache.
    """
    if not 0 <= length_spread < 1:
        raise ValueError("the length spread must be in [0, 1)")
    lengths = random.Random(seed)

    def draw(tokens: int) -> int:
        spread = int(tokens * length_spread)
        return max(1, tokens + (lengths.randint(-spread, spread) if spread else 0))

    return [
        WorkloadSession((BenchRequest((Segment(f"{name}/{i}", draw(input_tokens)),), draw(output_tokens)),))
        for i in range(count)
    ]
