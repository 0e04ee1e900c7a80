"""Measure a running deployment with other projects' load generators: GuideLLM and AIPerf.

    python3 -m venv tools && tools/bin/pip install guidellm aiperf
    python -m deploy.evaluation.experiments.peers.export_model --tiny tokenizer
    python -m deploy.evaluation.experiments.client_tools --tools tools/bin --tokenizer tokenizer

Both send the same numbers of requests, each with prompts of its own; their figures are those that they report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.experiments.cpu_products import processor_name

BENCHMARK = "client_tools"
TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile of times in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """The summary of one tool, whose version is part of its name."""

    tool: str
    completed: int
    failed: int
    first_token: Quantiles
    between_tokens: Quantiles
    output_tokens_per_s: float
    requests_per_s: float

    @property
    def figures(self) -> dict[str, tuple[float, str]]:
        """The figures with their units, by metric."""
        return {
            "completed": (self.completed, "requests"),
            "first token, p50": (self.first_token.p50, "ms"),
            "first token, p99": (self.first_token.p99, "ms"),
            "between tokens, p50": (self.between_tokens.p50, "ms"),
            "between tokens, p99": (self.between_tokens.p99, "ms"),
            "output": (self.output_tokens_per_s, "tok/s"),
            "requests": (self.requests_per_s, "requests/s"),
        }


def main() -> None:
    """Run both tools, print what they found, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tools", type=Path, required=True, help="directory of the commands guidellm and aiperf")
    parser.add_argument("--tokenizer", required=True, help="the model's tokenizer: a directory, or a name on the hub")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    arguments = parser.parse_args()
    model = httpx.get(f"{arguments.url}/v1/models").raise_for_status().json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as scratch:
        found = [tool(arguments, model, Path(scratch)) for tool in (guidellm, aiperf)]
    output_console().print(table_of(found))
    for each in found:
        if each.failed or each.completed != arguments.requests:
            raise SystemExit(f"{each.tool}: {each.completed} of {arguments.requests} requests are complete")
    if arguments.json:
        keep(arguments, model, found)


def table_of(found: list[ToolFigures]) -> Table:
    """Return the figures of all tools as a table."""
    table = Table(box=None)
    for column in ("", *(each.tool for each in found)):
        table.add_column(column, justify="right" if column else "left")
    for metric, (_, unit) in found[0].figures.items():
        table.add_row(metric, *(f"{each.figures[metric][0]:,.4g} {unit}" for each in found))
    return table


def keep(arguments: argparse.Namespace, model: str, found: list[ToolFigures]) -> None:
    """Write the figures to a file of results."""
    command = shlex.join(["python", "-m", f"deploy.evaluation.experiments.{BENCHMARK}", *sys.argv[1:]])
    origin = replace(Provenance.collect([]), command=command)
    load = f"{arguments.streams} streams, {arguments.input_tokens} tokens in, {arguments.output_tokens} out"
    for each in found:
        sheet = ResultSheet(BENCHMARK, model, 1, origin, f"{each.tool}; {load}; {processor_name()}")
        for metric, (value, unit) in each.figures.items():
            sheet.add(metric, value, unit)
        write_results(arguments.json, sheet.results)


def guidellm(arguments: argparse.Namespace, model: str, scratch: Path) -> ToolFigures:
    """Return GuideLLM's summary."""
    report = scratch / "guidellm.json"
    tokens = f"prompt_tokens={arguments.input_tokens},output_tokens={arguments.output_tokens}"
    _run(
        *(arguments.tools / "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={arguments.url},model={model}"),
        *("--profile", f"kind=concurrent,streams={arguments.streams}"),
        *("--constraint", f"kind=max_requests,count={arguments.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={arguments.tokenizer}"),
        *("--data", f"kind=synthetic_text,{tokens}"),
        *("--output", f"kind=json,path={report}"),
    )
    return read_guidellm(json.loads(report.read_text()))


def read_guidellm(report: dict[str, Any]) -> ToolFigures:
    """Return the figures of GuideLLM's report (JSON)."""
    metrics = report["benchmarks"][0]["metrics"]

    def quantiles(name: str) -> Quantiles:
        percentiles = metrics[name]["successful"]["percentiles"]
        return Quantiles(percentiles["p50"], percentiles["p99"])

    totals = metrics["request_totals"]
    return ToolFigures(
        f"GuideLLM {report['metadata']['guidellm_version']}",
        totals["successful"],
        totals["errored"],
        quantiles("time_to_first_token_ms"),
        quantiles("inter_token_latency_ms"),
        metrics["output_tokens_per_second"]["successful"]["mean"],
        metrics["requests_per_second"]["successful"]["mean"],
    )


def aiperf(arguments: argparse.Namespace, model: str, scratch: Path) -> ToolFigures:
    """Return AIPerf's summary."""
    _run(
        *(arguments.tools / "aiperf", "profile", "--ui", "none", "--artifact-dir", scratch / "aiperf"),
        *("--model", model, "--tokenizer", arguments.tokenizer, "--url", arguments.url),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--concurrency", arguments.streams, "--request-count", arguments.requests),
        *("--isl", arguments.input_tokens, "--osl", arguments.output_tokens),
    )
    return read_aiperf(json.loads((scratch / "aiperf" / "profile_export_aiperf.json").read_text()))


def read_aiperf(report: dict[str, Any]) -> ToolFigures:
    """Return the figures of AIPerf's report (JSON)."""

    def quantiles(name: str) -> Quantiles:
        return Quantiles(report[name]["p50"], report[name]["p99"])

    return ToolFigures(
        f"AIPerf {report['aiperf_version']}",
        int(report["request_count"]["avg"]),
        sum(entry["count"] for entry in report["error_summary"]),
        quantiles("time_to_first_token"),
        quantiles("inter_token_latency"),
        report["output_token_throughput"]["avg"],
        report["request_throughput"]["avg"],
    )


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
