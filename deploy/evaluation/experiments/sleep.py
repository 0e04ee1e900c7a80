"""Sleep and wake: seconds, and the memory of the workers' processes and GPUs before, during and after.

Run as `python -m deploy.evaluation.experiments.sleep [MODEL]`; on a GPU for example with
`deploy/evaluation/shapes/llama-3.1-8b --set model.load_format=dummy`.

One deployment sleeps at each level in turn. Answers after waking are compared with those before; a difference ends the
program with an error. Figures are printed, and written, after each nap; no nap begins that would end after
`--time-limit`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch

from common.settings import ModelSettings
from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time

LEVELS = (1, 2)
PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time there was", "def add(a, b):")
TOKENS = 32
# For stopping.
RESERVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Nap:
    """Seconds to fall asleep and to wake, and bytes in use: by the workers' processes, and on the GPUs."""

    sleep_s: float
    wake_s: float
    first_answer_s: float
    awake: tuple[int, int]
    asleep: tuple[int, int]
    woken: tuple[int, int]


class AnswersDifferError(Exception):
    """The model has other answers after it has slept."""


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=ModelSettings().reference, help="model (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="times to sleep and wake at each level (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--keep-cache", action="store_true", help="keep the cache on the host tier, which must be set")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    deadline = Deadline.after(arguments.time_limit)
    results = PartialResults("sleep", Path(arguments.model).name, arguments.json, tp=arguments.tp)
    settings = (f"model.reference={arguments.model}",)
    began_at = time.monotonic()
    try:
        with LaunchedDeployment(
            arguments.config, arguments.overrides, settings, ranks=arguments.tp, start_timeout_s=deadline.left_s
        ) as deployment:
            report(f"a deployment serves after {time.monotonic() - began_at:.1f} s")
            measure(deployment, arguments, deadline, results)
    except (LaunchError, AnswersDifferError, httpx.HTTPError) as error:
        report(str(error))
        return 1
    return 0


def measure(
    deployment: LaunchedDeployment, arguments: argparse.Namespace, deadline: Deadline, results: PartialResults
) -> None:
    """Put the model to sleep and wake it, as often as asked for and possible.

    Raises:
        AnswersDifferError: an answer differs after one of the naps.
        httpx.HTTPError: a call failed, or took longer than there was time.
    """
    with httpx.Client(base_url=deployment.url, timeout=deadline.left_s, trust_env=False) as http:
        wanted = answers(http)
        for level in within_time(LEVELS * arguments.repeats, deadline, RESERVE_S):
            nap = take_nap(deployment, http, level, wanted, keep_cache=arguments.keep_cache)
            for metric, (value, unit) in figures_of(nap).items():
                results.add(f"level {level}, {metric}", unit, [value])
        report(f"{len(wanted)} answers of {TOKENS} tokens were the same after each nap")


def take_nap(
    deployment: LaunchedDeployment, http: httpx.Client, level: int, wanted: list[str], *, keep_cache: bool
) -> Nap:
    """Put the model to sleep and wake it once.

    Raises:
        AnswersDifferError: answers are not those that are wanted.
        httpx.HTTPError: a call failed.
    """
    awake, began_at = memory_of(deployment), time.monotonic()
    http.post("/sleep", params={"level": level, "keep_cache": keep_cache}).raise_for_status()
    sleep_s, asleep, began_at = time.monotonic() - began_at, memory_of(deployment), time.monotonic()
    http.post("/wake_up").raise_for_status()
    wake_s, began_at = time.monotonic() - began_at, time.monotonic()
    first = answer(http, PROMPTS[0])
    first_answer_s = time.monotonic() - began_at
    if [first, *answers(http)[1:]] != wanted:
        raise AnswersDifferError(f"level {level}: other answers after waking")
    return Nap(sleep_s, wake_s, first_answer_s, awake, asleep, memory_of(deployment))


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


def figures_of(nap: Nap) -> dict[str, tuple[float, str]]:
    """Return the figures of a nap, with their units."""
    figures = {
        "seconds to sleep": (nap.sleep_s, "s"),
        "seconds to wake": (nap.wake_s, "s"),
        "first answer after waking": (nap.first_answer_s, "s"),
    }
    for place, index in (("processes", 0), ("GPUs", 1)):
        if nap.awake[index]:
            for state, memory in (("awake", nap.awake), ("asleep", nap.asleep), ("woken", nap.woken)):
                figures[f"{place}, {state}"] = memory[index] / 2**20, "MiB"
    return figures


if __name__ == "__main__":
    sys.exit(main())
