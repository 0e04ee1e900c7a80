"""Matrix products on a CPU, by layer, rows and way of computing them; and what a worker chooses.

    python -m deploy.evaluation.experiments.cpu_products --json deploy/evaluation/results/cpu_products.json

Ways are the operators' own products, oneDNN's blocks with the same panels (`worker.products`), and for comparison
torch's `linear` and its products with weights packed by oneDNN. They take turns; weights come from memory, not from a
cache. The figure of a way is its median, in GFLOP/s. Results name the processor.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.host import available_cores
from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.host import limit_spinning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.cpu.products import ProductShape
    from services.worker.engine.kernels.interface import Linear

    Prepare = Callable[[torch.Tensor], Linear]

NAMES = ("qkv", "attention output", "gate and up", "down")
ROWS = (1, 8, 32, 256, 1024)
# Weights that are read in turn.
COLD_BYTES, MOST_COPIES = 96 * 1024**2, 32


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, and write them if asked to; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="bundled name, or directory (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of weights (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows of a product (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of all ways, after a first one (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    limit_spinning()
    measured = measure(arguments)
    if arguments.json is not None:
        command = f"python -m deploy.evaluation.experiments.cpu_products --json {arguments.json}"
        provenance = replace(Provenance.collect(()), command=command)
        sheet = ResultSheet("cpu-products", arguments.model, 1, provenance, processor_name())
        for metric, (spread, unit) in measured.items():
            sheet.add_spread(metric, spread, unit)
        write_results(arguments.json, sheet.results)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, tuple[Spread, str]]:
    """Print and return the rates of all products, and for each type how much faster oneDNN's workloads are."""
    # Imported here: these load torch and its OpenMP runtime, which reads the variables that `limit_spinning` has set.
    import torch

    from services.worker.engine.backends import DTYPES, RunnerOptions, find_library
    from services.worker.engine.kernels.cpu.onednn import find_block_functions
    from services.worker.engine.kernels.cpu.products import ProductBench, choose

    threads = arguments.threads or available_cores()
    torch.set_num_threads(threads)
    library = find_library(RunnerOptions(backend="compiled"), torch.device("cpu"))
    assert library is not None, "compiled operators were asked for"
    shapes, blocks = shapes_of(arguments.model), find_block_functions()
    figures: dict[str, tuple[Spread, str]] = {}
    sys.stdout.write(f"{processor_name()}, {threads} threads, torch {torch.__version__}\n")
    for name in arguments.dtypes:
        dtype = DTYPES[name]
        usable = blocks if blocks is not None and library.has_blocks(blocks, dtype) else None
        ways = prepared_ways(library, dtype, threads, usable)
        for label, shape in zip(NAMES, shapes, strict=True):
            for rows in arguments.rows:
                line = f"{name} {label} {shape.inputs} x {shape.outputs}, {rows} rows"
                rates = rates_of(ways, shape, dtype, rows, arguments.rounds)
                for way, spread in rates.items():
                    figures[f"{line}: {way}"] = spread, "GFLOP/s"
                shown = "  ".join(f"{way} {spread.median:7.1f}" for way, spread in rates.items())
                sys.stdout.write(f"{line:50} {shown}\n")
        if usable is None:
            sys.stdout.write(f"{name}: oneDNN has no products of blocks on this processor: own\n")
            continue
        bench = ProductBench(library, usable, dtype, shapes)
        choices = [choose(*bench.measure()) for _ in range(3)]
        figures[f"{name}: time of workloads with onednn / own"] = Spread.of([each.ratio for each in choices]), "ratio"
        chosen = ", ".join(f"{each.products.value} ({each.ratio:.3f})" for each in choices)
        sys.stdout.write(f"{name}: oneDNN is usable: {bench.agree()}; chosen, with onednn / own: {chosen}\n")
    return figures


def shapes_of(model: str) -> tuple[ProductShape, ...]:
    """Return the products of a layer; of a directory, config.json is enough."""
    import torch

    from services.worker.engine.checkpoints.opening import open_checkpoint, read_rope
    from services.worker.engine.kernels.cpu.products import layer_shapes
    from services.worker.engine.parallel.shards import shard_model

    load_format = "dummy" if Path(model).is_dir() else "auto"
    config = open_checkpoint(model, load_format, torch.device("cpu"), read_rope("")).config
    return layer_shapes(config, shard_model(config, 0, 1))


def prepared_ways(
    library: CpuLibrary, dtype: torch.dtype, threads: int, blocks: BlockFunctions | None
) -> dict[str, Prepare]:
    """Return the functions that lay out a weight, by the name of the way."""
    from services.worker.engine.kernels.cpu.kernels import CpuKernels
    from services.worker.engine.kernels.torch.kernels import PrepackedLinear, TorchLinear, can_prepack

    def own(weight: torch.Tensor) -> Linear:
        return CpuKernels(library, dtype, threads).linear(weight, None)

    def onednn(weight: torch.Tensor) -> Linear:
        return CpuKernels(library, dtype, threads, blocks).linear(weight, None)

    ways: dict[str, Prepare] = {"own": own}
    if blocks is not None:
        ways["onednn"] = onednn
    if can_prepack(dtype):
        ways["torch packed"] = lambda weight: PrepackedLinear(weight.to(dtype, copy=True), None)
    return ways | {"torch": lambda weight: TorchLinear(weight.to(dtype, copy=True), None)}


def rates_of(
    ways: dict[str, Prepare], shape: ProductShape, dtype: torch.dtype, rows: int, rounds: int
) -> dict[str, Spread]:
    """Return the GFLOP/s of each way."""
    import torch

    copies = max(1, min(MOST_COPIES, COLD_BYTES // (shape.inputs * shape.outputs * dtype.itemsize)))
    # Many rows are bound by computation.
    copies = copies if rows <= 64 else min(copies, 2)
    weight, inputs = torch.randn(shape.outputs, shape.inputs), torch.randn(rows, shape.inputs)
    products = {way: [prepare(weight) for _ in range(copies)] for way, prepare in ways.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for completed in range(rounds + 1):
        for way, layouts in products.items():
            # torch's own products take activations of the weights' type.
            given = inputs.to(dtype) if way.startswith("torch") else inputs
            started = time.perf_counter()
            for product in layouts:
                product(given)
            seconds = time.perf_counter() - started
            if completed:
                rates[way].append(2 * rows * shape.inputs * shape.outputs * copies / seconds / 1e9)
    return {way: Spread.of(values) for way, values in rates.items()}


def processor_name() -> str:
    """Return the name of the processor, with what it has for matrix products."""
    try:
        information = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown processor"
    fields = dict(re.findall(r"^(model name|cpu family|model|flags)\s*:\s*(.*)$", information, re.MULTILINE))
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    extensions = [each for each in wanted if each in fields.get("flags", "").split()]
    number = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name', 'unknown processor')} ({number}; {' '.join(extensions)})"


if __name__ == "__main__":
    sys.exit(main())
