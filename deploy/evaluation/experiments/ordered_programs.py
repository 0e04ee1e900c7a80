"""Times of the programs of deterministic mode on a GPU, with each tile that could be taken, beside the usual ones.

    python -m deploy.evaluation.experiments.ordered_programs deploy/evaluation/shapes/llama-3.1-8b --tokens 1 256 8192

Products are those of one layer and of the head; every tile must give the same bits, or the command fails. Attention is
that of rows with some 1,100 keys that decode, and of prompts. Weights and pages are more than caches hold.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import linear

from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from services.worker.engine.kernels.gpu.attention import GpuAttention
from services.worker.engine.kernels.gpu.backend import GpuBackend
from services.worker.engine.kernels.gpu.ordered_attention import OrderedAttention, OrderedTuning, QueryTile
from services.worker.engine.kernels.gpu.ordered_product import OrderedMatrix, OrderedTile, ordered_tile
from services.worker.engine.kernels.interface import AttentionShape, KvLayer
from services.worker.engine.model.batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TILES: Final = (
    OrderedTile(64, 32, 128, 4, 6),
    OrderedTile(64, 64, 128, 4, 4),
    OrderedTile(64, 64, 64, 4, 6),
    OrderedTile(64, 128, 64, 4, 4),
    OrderedTile(64, 128, 128, 4, 3),
    OrderedTile(64, 256, 64, 4, 4),
    OrderedTile(128, 64, 64, 4, 4),
    OrderedTile(128, 128, 64, 4, 3),
    OrderedTile(128, 128, 64, 8, 3),
    OrderedTile(128, 128, 64, 8, 4),
    OrderedTile(128, 256, 64, 8, 3),
    OrderedTile(128, 256, 64, 8, 4),
    OrderedTile(256, 128, 64, 8, 3),
)
# From here on small tiles are too slow to be worth a try.
MANY_TOKENS = 1024
DECODE: Final = (
    QueryTile(16, 2, 3),
    QueryTile(16, 4, 3),
    QueryTile(16, 1, 3),
    QueryTile(16, 2, 4),
    QueryTile(16, 4, 4),
)
CHUNK: Final = (QueryTile(32, 4, 3), QueryTile(32, 4, 2), QueryTile(16, 4, 3), QueryTile(32, 2, 3), QueryTile(16, 2, 3))
PAGE_SIZE = 16
# Bytes of copies that are read in turn: several times what the device's cache holds.
ROTATED_BYTES = 256 * 1024**2
LAUNCHES = 10
DEVICE = torch.device("cuda")


def microseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Return the time of one of `runs`, of which LAUNCHES are captured in turn: the shortest of five replays."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            runs[i % len(runs)]()
    times = []
    for _ in range(6):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1e3 * float(begun.elapsed_time(ended)) / LAUNCHES)
    return min(times[1:])


def product_shapes(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a layer's matrices, and of the head."""
    hidden, head_dim = shape["hidden_size"], shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    queries, pairs = shape["num_attention_heads"] * head_dim, 2 * shape["num_key_value_heads"] * head_dim
    return {
        "qkv": (queries + pairs, hidden),
        "attention output": (hidden, queries),
        "gate and up": (2 * shape["intermediate_size"], hidden),
        "down": (hidden, shape["intermediate_size"]),
        "head": (shape["vocab_size"], hidden),
    }


def measure_products(sheet: ResultSheet, shape: dict[str, int], counts: Sequence[int]) -> bool:
    """Time products; return whether all tiles gave the same bits."""
    agree = True
    for name, (outputs, width) in product_shapes(shape).items():
        copies = max(1, min(8, ROTATED_BYTES // (2 * outputs * width)))
        weights = [torch.randn(outputs, width, device=DEVICE, dtype=torch.bfloat16) / 50 for _ in range(copies)]
        matrices = [OrderedMatrix(weight) for weight in weights]
        for tokens in counts:
            if name == "head" and tokens > MANY_TOKENS:
                continue
            inputs = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16)
            results = torch.empty(tokens, outputs, device=DEVICE, dtype=torch.bfloat16)
            usual = microseconds([partial(linear, inputs, weight) for weight in weights])
            expected, times = linear(inputs, weights[0]), {}
            matrices[0].write(inputs, None, results)
            bits = results.clone()
            error = float((bits.float() - expected.float()).norm() / expected.float().norm())
            for tile in dict.fromkeys((ordered_tile(tokens, outputs), *TILES)):
                if tokens >= MANY_TOKENS and tile.rows * tile.columns < 128 * 128:
                    continue
                try:
                    results.fill_(torch.nan)
                    matrices[0].write(inputs, None, results, tile=tile)
                    same = torch.equal(results, bits)
                    agree &= same
                    runs = [partial(matrix.write, inputs, None, results, tile=tile) for matrix in matrices]
                    times[tile] = microseconds(runs)
                except Exception as error_of_tile:  # noqa: BLE001  (a tile may need more of the device than it has)
                    sys.stdout.write(f"{name} {tokens} {text(tile)}: {type(error_of_tile).__name__} {error_of_tile}\n")
                    continue
                if not same:
                    sys.stdout.write(f"{name} {tokens} {text(tile)}: OTHER BITS\n")
            chosen = ordered_tile(tokens, outputs)
            best = sorted(times, key=lambda tile: times[tile])[:5]
            sys.stdout.write(
                f"{name} {outputs}x{width}, {tokens} tokens: usual {usual:.1f} us, chosen {text(chosen)} "
                f"{times.get(chosen, float('nan')):.1f} us, error {error:.1e}; "
                + ", ".join(f"{text(tile)} {times[tile]:.1f}" for tile in best)
                + "\n"
            )
            sys.stdout.flush()
            sheet.add(f"{name}, {tokens} tokens, usual", usual, "us")
            for tile, time in times.items():
                sheet.add(f"{name}, {tokens} tokens, {text(tile)}", time, "us")
        del weights, matrices
    return agree


def text(tile: OrderedTile) -> str:
    """Return a tile in short."""
    return f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"


def batch_of(rows: int, old: int, new: int) -> ForwardBatch:
    """Return `rows` rows of `new` tokens after `old` ones, on pages that are scattered."""
    length = old + new
    pages = -(-length // PAGE_SIZE)
    table = torch.randperm(rows * pages, device=DEVICE).view(rows, pages)
    places = torch.arange(old, length, device=DEVICE)
    slots = table[:, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
    return ForwardBatch(
        token_ids=torch.zeros(rows * new, dtype=torch.int64, device=DEVICE), positions=places.repeat(rows),
        query_starts=torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=DEVICE),
        key_lengths=torch.full((rows,), length, dtype=torch.int32, device=DEVICE), page_table=table.int(),
        write_slots=slots.flatten(), sample_indices=torch.arange(1, device=DEVICE),
        decode_rows=rows if new == 1 else 0, max_query_length=new, max_key_length=length,
    )  # fmt: skip


def measure_attention(sheet: ResultSheet, shape: dict[str, int]) -> bool:
    """Time attention; return whether all tiles gave the same bits."""
    head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    heads = AttentionShape(shape["num_attention_heads"], shape["num_key_value_heads"], head_dim, PAGE_SIZE)
    angles = torch.rand(20_000, head_dim, device=DEVICE)
    usual = GpuBackend(torch.bfloat16, DEVICE, 256).attention(heads, angles)
    assert isinstance(usual, GpuAttention)
    agree = True
    for rows, old, new in (
        (256, 1099, 1), (64, 1099, 1), (16, 1099, 1), (1, 1099, 1), (1, 4000, 1), (16, 0, 560), (1, 0, 1024),
        (1, 0, 8192), (1, 4000, 8),
    ):  # fmt: skip
        batch = batch_of(rows, old, new)
        size = (int(batch.page_table.numel()), heads.kv_heads, PAGE_SIZE, head_dim)
        layers = [
            KvLayer(*(torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
            for _ in range(max(1, min(4, ROTATED_BYTES // (4 * size[0] * heads.kv_width * PAGE_SIZE))))
        ]
        queries = torch.randn(rows * new, heads.query_width, device=DEVICE, dtype=torch.bfloat16)
        label = f"attention of {rows} rows, {new} tokens after {old}"
        if new == 1:
            time = microseconds([partial(usual.attend, queries, layer, batch) for layer in layers])
        else:
            time = eager_microseconds(partial(usual.attend, queries, layers[0], batch))
        sheet.add(f"{label}, usual", time, "us")
        line, bits = f"{label}: usual {time:.1f} us", None
        for tile in DECODE if new == 1 else CHUNK:
            tuning = replace(OrderedTuning(), decode=tile) if new == 1 else replace(OrderedTuning(), chunk=tile)
            attention = OrderedAttention(heads, angles, 256, tuning)
            outputs = attention.attend(queries, layers[0], batch)
            bits = outputs if bits is None else bits
            agree &= torch.equal(outputs, bits)
            time = microseconds([partial(attention.attend, queries, layer, batch) for layer in layers])
            name = f"{tile.height} w{tile.warps} s{tile.stages}"
            line += f", {name} {time:.1f}{'' if torch.equal(outputs, bits) else ' OTHER BITS'}"
            sheet.add(f"{label}, {name}", time, "us")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return agree


def eager_microseconds(run: Callable[[], object]) -> float:
    """Return the time of `run`, which cannot be captured: the shortest of five."""
    times = []
    for _ in range(6):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(LAUNCHES):
            run()
        ended.record()
        ended.synchronize()
        times.append(1e3 * float(begun.elapsed_time(ended)) / LAUNCHES)
    return min(times[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 1 if tiles differ in a bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 8192], help="of products")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results into the list in FILE")
    arguments = parser.parse_args(argv)
    shape = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    command = shlex.join(["python", "-m", "deploy.evaluation.experiments.ordered_programs", *(argv or sys.argv[1:])])
    name = f"{arguments.model.name} (dummy)"
    sheet = ResultSheet("ordered-programs", name, 1, replace(Provenance.collect(()), command=command))
    with torch.inference_mode():
        agree = measure_attention(sheet, shape)
        agree &= measure_products(sheet, shape, arguments.tokens)
    if arguments.json is not None:
        write_results(arguments.json, sheet.results)
    sys.stdout.write("all tiles give the same bits\n" if agree else "TILES DIFFER\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
