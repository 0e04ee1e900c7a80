"""Costs of adapters: throughput of W1 with 0, 1, 8 and 64 of them, and first tokens of one that is not on the device.

Run as `python -m deploy.evaluation.experiments.adapters deploy/evaluation/shapes/llama-3.1-8b`, with
`--set model.load_format=dummy` where there are no weights.
Adapters are random; request i uses adapter i modulo their number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
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
    from collections.abc import Sequence

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
    with TemporaryDirectory(prefix="pando-adapters-") as folder:
        names = [f"a{number}" for number in range(max(2, *arguments.counts))]
        for number, name in enumerate(names):
            save_random_adapter(arguments.model, Path(folder, name), arguments.rank, seed=number)
        for count in arguments.counts:
            with launched(arguments, folder, names[:count], slots=max(count, 1)) as deployment:
                rates = asyncio.run(throughput(arguments, deployment, names[:count]))
            figures[f"W1, {count} adapters"] = Spread.of(rates), "tok/s"
        with launched(arguments, folder, names[:2], slots=1) as deployment:
            for title, order in (("on the device", names[:1]), ("in host memory", names[:2])):
                spread = Spread.of(asyncio.run(first_tokens(deployment, order)))
                figures[f"first token, adapter {title}"] = spread, "ms"
    for metric, (spread, unit) in figures.items():
        sys.stdout.write(f"{metric:45} {spread.median:10.1f} {unit}  ({spread.low:.1f} to {spread.high:.1f})\n")
    if arguments.json is not None:
        sheet = ResultSheet("adapters", arguments.model.name, 1, Provenance.collect(sys.argv[1:]))
        for metric, (spread, unit) in figures.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)


def launched(arguments: argparse.Namespace, folder: str, names: Sequence[str], slots: int) -> LaunchedDeployment:
    """Return a deployment with these adapters."""
    settings = (
        f"model.reference={arguments.model}",
        f"scheduler.adapters.slots={slots}",
        "scheduler.adapters.tenant_share=1",
        f"scheduler.adapters.load={json.dumps({name: str(Path(folder, name)) for name in names})}",
    )
    return LaunchedDeployment(arguments.config, arguments.overrides, settings)


async def throughput(
    arguments: argparse.Namespace, deployment: LaunchedDeployment, names: Sequence[str]
) -> list[float]:
    """Return the output tokens per second of each pass over the workload, after one that warms up."""
    rates = []
    requests = w1_requests(arguments.requests, arguments.scale)
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for _ in range(arguments.repeats + 1):
            records = await client.start(adapted(requests, names))
            await client.finish(TIMEOUT_S)
            rates.append(evaluate(requests, records).output_tokens_per_s)
    return rates[1:]


async def first_tokens(deployment: LaunchedDeployment, names: Sequence[str]) -> list[float]:
    """Return milliseconds to the first token of single requests, each with the next of the adapters."""
    times = []
    sessions = random_sessions(FIRST_TOKENS + len(names), PROMPT_TOKENS, 2, name="first token")
    async with PipelineClient(deployment.address_of("scheduler"), deployment.address_of("detokenizer")) as client:
        for number, session in enumerate(sessions):
            name = names[number % len(names)]
            records = await client.start(adapted([session.requests[0]], [name]))
            await client.finish(TIMEOUT_S)
            first = evaluate([session.requests[0]], records).first_token_s
            times.append((first or 0.0) * 1e3)
    return times[len(names) :]


def adapted(requests: Sequence[BenchRequest], names: Sequence[str]) -> list[ScheduleRequest]:
    """Encode requests, which use the adapters in turns."""
    encoded = schedule_requests(requests, PromptMaker(), TEMPERATURE, CacheMode.NONE)
    if not names:
        return list(encoded)
    return [
        replace(each, options=replace(each.options, adapter=names[number % len(names)]))
        for number, each in enumerate(encoded)
    ]


def save_random_adapter(model: Path, target: Path, rank: int, seed: int) -> None:
    """Write an adapter of attention and feed-forward layers, as PEFT would."""
    config, tensors = read_config(model), {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config.layers):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            height, width = tensor_shape(f"{name}.weight", config)
            for side, shape in (("A", (rank, width)), ("B", (height, rank))):
                factor = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = factor.bfloat16()
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": str(model)}
    (target / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")


if __name__ == "__main__":
    main()
