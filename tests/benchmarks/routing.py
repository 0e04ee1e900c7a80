"""Measure what routing policies are worth on the M1 workload: `python -m tests.e2e.measure_routing --requests 600`.

Two scheduler groups, whose engines make tokens up: prefill costs nothing, so what counts is the share of prompt tokens
that was cached. Small caches, so that what is routed badly is also evicted sooner.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from deploy.supervisor.layout import free_port
from tests.e2e.groups import Tier

POLICIES = ("round_robin", "least_loaded", "prefix_aware")


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--scale", type=float, default=0.2, help="of all lengths of M1")
    parser.add_argument("--pages", type=int, default=4096, help="of each group, 16 tokens each")
    parser.add_argument("--cache", default="user_aware")
    arguments = parser.parse_args()
    sys.stdout.write("policy          cached  requests/s  by group\n")
    for policy in POLICIES:
        cached, rate, groups = measure(policy, arguments)
        sys.stdout.write(f"{policy:14} {cached:7.1%} {rate:11.1f}  {groups}\n")
        sys.stdout.flush()


def measure(policy: str, arguments: argparse.Namespace) -> tuple[float, float, str]:
    """Return the share of cached prompt tokens, requests per second, and each group's share of them."""
    port = free_port("127.0.0.1")
    settings = {
        "tokenizer.routing": policy,
        "tokenizer.metrics_port": port,
        "scheduler.device_pages": arguments.pages,
        "scheduler.cache": arguments.cache,
        "worker.fake_step_ms": 2,
    }
    with tempfile.TemporaryDirectory(prefix="pando-routing-") as folder:
        tier = Tier(Path(folder), settings)
        try:
            tier.start()
            result = bench(tier, arguments, Path(folder) / "result.json")
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        finally:
            tier.stop()
    counts = [float(count) for count in re.findall(r"^pando_tokenizer_routed_requests_total\{.*\} (.+)$", text, re.M)]
    shares = " ".join(f"{count / sum(counts):.0%}" for count in sorted(counts))
    return result["cached_share"], result["request_throughput"], shares


def bench(tier: Tier, arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Run the workload; return its figures."""
    options = {
        "url": f"http://127.0.0.1:{tier.port}",
        "workload": "m1",
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "scale": arguments.scale,
        "think-s": 0.2,
        "seed": 7,
        "json": output,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {entry["metric"]: entry["value"] for entry in json.loads(output.read_text())}


if __name__ == "__main__":
    main()
