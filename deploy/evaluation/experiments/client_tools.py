"""Measure a running deployment with other projects' load generators: GuideLLM and AIPerf.

    python3 -m venv tools && tools/bin/pip install guidellm aiperf
    python -m deploy.evaluation.experiments.peers.export_model --tiny tokenizer
    python -m deploy.evaluation.experiments.client_tools --tools tools/bin --tokenizer tokenizer

Both send the same numbers of requests, each with prompts of its own; their summaries are shown as they report them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

TIMEOUT_S = 1800


def main() -> int:
    """Run both tools and print what they found; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tools", type=Path, required=True, help="directory of the commands guidellm and aiperf")
    parser.add_argument("--tokenizer", required=True, help="the model's tokenizer: a directory, or a name on the hub")
    parser.add_argument("--streams", type=int, default=4, help="requests at a time")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    arguments = parser.parse_args()
    model = httpx.get(f"{arguments.url}/v1/models").raise_for_status().json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as scratch:
        found = {
            "workload": {
                "model": model,
                "streams": arguments.streams,
                "requests": arguments.requests,
                "input_tokens": arguments.input_tokens,
                "output_tokens": arguments.output_tokens,
            },
            "guidellm": guidellm(arguments, model, Path(scratch)),
            "aiperf": aiperf(arguments, model, Path(scratch)),
        }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0


def guidellm(arguments: argparse.Namespace, model: str, scratch: Path) -> dict[str, Any]:
    """Return GuideLLM's summary: milliseconds, and tokens or requests per second."""
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
    content = json.loads(report.read_text())
    metrics = content["benchmarks"][0]["metrics"]

    def quantiles(name: str) -> dict[str, float]:
        spread = metrics[name]["successful"]
        return {"p50": round(spread["percentiles"]["p50"], 1), "p99": round(spread["percentiles"]["p99"], 1)}

    totals = metrics["request_totals"]
    return {
        "version": content["metadata"]["guidellm_version"],
        "completed": totals["successful"],
        "failed": totals["errored"],
        "first_token_ms": quantiles("time_to_first_token_ms"),
        "inter_token_ms": quantiles("inter_token_latency_ms"),
        "output_tokens_per_s": round(metrics["output_tokens_per_second"]["successful"]["mean"], 1),
        "requests_per_s": round(metrics["requests_per_second"]["successful"]["mean"], 2),
    }


def aiperf(arguments: argparse.Namespace, model: str, scratch: Path) -> dict[str, Any]:
    """Return AIPerf's summary: milliseconds, and tokens or requests per second."""
    _run(
        *(arguments.tools / "aiperf", "profile", "--ui", "none", "--artifact-dir", scratch / "aiperf"),
        *("--model", model, "--tokenizer", arguments.tokenizer, "--url", arguments.url),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--concurrency", arguments.streams, "--request-count", arguments.requests),
        *("--isl", arguments.input_tokens, "--osl", arguments.output_tokens),
    )
    content = json.loads((scratch / "aiperf" / "profile_export_aiperf.json").read_text())

    def quantiles(name: str) -> dict[str, float]:
        return {"p50": round(content[name]["p50"], 1), "p99": round(content[name]["p99"], 1)}

    return {
        "version": content["aiperf_version"],
        "completed": int(content["request_count"]["avg"]),
        "failed": sum(entry["count"] for entry in content["error_summary"]),
        "first_token_ms": quantiles("time_to_first_token"),
        "inter_token_ms": quantiles("inter_token_latency"),
        "output_tokens_per_s": round(content["output_token_throughput"]["avg"], 1),
        "requests_per_s": round(content["request_throughput"]["avg"], 2),
    }


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
