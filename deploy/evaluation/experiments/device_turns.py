"""Models that take turns on one device: the time of a request that wakes one, and of requests to all at once.

Run as `python -m deploy.evaluation.experiments.device_turns MODEL MODEL …`; on a GPU for example with
`deploy/evaluation/shapes/llama-3.1-8b deploy/evaluation/shapes/qwen3-0.6b --set model.load_format=dummy`.

One deployment serves all models as `pando up --share-device` does. First, single requests go to the models in turn, so
that each wakes its model; a second one follows while the model is awake. The answers to single requests must be the
same in all turns; a difference ends the program with an error. Then several come for all models at once, and wait for
their turns. No round begins that would end after `--time-limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import torch

from deploy.evaluation.bench.deployments import LaunchedDeployment, LaunchError, add_setting_arguments
from deploy.evaluation.bench.partial_results import Deadline, PartialResults, report, within_time

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = 32
# Less than a page, so that nothing is found in the cache: a hit divides a prompt otherwise, and changes rounding.
PROMPT_TOKENS = 12
# Token ids of prompts are within every vocabulary.
SMALLEST_VOCABULARY = 256
# For stopping.
RESERVE_S = 10.0


class ChangedAnswerError(Exception):
    """A model has other answers in another turn."""


class Models:
    """The models of a deployment by their names, and their answers to single requests."""

    def __init__(self, client: httpx.AsyncClient, names: Sequence[str]) -> None:
        self.names = names
        self._client = client
        self._answers: dict[str, list[int]] = {}

    async def ask(self, name: str) -> float:
        """Send a single request to a model; return the seconds until its answer is complete.

        Raises:
            ChangedAnswerError: the model's first answer was another one.
            httpx.HTTPError: the request failed, or took longer than there was time.
        """
        began_at = time.monotonic()
        answer = await self._answer(name, 0)
        took_s = time.monotonic() - began_at
        if answer != self._answers.setdefault(name, answer):
            raise ChangedAnswerError(f"{name} answered {answer}, and {self._answers[name]} in its first turn")
        return took_s

    async def ask_all(self, requests: int) -> float:
        """Send so many requests to each model, all at once; return the seconds until all are answered.

        Raises:
            httpx.HTTPError: a request failed, or took longer than there was time.
        """
        began_at = time.monotonic()
        await asyncio.gather(*(self._answer(name, number) for number in range(requests) for name in self.names))
        return time.monotonic() - began_at

    async def _answer(self, name: str, number: int) -> list[int]:
        """Return the tokens with which a model continues prompt `number`."""
        prompt = [(number * 31 + position * 7) % SMALLEST_VOCABULARY for position in range(PROMPT_TOKENS)]
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        response = (await self._client.post("/v1/completions", json=body)).raise_for_status()
        answer: list[int] = response.json()["choices"][0]["token_ids"]
        return answer


def main() -> int:
    """Measure and print; write results where asked; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="paths of two models or more")
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="of sleep between turns (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each model (%(default)s)")
    parser.add_argument("--at-once", type=int, default=32, help="requests to each model at once (%(default)s)")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds for all of it (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    names = [path.name for path in arguments.models]
    if len(set(names)) < max(len(names), 2):
        parser.error("two models or more are needed, and each needs a name of its own")
    deadline = Deadline.after(arguments.time_limit)
    settings = (
        *(f"models={path.name}={path}" for path in arguments.models),
        "scheduler.device_turns.enabled=true",
        f"scheduler.device_turns.level={arguments.level}",
    )
    results = PartialResults("device_turns", " and ".join(names), arguments.json, label=f"level {arguments.level}")
    began_at = time.monotonic()
    try:
        with LaunchedDeployment(
            arguments.config, arguments.overrides, settings, start_timeout_s=deadline.left_s
        ) as deployment:
            report(f"all models serve after {time.monotonic() - began_at:.1f} s")
            asyncio.run(measure(deployment.url, names, arguments, deadline, results))
    except (LaunchError, ChangedAnswerError, httpx.HTTPError) as error:
        report(f"{type(error).__name__}: {error}")
        return 1
    return 0


async def measure(
    url: str, names: Sequence[str], arguments: argparse.Namespace, deadline: Deadline, results: PartialResults
) -> None:
    """Have the models take turns, then ask all at once.

    Raises:
        ChangedAnswerError: a model has other answers in another turn.
        httpx.HTTPError: a request failed, or took longer than there was time.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=deadline.left_s, limits=limits, trust_env=False) as client:
        models = Models(client, names)
        # The last one to be loaded is awake; each has compiled its programs after this round.
        for name in names:
            await models.ask(name)
        for name in within_time(list(names) * arguments.repeats, deadline, RESERVE_S):
            results.add(f"{name}: answer of {TOKENS} tokens, asleep", "s", [await models.ask(name)])
            results.add(f"{name}: answer of {TOKENS} tokens, awake", "s", [await models.ask(name)])
            for free, total in (torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())):
                results.add(f"{name}: GPU memory in its turn", "GiB", [(total - free) / 2**30])
        for requests in within_time([arguments.at_once] * arguments.repeats, deadline, RESERVE_S):
            results.add(f"{requests} requests to each at once", "s", [await models.ask_all(requests)])


if __name__ == "__main__":
    sys.exit(main())
