from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deploy.evaluation.bench.results import read_results
from deploy.evaluation.experiments.client_tools import keep, read_aiperf, read_guidellm, table_of

if TYPE_CHECKING:
    from pathlib import Path


def spread(p50: float, p99: float) -> dict[str, Any]:
    return {"successful": {"percentiles": {"p50": p50, "p99": p99}}}


GUIDELLM = {
    "metadata": {"guidellm_version": "1.2.3"},
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 40, "errored": 0},
                "time_to_first_token_ms": spread(50, 90),
                "inter_token_latency_ms": spread(12.5, 20),
                "output_tokens_per_second": {"successful": {"mean": 256.25}},
                "requests_per_second": {"successful": {"mean": 8}},
            }
        }
    ],
}
AIPERF = {
    "aiperf_version": "4.5.6",
    "request_count": {"avg": 39.0},
    "error_summary": [{"count": 1}],
    "time_to_first_token": {"p50": 51, "p99": 91},
    "inter_token_latency": {"p50": 13, "p99": 21},
    "output_token_throughput": {"avg": 250},
    "request_throughput": {"avg": 7.5},
}


def test_the_figures_of_both_tools_are_kept_under_their_names_and_the_load(tmp_path: Path) -> None:
    found = [read_guidellm(GUIDELLM), read_aiperf(AIPERF)]
    assert [(each.completed, each.failed) for each in found] == [(40, 0), (39, 1)]
    path = tmp_path / "client_tools.json"
    keep(argparse.Namespace(streams=4, input_tokens=128, output_tokens=32, json=path), "tiny", found)
    results = read_results(path)
    assert len(results) == 14
    kept = {(str(each.label).split("; ")[0], each.metric): f"{each.value:g} {each.unit}" for each in results}
    assert kept["GuideLLM 1.2.3", "between tokens, p50"] == "12.5 ms"
    assert kept["GuideLLM 1.2.3", "first token, p99"] == "90 ms"
    assert kept["AIPerf 4.5.6", "output"] == "250 tok/s"
    assert all("; 4 streams, 128 tokens in, 32 out; " in str(each.label) for each in results)
    assert [column.header for column in table_of(found).columns] == ["", "GuideLLM 1.2.3", "AIPerf 4.5.6"]
