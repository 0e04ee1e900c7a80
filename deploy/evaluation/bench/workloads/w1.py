"""Offline workload W1, for which mini-sglang and nano-vllm publish their throughput."""

from __future__ import annotations

import random

from deploy.evaluation.bench.records import BenchRequest, Segment, WorkloadSession

REQUESTS = 256
LENGTHS = (100, 1024)  # tokens, both ends included, of prompts and of outputs
HIGHEST_ID = 10_000
TEMPERATURE = 0.6
TOTAL_INPUT_TOKENS = 142_827
TOTAL_OUTPUT_TOKENS = 133_966


def w1_requests(requests: int = REQUESTS, scale: float = 1.0) -> list[BenchRequest]:
    """Return the first `requests` of the workload, with lengths multiplied by `scale`.

    The whole workload is always generated, all prompts before all output lengths, so that a part of it is a prefix of
    the whole.

    Raises:
        ValueError: `requests` or `scale` is out of range.
    """
    if not 1 <= requests <= REQUESTS:
        raise ValueError(f"W1 has 1 to {REQUESTS} requests")
    if not 0 < scale <= 1:
        raise ValueError("the scale must be in (0, 1]")
    draw = random.Random(0).randint
    prompts = [tuple(draw(0, HIGHEST_ID) for _ in range(draw(*LENGTHS))) for _ in range(REQUESTS)]
    outputs = [draw(*LENGTHS) for _ in range(REQUESTS)]
    return [
        _request(i, prompt[: _scaled(len(prompt), scale)], _scaled(output, scale))
        for i, (prompt, output) in enumerate(zip(prompts[:requests], outputs[:requests], strict=True))
    ]


def w1_sessions(requests: int = REQUESTS, scale: float = 1.0) -> list[WorkloadSession]:
    """Return W1 as sessions, for a server under test over HTTP."""
    return [WorkloadSession((request,)) for request in w1_requests(requests, scale)]


def _request(index: int, prompt: tuple[int, ...], output_tokens: int) -> BenchRequest:
    return BenchRequest((Segment(f"w1/{index}", len(prompt), ids=prompt),), output_tokens)


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))
