"""Sleep and wake: seconds, and the memory of the workers' processes and GPUs before, during and after.

Run as `python -m deploy.evaluation.experiments.sleep [MODEL]`; on a GPU for example with
`deploy/evaluation/shapes/llama-3.1-8b --set model.load_format=dummy`.

Each level is measured with a deployment of its own. Answers after waking are compared with those before; a difference
ends the program with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import torch

from common.settings import ModelSettings
from deploy.evaluation.bench.deployments import LaunchedDeployment, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = (1, 2)
TIMEOUT_S = 3600.0
PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time there was", "def add(a, b):")
TOKENS = 32


@dataclass(frozen=True, slots=True)
class Nap:
    """Seconds to fall asleep and to wake, and bytes in use: by the workers' processes, and on the GPUs."""

    sleep_s: float
    wake_s: float
    first_answer_s: float
    awake: tuple[int, int]
    asleep: tuple[int, int]
    woken: tuple[int, int]


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=ModelSettings().reference, help="model (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="naps at each level (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--keep-cache", action="store_true", help="keep the cache on the host tier, which must be set")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    figures: dict[str, tuple[Spread, str]] = {}
    for level in LEVELS:
        settings = (f"model.reference={arguments.model}",)
        with LaunchedDeployment(arguments.config, arguments.overrides, settings, ranks=arguments.tp) as deployment:
            naps = measure(deployment, level, arguments.repeats, keep_cache=arguments.keep_cache)
        if naps is None:
            sys.stderr.write(f"level {level}: other answers after waking\n")
            return 1
        figures |= figures_of(level, naps)
    for metric, (spread, unit) in figures.items():
        sys.stdout.write(f"{metric:45} {spread.median:10.2f} {unit}  ({spread.low:.2f} to {spread.high:.2f})\n")
    if arguments.json is not None:
        sheet = ResultSheet("sleep", Path(arguments.model).name, arguments.tp, Provenance.collect(sys.argv[1:]))
        for metric, (spread, unit) in figures.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)
    return 0


def measure(deployment: LaunchedDeployment, level: int, repeats: int, *, keep_cache: bool) -> list[Nap] | None:
    """Return the naps; None if an answer differs after one of them."""
    naps = []
    with httpx.Client(base_url=deployment.url, timeout=TIMEOUT_S, trust_env=False) as http:
        wanted = answers(http)
        for _ in range(repeats):
            awake, began_at = memory_of(deployment), time.monotonic()
            http.post("/sleep", params={"level": level, "keep_cache": keep_cache}).raise_for_status()
            sleep_s, asleep, began_at = time.monotonic() - began_at, memory_of(deployment), time.monotonic()
            http.post("/wake_up").raise_for_status()
            wake_s, began_at = time.monotonic() - began_at, time.monotonic()
            first = answer(http, PROMPTS[0])
            first_answer_s = time.monotonic() - began_at
            if [first, *answers(http)[1:]] != wanted:
                return None
            naps.append(Nap(sleep_s, wake_s, first_answer_s, awake, asleep, memory_of(deployment)))
    return naps


def answers(http: httpx.Client) -> list[str]:
    """Return the continuations of all prompts."""
    return [answer(http, prompt) for prompt in PROMPTS]


def answer(http: httpx.Client, prompt: str) -> str:
    """Return the greedy continuation of a prompt."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = http.post("/v1/completions", json=body).raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


def memory_of(deployment: LaunchedDeployment) -> tuple[int, int]:
    """Return the bytes in use by the workers' processes, and on all GPUs."""
    workers = [pid for name, pid in deployment.process_ids.items() if name.startswith("worker")]
    resident = sum(psutil.Process(pid).memory_info().rss for pid in workers)
    devices = range(torch.cuda.device_count())
    used = [total - free for free, total in (torch.cuda.mem_get_info(device) for device in devices)]
    return resident, sum(used)


def figures_of(level: int, naps: Sequence[Nap]) -> dict[str, tuple[Spread, str]]:
    """Return the figures of one level, with their units."""
    figures = {
        "seconds to sleep": ([nap.sleep_s for nap in naps], "s"),
        "seconds to wake": ([nap.wake_s for nap in naps], "s"),
        "first answer after waking": ([nap.first_answer_s for nap in naps], "s"),
    }
    for place, index in (("processes", 0), ("GPUs", 1)):
        if not any(nap.awake[index] for nap in naps):
            continue
        for state in ("awake", "asleep", "woken"):
            figures[f"{place}, {state}"] = [getattr(nap, state)[index] / 2**20 for nap in naps], "MiB"
    return {f"level {level}, {name}": (Spread.of(values), unit) for name, (values, unit) in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
