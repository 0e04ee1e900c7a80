"""The choice between two ways of computing products on CPUs: the operators' own tiles, and oneDNN's blocks.

Both read the same panels, and one way serves all numbers of rows of a model: their sums differ in the last bits, and
what a token gets must not depend on what it is batched with, or on how much of its prefix was cached. Which way is
faster is measured when a model is first loaded, and kept on disk, so that a worker that restarts has the same bits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from services.worker.engine.kernels.cpu.build import processor_identity
from services.worker.engine.kernels.cpu.kernels import CpuKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.interface import Linear
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import ModelShard

    Clock = Callable[[], float]
    # Seconds of the products of one layer, for each number of rows in MEASURED_ROWS.
    LayerSeconds = Mapping[int, float]

log = logging.getLogger(__name__)

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
# Requests that run at the same time, in the workloads for which the faster way is chosen.
STREAMS = (1, 8, 32)
MEASURED_ROWS = (*STREAMS, PROMPT_TOKENS)
# oneDNN has to be this much faster, so that noise does not decide between equals: with float32, both come close to what
# the processor can do, and differ by 5 % in either direction.
_WORTH_CHANGING = 0.85
# Smaller layers are not measured, and of larger matrices only a part of the outputs is.
_FEWEST_WEIGHTS, _MOST_WEIGHTS = 1024**2, 4 * 1024**2
# Weights that are read in turn: more than the caches next to the cores hold.
_COLD_BYTES = 32 * 1024**2
_ROUNDS, _FEWEST_ROUNDS = 7, 2
_BUDGET_SECONDS = 1.0


class Products(Enum):
    """Ways of computing products, by the names that the setting `worker.products` and the worker's state use."""

    OWN = "own"
    ONEDNN = "onednn"


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A matrix of a layer on this rank."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The chosen way, and the measurement that it follows from."""

    products: Products
    own: LayerSeconds
    onednn: LayerSeconds

    @property
    def ratio(self) -> float:
        """Time of the workloads with oneDNN's products, over the time with the operators' own."""
        return workload_ratio(self.own, self.onednn)


def layer_shapes(config: ModelConfig, shard: ModelShard) -> tuple[ProductShape, ...]:
    """Return the matrices of a decoder layer on this rank; of experts, those of one."""
    queries, keys = (len(heads) * config.head_dim for heads in (shard.query_heads, shard.kv_heads))
    columns = len(shard.intermediate)
    shapes = (
        ProductShape(config.hidden_size, queries + 2 * keys),
        ProductShape(queries, config.hidden_size),
        ProductShape(config.hidden_size, 2 * columns),
        ProductShape(columns, config.hidden_size),
    )
    return tuple(shape for shape in shapes if shape.inputs and shape.outputs)


def are_worth_measuring(shapes: Sequence[ProductShape]) -> bool:
    """Return whether products take most of a pass; in smaller layers, calls and waiting do."""
    return sum(shape.inputs * shape.outputs for shape in shapes) >= _FEWEST_WEIGHTS


def workload_ratio(own: LayerSeconds, onednn: LayerSeconds) -> float:
    """Return the geometric mean of onednn / own over the workloads: some streams of prompts, then their outputs."""

    def seconds(layer: LayerSeconds, streams: int) -> float:
        return streams * layer[PROMPT_TOKENS] + OUTPUT_TOKENS * layer[streams]

    return math.exp(sum(math.log(seconds(onednn, n) / seconds(own, n)) for n in STREAMS) / len(STREAMS))


def choose(own: LayerSeconds, onednn: LayerSeconds) -> ProductChoice:
    """Return the faster way; the operators' own if there is little between them."""
    is_worth = workload_ratio(own, onednn) < _WORTH_CHANGING
    return ProductChoice(Products.ONEDNN if is_worth else Products.OWN, own, onednn)


class Bench(Protocol):
    """Measures both ways."""

    def measure(self) -> tuple[LayerSeconds, LayerSeconds]:
        """Return the seconds of a layer's products, the operators' own and oneDNN's."""
        ...


class ProductBench:
    """Products of both ways with the shapes of one model, to be checked and measured, on one thread."""

    def __init__(
        self, library: CpuLibrary, blocks: BlockFunctions, dtype: torch.dtype, shapes: Sequence[ProductShape]
    ) -> None:
        """Multiply weights of `dtype`."""
        self._kernels = {
            Products.OWN: CpuKernels(library, dtype, threads=1),
            Products.ONEDNN: CpuKernels(library, dtype, threads=1, blocks=blocks),
        }
        self._dtype = dtype
        self._shapes = shapes
        # So many panels that rows are not cut up, and one that is not full.
        self._checked_outputs = 4 * library.panel + 2

    def agree(self) -> bool:
        """Return whether oneDNN's products are as exact as the others, and the same bits in any batch."""
        generator = torch.Generator().manual_seed(0)
        for width in sorted({shape.inputs for shape in self._shapes}):
            inputs = torch.randn(_PARTS[-1][1], width, generator=generator)
            weight = torch.randn(self._checked_outputs, width, generator=generator)
            products = {way: kernels.linear(weight, None) for way, kernels in self._kernels.items()}
            exact = _rounded(inputs, self._dtype) @ _rounded(weight, self._dtype).T
            own, onednn = (products[way](inputs) for way in (Products.OWN, Products.ONEDNN))
            if (onednn - exact).abs().max() > 4 * (own - exact).abs().max() + 1e-6 * width**0.5:
                return False
            alone = [products[Products.ONEDNN](inputs[first:last]) for first, last in _PARTS]
            if not torch.equal(torch.cat(alone), onednn):
                return False
        return True

    def measure(self, clock: Clock = time.perf_counter) -> tuple[LayerSeconds, LayerSeconds]:
        """Return the seconds of a layer's products, the operators' own and oneDNN's; takes up to a second or two."""
        layer_bytes = sum(min(shape.inputs * shape.outputs, _MOST_WEIGHTS) for shape in self._shapes)
        copies = max(1, min(8, _COLD_BYTES // (layer_bytes * self._dtype.itemsize)))
        ways = {way: self._layers(kernels, copies) for way, kernels in self._kernels.items()}
        best = {way: {rows: [math.inf] * len(self._shapes) for rows in MEASURED_ROWS} for way in ways}
        started = clock()
        # Ways take turns, so that other load on the machine affects both. A product's shortest time counts, the one
        # without interruptions; a single thread waits for no other, which may be interrupted, too.
        for completed in range(_ROUNDS):
            if completed >= _FEWEST_ROUNDS and clock() - started > _BUDGET_SECONDS:
                break
            for rows in MEASURED_ROWS:
                for way, layers in ways.items():
                    # Many rows are bound by computation, for which one copy will do.
                    for layer in layers[:1] if rows == PROMPT_TOKENS else layers:
                        found = self._times(layer, rows, clock)
                        best[way][rows] = list(map(min, best[way][rows], found))
        own, onednn = ({rows: sum(times) for rows, times in best[way].items()} for way in Products)
        return own, onednn

    def _layers(self, kernels: CpuKernels, copies: int) -> list[list[Linear]]:
        layers = []
        for _ in range(copies):
            weights = (torch.full((self._outputs(shape), shape.inputs), 0.5) for shape in self._shapes)
            layers.append([kernels.linear(weight, None) for weight in weights])
        return layers

    def _outputs(self, shape: ProductShape) -> int:
        return min(shape.outputs, max(1, _MOST_WEIGHTS // shape.inputs))

    def _times(self, layer: list[Linear], rows: int, clock: Clock) -> list[float]:
        """Return the seconds of each product; where a matrix was cut, extrapolated to all of its outputs."""
        found = []
        for shape, product in zip(self._shapes, layer, strict=True):
            inputs = torch.ones(rows, shape.inputs)
            started = clock()
            product(inputs)
            found.append((clock() - started) * shape.outputs / self._outputs(shape))
        return found


# Rows that are computed by themselves. All 95 together are blocks of 64, 16 and 15 rows.
_PARTS = ((0, 1), (1, 8), (8, 25), (25, 31), (31, 95))


def _rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return numbers.to(dtype).double()


class ChoiceStore:
    """Choices on disk, by the processor, the versions and the shapes for which they were measured."""

    def __init__(self, directory: Path) -> None:
        """Keep files in `directory`, which is made when it is needed."""
        self._directory = directory

    def read(self, key: str) -> ProductChoice | None:
        """Return the choice for `key`; None if there is none, or it cannot be read."""
        try:
            kept = json.loads(self._path(key).read_text(encoding="utf-8"))
            own, onednn = ({int(rows): float(s) for rows, s in kept[way].items()} for way in ("own", "onednn"))
            return ProductChoice(Products(kept["products"]), own, onednn)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, key: str, choice: ProductChoice) -> None:
        """Keep `choice`; where the directory cannot be written to, a log line says so."""
        content = json.dumps({**asdict(choice), "products": choice.products.value}, indent=2)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Ranks that start together may write at the same time: each puts a complete file in place.
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=self._directory, delete=False) as file:
                file.write(content)
            Path(file.name).replace(self._path(key))
        except OSError as error:
            log.warning("The choice of products is not kept, and is measured again at the next start: %s", error)

    def _path(self, key: str) -> Path:
        return self._directory / f"products-{key}.json"


def choice_key(library: CpuLibrary, dtype: torch.dtype, shapes: Sequence[ProductShape]) -> str:
    """Return a key of all that a measurement depends on, without the number of threads: bits do not depend on it."""
    parts = (
        processor_identity(), torch.__version__, os.environ.get("ONEDNN_MAX_CPU_ISA", ""), library.digest, str(dtype),
        str(sorted((shape.inputs, shape.outputs) for shape in shapes)),
    )  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def measured_choice(bench: Bench, store: ChoiceStore, key: str) -> ProductChoice:
    """Return the choice that is kept for `key`; otherwise measure, and keep the choice."""
    kept = store.read(key)
    if kept is not None:
        _log(kept, "kept")
        return kept
    choice = choose(*bench.measure())
    store.write(key, choice)
    _log(choice, "measured")
    return choice


def _log(choice: ProductChoice, origin: str) -> None:
    speedups = " ".join(f"{rows}:{choice.own[rows] / choice.onednn[rows]:.2f}" for rows in MEASURED_ROWS)
    log.info("products.chosen products=%s origin=%s onednn_speedup_by_rows=%s", choice.products.value, origin, speedups)
