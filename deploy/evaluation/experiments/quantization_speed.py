"""Times of the linear layers of a model's shape, with quantised weights and wider ones; see `quantization.py`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.host import available_cores
from deploy.evaluation.experiments.cpu_products import processor_name
from services.worker.engine.backends import RunnerOptions, find_library, select_backend, select_device
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.parallel.shards import shard_model
from services.worker.engine.quantization import grouped, int8
from services.worker.engine.quantization.fp8 import quantise, quantise_blocks
from services.worker.engine.quantization.grouped import GroupedMatrix

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from deploy.evaluation.bench.results import ResultSheet
    from services.worker.engine.kernels.interface import Kernels
    from services.worker.engine.model.config import Activation
    from services.worker.engine.quantization.matrices import QuantisedMatrix

    Multiply = Callable[[torch.Tensor], object]
    Quantiser = Callable[[torch.Tensor], QuantisedMatrix]


def in_any_order(weight: torch.Tensor) -> QuantisedMatrix:
    """Return `weight` in 4 bits as GPTQ with `desc_act` has it: groups of 128 inputs from anywhere in the row."""
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)).to(weight.device)
    matrix = grouped.quantise(weight[:, order], bits=4, group=128, has_zero_points=False)
    return replace(matrix, order=order, input_width=inputs)


def with_minima(weight: torch.Tensor) -> QuantisedMatrix:
    """Return `weight` in 4 bits as GGUF's Q4_K has it: groups of 32, whose offsets are no multiple of the scale."""
    groups = weight.float().view(weight.shape[0], -1, math.gcd(32, weight.shape[1]))
    low, high = groups.aminmax(dim=2)
    scales = ((high - low) / 15).clamp_min(1e-6)
    values = ((groups - low[:, :, None]) / scales[:, :, None]).round_().clamp_(0, 15).to(torch.uint8)
    return GroupedMatrix(values.flatten(1), 4, scales.half(), low.half())


# The formats of weights that are compared with bfloat16, by name.
QUANTISERS: dict[str, Quantiser] = {
    "fp8": quantise,
    "fp8 blocks": quantise_blocks,
    "int8": int8.quantise,
    "4 bits, groups of 128": partial(grouped.quantise, bits=4, group=128, has_zero_points=False),
    "4 bits, zero points": partial(grouped.quantise, bits=4, group=128, has_zero_points=True),
    "4 bits, any order": in_any_order,
    "4 bits, groups of 32": partial(grouped.quantise, bits=4, group=32, has_zero_points=True),
    "Q4_K": with_minima,
    "Q6_K": partial(grouped.quantise, bits=6, group=16, has_zero_points=False),
    "8 bits, groups of 32": partial(grouped.quantise, bits=8, group=32, has_zero_points=False),
}
# Weights that are read in turn: more than caches hold, of a GPU and of a processor.
_COLD_BYTES = {"cuda": 512 * 1024**2, "cpu": 96 * 1024**2}
_MOST_COPIES = 32


@dataclass(frozen=True, slots=True)
class Layer:
    """One product of a decoder's layer, on one rank."""

    name: str
    inputs: int
    outputs: int
    activation: Activation | None = None
    """Of the gated product, whose outputs are half gate, half up."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute a product, for some numbers of rows."""

    name: str
    prepare: Callable[[Layer, torch.Tensor], Multiply]
    most_rows: int | None = None


def measure_speed(arguments: argparse.Namespace, sheet: Callable[[str, str], ResultSheet]) -> list[ResultSheet]:
    """Print and return microseconds of each layer, way and number of rows."""
    device = select_device(RunnerOptions(device=arguments.device))
    threads = arguments.threads or available_cores()
    label = device.type
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads)
        label = f"{processor_name()}, {threads} thread{'s'[: threads - 1]}{arguments.note}"
    chosen = ways_named(arguments.ways, device, threads)
    sheets = []
    for shape in arguments.shapes:
        results = sheet(Path(shape).name, label)
        for layer in layers_of(shape, arguments.tp):
            for way in chosen:
                for rows, seconds in times(layer, way, arguments.rows, device, arguments.seconds):
                    rate = 2 * rows * layer.inputs * layer.outputs / seconds / 1e12
                    line = f"{results_name(layer, rows):44}{way.name:24}{seconds * 1e6:12.1f} us{rate:10.3f} TFLOP/s"
                    print(line, flush=True)  # noqa: T201
                    results.add(f"{results_name(layer, rows)}: {way.name}", seconds * 1e6, "us")
        sheets.append(results)
    return sheets


def results_name(layer: Layer, rows: int) -> str:
    """Return the name of one product."""
    return f"{layer.name} {layer.inputs} x {layer.outputs}, {rows} rows"


def layers_of(shape: Path, ranks: int) -> list[Layer]:
    """Return the products of one layer of the model whose config.json is in `shape`, on the first of `ranks`."""
    config = read_config(shape)
    shard = shard_model(config, 0, ranks)
    queries, keys = (len(heads) * config.head_dim for heads in (shard.query_heads, shard.kv_heads))
    columns = len(shard.intermediate)
    return [
        Layer("qkv", config.hidden_size, queries + 2 * keys),
        Layer("attention output", queries, config.hidden_size),
        Layer("gate and up", config.hidden_size, 2 * columns, config.activation),
        Layer("down", columns, config.hidden_size),
    ]


def ways_named(names: list[str], device: torch.device, threads: int) -> list[Way]:
    """Return the alternatives with these names, without names all of them; exit if there is none of a name."""
    every = {way.name: way for way in ways(device, threads)}
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"no such way: {', '.join(unknown)}; there are: {'; '.join(every)}")
    return [every[name] for name in names or every]


def ways(device: torch.device, threads: int) -> list[Way]:
    """Return the alternatives: the engine's own way, and on a GPU its parts and other possible parts."""
    if device.type == "cpu":
        library = find_library(RunnerOptions(device="cpu"), device)
        kernels = select_backend(library, torch.bfloat16, device, threads).kernels
        return engine_ways(kernels)
    # Only here: the CPU does without.
    from services.worker.engine.kernels.gpu.fp8_linear import multiply, multiply_few
    from services.worker.engine.kernels.gpu.fp8_rows import quantise_rows
    from services.worker.engine.kernels.gpu.kernels import GpuKernels

    def library_product(layer: Layer, weight: torch.Tensor) -> Multiply:
        matrix = quantise(weight)
        return lambda inputs: multiply(quantise_rows(inputs), matrix, None, inputs.dtype)

    def small_product(layer: Layer, weight: torch.Tensor) -> Multiply:
        matrix = quantise(weight)

        def run(inputs: torch.Tensor) -> torch.Tensor:
            outputs = inputs.new_empty(inputs.shape[0], layer.outputs)
            multiply_few(quantise_rows(inputs), matrix, None, outputs)
            return outputs

        return run

    def fast_product(layer: Layer, weight: torch.Tensor) -> Multiply:
        matrix = quantise(weight)

        def run(inputs: torch.Tensor) -> object:
            values, scales = quantise_rows(inputs)
            return torch._scaled_mm(
                values, matrix.values.t(), scale_a=scales, scale_b=matrix.scales[None], out_dtype=inputs.dtype,
                use_fast_accum=True,
            )  # fmt: skip

        return run

    return [
        *engine_ways(GpuKernels(torch.bfloat16, device)),
        Way("bfloat16 by the library", lambda _layer, weight: partial(torch.nn.functional.linear, weight=weight)),
        Way("fp8 by the library", library_product),
        Way("fp8 by few rows' program", small_product, most_rows=16),
        Way("fp8, faster sums", fast_product),
        Way("quantising alone", lambda _layer, _weight: quantise_rows),
    ]


def engine_ways(kernels: Kernels) -> list[Way]:
    """Return the engine's products with weights as they are, and in each format."""

    def wide(layer: Layer, weight: torch.Tensor) -> Multiply:
        if layer.activation is None:
            return kernels.linear(weight, None)
        gate, up = weight.chunk(2)
        return kernels.gated_linear(gate, up, None, layer.activation)

    def quantised(quantiser: Quantiser) -> Callable[[Layer, torch.Tensor], Multiply]:
        def prepare(layer: Layer, weight: torch.Tensor) -> Multiply:
            if layer.activation is None:
                return kernels.linear(quantiser(weight), None)
            gate, up = (quantiser(half) for half in weight.chunk(2))
            return kernels.gated_linear(gate, up, None, layer.activation)

        return prepare

    return [Way("bfloat16", wide), *(Way(name, quantised(each)) for name, each in QUANTISERS.items())]


def times(layer: Layer, way: Way, rows: list[int], device: torch.device, seconds: float) -> Iterator[tuple[int, float]]:
    """Yield the seconds of one product for each number of rows, with weights that no cache holds."""
    # So many that they are cold in FP8, too.
    copies = min(max(2, -(-_COLD_BYTES[device.type] // (layer.inputs * layer.outputs))), _MOST_COPIES)
    generator = torch.Generator(device).manual_seed(0)
    products = []
    for _ in range(copies):
        weight = torch.randn(layer.outputs, layer.inputs, generator=generator, device=device, dtype=torch.bfloat16)
        products.append(way.prepare(layer, weight.mul_(layer.inputs**-0.5)))
    for count in rows:
        if way.most_rows is None or count <= way.most_rows:
            inputs = torch.randn(count, layer.inputs, generator=generator, device=device)
            yield count, time_of(products, inputs, device, seconds)


@torch.inference_mode()
def time_of(products: list[Multiply], inputs: torch.Tensor, device: torch.device, seconds: float) -> float:
    """Return the median seconds of one of `products`, which run one after another."""
    if device.type == "cpu":
        # A single thread's own time leaves out that of other processes.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        return median_of(lambda: run_all(products, inputs), seconds, clock) / len(products)
    inputs = inputs.to(torch.bfloat16)
    run_all(products, inputs)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(products, inputs)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return median_of(replay, seconds) / len(products)


def run_all(products: list[Multiply], inputs: torch.Tensor) -> None:
    """Compute all products of the same inputs."""
    for product in products:
        product(inputs)


def median_of(run: Callable[[], None], seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Run again and again after a first time; return the median seconds of a run, by `clock`."""
    run()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        started = clock()
        run()
        found.append(clock() - started)
    return sorted(found)[len(found) // 2]
