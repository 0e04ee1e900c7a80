"""Costs of adapters: throughput of W1 with 0, 1, 8 and 64 of them, and first tokens of one that is not on the device.

Run as `python -m deploy.evaluation.experiments.adapters deploy/evaluation/shapes/llama-3.1-8b`, with
`--set model.load_format=dummy` where there are no weights.
Adapters are random; request i uses adapter i modulo their number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from common.types import CacheMode
from deploy.evaluation.bench.deployments import LaunchedDeployment, add_setting_arguments
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.offline import evaluate
from deploy.evaluation.bench.pipeline_client import PipelineClient, schedule_requests
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.bench.workloads.random_text import random_sessions
from deploy.evaluation.bench.workloads.w1 import TEMPERATURE, w1_requests
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.checkpoints.tensor_shapes import tensor_shape

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from common.types import ScheduleRequest
    from deploy.evaluation.bench.records import BenchRequest

COUNTS = (0, 1, 8, 64)
MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
TIMEOUT_S = 3600.0
PROMPT_TOKENS = 128
FIRST_TOKENS = 10
# More random numbers than the largest factor needs twice, so that factors begin at different places.
PLACES = 1 << 20


def main() -> None:
    """Measure and print; write results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of adapters (0 1 8 64)")
    parser.add_argument("--rank", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--requests", type=int, default=256, help="the first of W1's (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="W1's lengths times this (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the workload (%(default)s)")
    parser.add_argument("--json", type=Path)
    add_setting_arguments(parser)
    arguments = parser.parse_args()
    figures: dict[str, tuple[Spread, str]] = {}
    # One event loop, as gRPC reports events to a closed one on standard error.
    with TemporaryDirectory(prefix="pando-adapters-") as folder, asyncio.Runner() as runner:
        shelf = RandomAdapters(arguments.model, Path(folder), arguments.rank)
        for count in arguments.counts:
            with launched(arguments, shelf.paths(count), slots=max(count, 1)) as deployment:
                rates = runner.run(throughput(arguments, deployment, count))
            figures[f"W1, {count} adapters"] = Spread.of(rates), "tok/s"
        with launched(arguments, shelf.paths(2), slots=1) as deployment:
            for title, count in (("on the device", 1), ("in host memory", 2)):
                spread = Spread.of(runner.run(first_tokens(deployment, count)))
                figures[f"first token, adapter {title}"] = spread, "ms"
    for metric, (spread, unit) in figures.items():
        sys.stdout.write(f"{metric:45} {spread.median:10.1f} {unit}  ({spread.low:.1f} to {spread.high:.1f})\n")
    if arguments.json is not None:
        sheet = ResultSheet("adapters", arguments.model.name, 1, Provenance.collect(sys.argv[1:]))
        for metric, (spread, unit) in figures.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)


@contextlib.contextmanager
def launched(arguments: argparse.Namespace, adapters: Mapping[str, str], slots: int) -> Generator[LaunchedDeployment]:
    """Run a deployment with these adapters."""
    settings = (
        f"model.reference={arguments.model}",
        f"scheduler.adapters.slots={slots}",
        "scheduler.adapters.tenant_share=1",
        f"scheduler.adapters.load={json.dumps(adapters)}",
    )
    began_at = time.monotonic()
    with LaunchedDeployment(arguments.config, arguments.overrides, settings) as deployment:
        report(f"a deployment with {len(adapters)} adapters serves after {time.monotonic() - began_at:.1f} s")
        yield deployment


async def throughput(arguments: argparse.Namespace, deployment: LaunchedDeployment, adapters: int) -> list[float]:
    """Return the output tokens per second of each pass over the workload, after one that warms up."""
    rates = []
    requests = w1_requests(arguments.requests, arguments.scale)
    names = adapter_names(adapters)
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for number in range(arguments.repeats + 1):
            began_at = time.monotonic()
            records = await client.start(adapted(requests, names))
            await client.finish(TIMEOUT_S)
            rates.append(evaluate(requests, records).output_tokens_per_s)
            title = f"pass {number} of {arguments.repeats}" if number else "warm-up"
            report(f"{adapters} adapters, {title}: {rates[-1]:.1f} tok/s, {time.monotonic() - began_at:.1f} s")
    return rates[1:]


async def first_tokens(deployment: LaunchedDeployment, adapters: int) -> list[float]:
    """Return milliseconds to the first token of single requests, each with the next of the adapters."""
    times = []
    names = adapter_names(adapters)
    sessions = random_sessions(FIRST_TOKENS + adapters, PROMPT_TOKENS, 2, name="first token")
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for number, session in enumerate(sessions):
            name = names[number % len(names)]
            records = await client.start(adapted([session.requests[0]], [name]))
            await client.finish(TIMEOUT_S)
            first = evaluate([session.requests[0]], records).first_token_s
            times.append((first or 0.0) * 1e3)
    return times[adapters:]


def adapted(requests: Sequence[BenchRequest], names: Sequence[str]) -> list[ScheduleRequest]:
    """Encode requests, which use the adapters in turns."""
    encoded = schedule_requests(requests, PromptMaker(), TEMPERATURE, CacheMode.NONE)
    if not names:
        return list(encoded)
    return [
        replace(each, options=replace(each.options, adapter=names[number % len(names)]))
        for number, each in enumerate(encoded)
    ]


def adapter_names(count: int) -> list[str]:
    """Return the names of the first adapters."""
    return [f"a{number}" for number in range(count)]


class RandomAdapters:
    """Writes adapters of attention and feed-forward layers as PEFT would, each when it is first asked for.

    Their factors are parts of the same random numbers, from other places in each adapter: drawing them for 64 adapters
    of an 8B model would take minutes.
    """

    def __init__(self, model: Path, folder: Path, rank: int) -> None:
        """Prepare adapters of `rank` for the model in a directory; they are written to `folder`."""
        self._model = model
        self._folder = folder
        self._rank = rank
        self._written: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        config = read_config(model)
        for layer in range(config.layers):
            for module in MODULES:
                name = f"model.layers.{layer}.{module}"
                height, width = tensor_shape(f"{name}.weight", config)
                self._shapes[f"base_model.model.{name}.lora_A.weight"] = rank, width
                self._shapes[f"base_model.model.{name}.lora_B.weight"] = height, rank
        largest = max(math.prod(shape) for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(0)
        # [numbers] bf16
        self._numbers = (torch.randn(2 * largest + PLACES, generator=generator) * 0.02).bfloat16()

    def paths(self, count: int) -> dict[str, str]:
        """Return the directories of the first adapters, by name."""
        names = adapter_names(count)
        missing = [name for name in names if name not in self._written]
        if missing:
            began_at = time.monotonic()
            for name in missing:
                self._written[name] = str(self._write(self._folder / name, seed=len(self._written)))
            size = sum(path.stat().st_size for name in missing for path in Path(self._written[name]).iterdir())
            report(f"{len(missing)} adapters, {size / 1e6:.0f} MB, written in {time.monotonic() - began_at:.1f} s")
        return {name: self._written[name] for name in names}

    def _write(self, target: Path, seed: int) -> Path:
        places = random.Random(seed)
        tensors = {}
        for name, shape in self._shapes.items():
            count = math.prod(shape)
            first = places.randrange(len(self._numbers) - count)
            tensors[name] = self._numbers[first : first + count].view(shape).clone()
        target.mkdir()
        save_file(tensors, target / "adapter_model.safetensors")
        described = {
            "peft_type": "LORA", "r": self._rank, "lora_alpha": 2 * self._rank,
            "base_model_name_or_path": str(self._model),
        }  # fmt: skip
        (target / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        return target


def report(line: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
