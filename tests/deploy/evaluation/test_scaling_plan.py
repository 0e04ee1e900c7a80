"""The plan for 64 and 1,000 GPUs in `docs/scaling.md` follows from stated capacities and from recorded costs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from deploy.evaluation.bench.results import read_results

ROOT = Path(__file__).parents[3]
TEXT = " ".join((ROOT / "docs" / "scaling.md").read_text().split())
COSTS = {
    entry.metric: entry.value
    for entry in read_results(ROOT / "deploy" / "evaluation" / "results" / "control_plane_scale.json")
}
# Of an H200.
TOKENS_PER_S, TOKENS_PER_ANSWER = 10_286, 562


def stated(pattern: str) -> tuple[int, ...]:
    """Return the numbers of the only place that matches."""
    (found,) = re.findall(pattern, TEXT)
    return tuple(int(number.replace(",", "")) for number in ((found,) if isinstance(found, str) else found))


def row(name: str) -> tuple[int, int]:
    """Return the figures of the table for 64 GPUs and for 1,000."""
    few, many = stated(rf"\| {name} \| ([\d,]+) \| ([\d,]+) \|")
    return few, many


def load(gpus: int) -> tuple[float, float]:
    """Return tokens and requests per second."""
    return gpus * TOKENS_PER_S, gpus * TOKENS_PER_S / TOKENS_PER_ANSWER


def recording_cores(gpus: int) -> float:
    """Return the cores of Redis that record answers."""
    tokens, requests = load(gpus)
    of_tokens = tokens * COSTS["per token recorded, 256 streams"]
    return (of_tokens + requests * COSTS["per answer recorded, without its tokens"]) / 1e6


def test_the_document_has_the_load_of_a_gpu() -> None:
    pattern = r"An H200 generates ([\d,]+) tokens/s with Llama-3.1-8B .* in answers of (\d+) tokens on average"
    assert stated(pattern) == (TOKENS_PER_S, TOKENS_PER_ANSWER)


def test_numbers_of_services_follow_from_their_capacities() -> None:
    gateway, detokenizer = stated(r"One gateway carries ([\d,]+) streamed tokens/s, a detokenizer ([\d,]+),")
    by_groups = stated(r"A tokenizer carries (\d+) requests/s if it chooses among 64 groups, and (\d+) among 1,000")
    for place, (gpus, tokenizer) in enumerate(zip((64, 1000), by_groups, strict=True)):
        tokens, requests = load(gpus)
        gateways, detokenizers = math.ceil(tokens / gateway), math.ceil(tokens / detokenizer)
        tokenizers = math.ceil(requests / tokenizer)
        assert row("gateways")[place] == gateways
        assert row("detokenizers")[place] == detokenizers
        assert row("tokenizers")[place] == tokenizers
        streams = [
            row(f"streams from {ends}")[place]
            for ends in (
                "schedulers to detokenizers", "gateways to tokenizers and detokenizers", "tokenizers to schedulers"
            )
        ]  # fmt: skip
        expected = [gpus * detokenizers, gateways * (tokenizers + detokenizers), gpus * tokenizers]
        assert streams == [pytest.approx(number, rel=0.005) for number in expected]


def test_cells_of_recorded_answers_are_what_one_server_carries() -> None:
    few, many = re.findall(r"\| Redis for recorded answers \| ([\d.]+) cores \| ([\d.]+) cores \|", TEXT)[0]
    assert float(few) == round(recording_cores(64), 1)
    assert float(many) == round(recording_cores(1000))
    largest = math.floor(1 / recording_cores(1))
    assert stated(r"one server carries (\d+) GPUs of an 8B model") == (largest,)
    assert stated(r"divide the cell into cells of (\d+) such GPUs") == (largest,)
