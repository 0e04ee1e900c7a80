"""Times of what adapters add to a layer of a model's shape, with the engine's programs and with vLLM's.

`python -m deploy.evaluation.experiments.peers.lora_kernels deploy/evaluation/shapes/llama-3.1-8b --peer DIRECTORY`

vLLM's are imported from DIRECTORY, which contains its package `vllm`, or of that package `lora/ops/triton_ops` and what
these files import; without `--peer`, only the engine's are measured. Both run in this process, replayed as CUDA
graphs, on the same factors, which no cache holds. Each is compared with a float32 reference first.

Row i of a decode pass uses adapter i modulo their number, a prompt's tokens use each for as long. Times are those of
one layer's products: `alone` without their base products, one after the other and all together, and `added` as the
difference between a layer of products with adapters and without. Both include the activation of the feed-forward
layer, which one of the engine's programs applies to adapted products; in vLLM's layer it is the engine's own program.
`pass` is what is done once in a pass for all layers: the engine sorts its tokens in the graph, vLLM before it.

Without a GPU, set TRITON_INTERPRET=1: results are only compared then.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import linear, silu

from deploy.evaluation.experiments.peers.kernel_times import Report, checked, copies_of, microseconds, seconds_of
from services.worker.engine.adapters.active import AdaptedGatedLinear, AdaptedLinear
from services.worker.engine.adapters.sites import AdapterWeights, PartFactors, Site, SiteFactors, SitePart
from services.worker.engine.checkpoints.safetensors_directory import read_config
from services.worker.engine.model.config import Activation
from services.worker.engine.parallel.shards import shard_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.adapters.segmented import SegmentedAdapters

    # Of the engine's classes of products, or a function of inputs.
    Base = Any
    Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

GATED = "gate and up"
# Layers with base products, whose weights no cache holds.
LAYERS = 4
MODULES = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "attention output": ("o_proj",), GATED: ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}  # fmt: skip
# They are added to the sums of the layers before.
ADDED = ("attention output", "down")
# Rows of the largest pass that the engine captures.
MOST_CAPTURED = 256


@dataclass(frozen=True, slots=True)
class Product:
    """A product of a layer: matrices above each other with these numbers of rows, of which each has its own adapter."""

    name: str
    inputs: int
    parts: tuple[int, ...]

    @property
    def outputs(self) -> int:
        """Outputs of all parts."""
        return sum(self.parts)

    def factor_bytes(self, rank: int) -> int:
        """Bytes of an adapter's factors."""
        return 2 * rank * sum(self.inputs + outputs for outputs in self.parts)


@dataclass(frozen=True, slots=True)
class Factors:
    """All adapters' factors of a product: of each part `a` [adapters, rank, in] and `b` [adapters, outputs, rank]."""

    product: Product
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, product: Product, adapters: int, rank: int, like: torch.Tensor, seed: int) -> Factors:
        """Return random ones of the type and on the device of `like`."""
        generator = torch.Generator(like.device).manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=like.device)
            return values.mul_(shape[-1] ** -0.5).to(like.dtype)

        return cls(
            product,
            tuple(drawn(adapters, rank, product.inputs) for _ in product.parts),
            tuple(drawn(adapters, outputs, rank) for outputs in product.parts),
        )

    def reference(self, inputs: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        """Return the products [rows, outputs] float32 of inputs [rows, in]; row i uses the adapter used[i]."""
        found = inputs.new_zeros(len(inputs), self.product.outputs, dtype=torch.float32)
        for adapter in torch.unique(used).tolist():
            rows = torch.nonzero(used == adapter)[:, 0]
            given = inputs[rows].float()
            pairs = zip(self.a, self.b, strict=True)
            found[rows] = torch.cat(
                [linear(linear(given, a[adapter].float()), b[adapter].float()) for a, b in pairs], dim=1
            )
        return found


class GivenSums:
    """Stands for a base product: it returns the same tensor each time, without computing it."""

    def __init__(self, sums: torch.Tensor) -> None:
        """Return `sums`."""
        self._sums = sums

    def __call__(self, _inputs: torch.Tensor, _outputs: torch.Tensor | None = None) -> torch.Tensor:
        return self._sums

    def add_to(self, inputs: torch.Tensor, sums: torch.Tensor) -> None:
        """Add nothing."""

    def halves(self, _inputs: torch.Tensor) -> torch.Tensor:
        """Return it as both halves of a gated product."""
        return self._sums


class AdapterWay(Protocol):
    """Products of adapters, and of layers with them, of one implementation."""

    label: str

    def use(self, slots: torch.Tensor) -> None:
        """Set the adapter of each row, [rows] int64."""

    def pass_us(self, slots: torch.Tensor, seconds: float) -> float:
        """Return the microseconds of `use`, which each pass begins with; it takes effect."""

    def base(self, product: Product, weight: torch.Tensor) -> Base:
        """Return a product with weight [out, in] without adapters."""

    def plain(self, product: Product, base: Base) -> Call:
        """Return a function from inputs, and the sums that some products are added to, to the result."""

    def adapted(self, layer: int, number: int, base: Base) -> Call:
        """Return the same of the layer's product with this number, with what the adapters add."""


class EngineWay:
    """The engine's products of adapters, as its workers use them."""

    label = "pando"

    def __init__(self, layers: Sequence[Sequence[Factors]], slots: int) -> None:
        """Load `slots` adapters of some layers."""
        self._layers = layers
        self._adapters = _engine_adapters(slots, layers[0][0].a[0].device)
        self._sites = [[_site(each.product, number) for each in layer] for number, layer in enumerate(layers)]
        self._adapters.sites += [site for layer in self._sites for site in layer]
        for slot in range(slots):
            sites = {
                site.name: _of_slot(factors, slot)
                for own, layer in zip(self._sites, layers, strict=True)
                for site, factors in zip(own, layer, strict=True)
            }
            self._adapters.put(slot, AdapterWeights(f"{slot}", layers[0][0].a[0].shape[1], sites, None))

    def use(self, slots: torch.Tensor) -> None:
        """Set the adapter of each row."""
        self._adapters.use(slots.int())

    def pass_us(self, slots: torch.Tensor, seconds: float) -> float:
        """Return the microseconds that a pass begins with, in its graph."""
        given = slots.int()
        found = 1e6 * seconds_of(lambda: self._adapters.use(given), seconds)
        self.use(slots)
        return found

    def base(self, product: Product, weight: torch.Tensor) -> Base:
        """Return the engine's own product."""
        # Only here: Triton is needed.
        from services.worker.engine.kernels.gpu.kernels import GpuGatedLinear, GpuLinear

        return GpuGatedLinear(weight, None, Activation.SILU) if product.name == GATED else GpuLinear(weight, None)

    def plain(self, product: Product, base: Base) -> Call:
        """Return the product as the engine's layers call it."""
        return _called(base, adds=product.name in ADDED)

    def adapted(self, layer: int, number: int, base: Base) -> Call:
        """Return the product with adapters as the engine's layers call it."""
        product, site = self._layers[layer][number].product, self._sites[layer][number]
        if product.name == GATED:
            return _called(AdaptedGatedLinear(base, site, Activation.SILU, self._adapters), adds=False)
        return _called(AdaptedLinear(base, site, self._adapters), adds=product.name in ADDED)


def _engine_adapters(slots: int, device: torch.device) -> SegmentedAdapters:
    # Only here: Triton is needed.
    from services.worker.engine.adapters.segmented import SegmentedAdapters

    class Adapters(SegmentedAdapters):
        """The engine runs passes of more rows outside of CUDA graphs, with buffers of other sizes."""

        def use(self, slots: torch.Tensor | None) -> None:
            self._is_long = slots is not None and len(slots) > MOST_CAPTURED
            super().use(slots)

        def _is_capturing(self) -> bool:
            return super()._is_capturing() and not self._is_long

    return Adapters(slots, device)


def _called(product: Any, *, adds: bool) -> Call:
    """Return a call of a product of the engine, which `adds` to sums or returns its own."""

    def call(inputs: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        if not adds:
            return product(inputs)  # type: ignore[no-any-return]  # of any of four classes
        product.add_to(inputs, sums)
        return sums

    return call


def _site(product: Product, layer: int) -> Site:
    parts = (SitePart(f"model.layers.{layer}.{module}", slice(None)) for module in MODULES[product.name])
    return Site(tuple(parts))


def _of_slot(factors: Factors, slot: int) -> SiteFactors:
    parts, first, ranks = [], 0, 0
    for b in factors.b:
        parts.append(PartFactors(first, slice(ranks, ranks + b.shape[2]), b[slot]))
        first, ranks = first + b.shape[1], ranks + b.shape[2]
    return SiteFactors(torch.cat([a[slot] for a in factors.a]), tuple(parts))


class PeerWay:
    """vLLM's products of adapters, with the calls that its `PunicaWrapperGPU` and its layers make."""

    def __init__(self, directory: Path, layers: Sequence[Sequence[Factors]], slots: int, most_rows: int) -> None:
        """Use what is in `directory` for passes of up to `most_rows`.

        Raises:
            SystemExit: nothing can be imported from there.
        """
        self._shrink, self._expand, metadata, self.label = peer_programs(directory)
        forget_addresses()
        self._layers = layers
        self._meta = metadata.make(slots, most_rows, device=layers[0][0].a[0].device)

    def use(self, slots: torch.Tensor) -> None:
        """Set the adapter of each row."""
        self._meta.prepare_tensors(slots)

    def pass_us(self, slots: torch.Tensor, seconds: float) -> float:
        """Return the microseconds that a pass begins with; it waits for the GPU, so no graph can contain it."""
        found: list[float] = []
        end = time.perf_counter() + seconds
        while len(found) < 3 or time.perf_counter() < end:
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.use(slots)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return 1e6 * statistics.median(found)

    def base(self, _product: Product, weight: torch.Tensor) -> Base:
        """Return torch's product."""
        return partial(linear, weight=weight)

    def plain(self, product: Product, base: Base) -> Call:
        """Return the product, and the activation."""
        # Only here: Triton is needed.
        from services.worker.engine.kernels.gpu.elementwise import gate

        def call(inputs: torch.Tensor, _sums: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = base(inputs)
            return gate(result, Activation.SILU) if product.name == GATED else result

        return call

    def adapted(self, layer: int, number: int, base: Base) -> Call:
        """Return the product with adapters, and the activation."""
        factors = self._layers[layer][number]
        a, b = ([each[:, None] for each in side] for side in (factors.a, factors.b))
        rank = a[0].shape[2]

        def adapted_base(inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = base(inputs)
            shrunk = torch.empty(len(a), len(inputs), rank, dtype=torch.float32, device=inputs.device)
            metadata = self._meta.meta_args(len(inputs), specialize_active_lora=False)
            self._shrink(inputs, a, shrunk, *metadata, 1.0)
            self._expand(shrunk, b, result, *metadata, offset_start=0, add_inputs=True)
            return result

        return self.plain(factors.product, adapted_base)


def peer_programs(directory: Path) -> tuple[Any, Any, Any, str]:
    """Return vLLM's shrinking and expanding functions, its class of their metadata, and its name and version.

    Raises:
        SystemExit: nothing can be imported from `directory`.
    """
    sys.path.insert(0, str(directory.absolute()))
    try:
        shrinking, expanding, metadata = (
            importlib.import_module(f"vllm.lora.ops.triton_ops.{name}")
            for name in ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata")
        )
        version = importlib.import_module("vllm").__version__
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{directory}: cannot import vLLM's programs of adapters from there: {error}") from error
    return shrinking.lora_shrink, expanding.lora_expand, metadata.LoRAKernelMeta, f"vllm {version}"


def forget_addresses() -> None:
    """Empty vLLM's tables of factors, in which addresses are keys, so that other factors can have the same address."""
    tables = importlib.import_module("vllm.lora.ops.triton_ops.utils")
    for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT"):
        getattr(tables, name).clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and measure; print and write figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json")
    parser.add_argument("--peer", type=Path, help="directory from which vLLM's programs can be imported")
    parser.add_argument("--rank", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64], help="(1 8 64)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="of decode passes (1 64 256)")
    parser.add_argument("--prompt", type=int, nargs="+", default=[4096], help="tokens of passes of a prompt (4096)")
    parser.add_argument("--seconds", type=float, default=0.2, help="of replays of each figure (%(default)s)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    is_timed = torch.cuda.is_available()
    if not is_timed and os.environ.get("TRITON_INTERPRET", "0") == "0":
        raise SystemExit("there is no GPU; with TRITON_INTERPRET=1, results are compared without one")
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16) if is_timed else torch.empty(0, dtype=torch.float16)
    report = Report("lora_kernels", arguments.model.name, arguments.json)
    products = products_of(arguments.model)
    smallest = min(product.factor_bytes(arguments.rank) for product in products)
    with torch.inference_mode():
        for count in arguments.adapters:
            copies = copies_of(count * smallest) if is_timed else 1
            layers = [
                [
                    Factors.random(product, count, arguments.rank, like, 4 * layer + number)
                    for number, product in enumerate(products)
                ]
                for layer in range(copies)
            ]
            most_rows = max(*arguments.rows, *arguments.prompt, 1)
            ways: list[AdapterWay] = [EngineWay(layers, count)]
            if arguments.peer is not None:
                ways.append(PeerWay(arguments.peer, layers, count, most_rows))
            measurement = AdapterMeasurement(layers, ways, report, arguments.seconds)
            passes = [(rows, torch.arange(rows, device=like.device) % count) for rows in arguments.rows]
            passes += [(rows, torch.arange(rows, device=like.device) * count // rows) for rows in arguments.prompt]
            for rows, used in passes:
                measurement.compare(f"{count} adapters, {rows} rows", used)
                if is_timed:
                    measurement.measure(f"{count} adapters, {rows} rows", used)


@dataclass(frozen=True, slots=True)
class AdapterMeasurement:
    """Measures several ways on the same factors."""

    layers: Sequence[Sequence[Factors]]
    ways: Sequence[AdapterWay]
    report: Report
    seconds: float

    def compare(self, title: str, used: torch.Tensor) -> None:
        """Report the errors of each way in one layer whose rows use the adapters `used` [rows] int64.

        Raises:
            SystemExit: one is too large.
        """
        for number, factors in enumerate(self.layers[0]):
            product = factors.product
            inputs = self._drawn(len(used), product.inputs)
            reference = factors.reference(inputs, used)
            if product.name == GATED:
                gate, up = reference.chunk(2, dim=1)
                reference = silu(gate) * up
            for way in self.ways:
                way.use(used)
                sums = inputs.new_zeros(len(used), product.outputs)
                result = way.adapted(0, number, GivenSums(sums))(inputs, sums)
                error = checked(f"{title}, {product.name}: {way.label}", result, reference)
                self.report.add(way.label, f"{title}: {product.name}, error", 100 * error, "%")

    def measure(self, title: str, used: torch.Tensor) -> None:
        """Report the times of each way in passes whose rows use the adapters `used` [rows] int64."""
        rows = len(used)
        inputs = [self._drawn(rows, factors.product.inputs) for factors in self.layers[0]]
        sums = [self._drawn(rows, factors.product.outputs) for factors in self.layers[0]]
        for way in self.ways:
            self.report.add(way.label, f"{title}: pass", way.pass_us(used, self.seconds), "us")
            calls = [
                [
                    partial(way.adapted(layer, number, GivenSums(own)), given, own)
                    for number, (given, own) in enumerate(zip(inputs, sums, strict=True))
                ]
                for layer in range(len(self.layers))
            ]
            for number, factors in enumerate(self.layers[0]):
                found = microseconds([each[number] for each in calls], self.seconds)
                self.report.add(way.label, f"{title}: {factors.product.name} alone", found, "us")
            found = microseconds([partial(_each, each) for each in calls], self.seconds)
            self.report.add(way.label, f"{title}: layer alone", found, "us")
            self._measure_layers(title, way, inputs, sums)

    def _measure_layers(
        self, title: str, way: AdapterWay, inputs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
    ) -> None:
        plain, adapted = [], []
        for layer in range(min(LAYERS, len(self.layers))):
            bases = [
                way.base(product, self._drawn(product.outputs, product.inputs).mul_(product.inputs**-0.5))
                for product in (factors.product for factors in self.layers[layer])
            ]
            chosen = [way.plain(factors.product, base) for factors, base in zip(self.layers[layer], bases, strict=True)]
            plain.append(partial(_layer, chosen, inputs, sums))
            chosen = [way.adapted(layer, number, base) for number, base in enumerate(bases)]
            adapted.append(partial(_layer, chosen, inputs, sums))
        without, with_adapters = microseconds(plain, self.seconds), microseconds(adapted, self.seconds)
        self.report.add(way.label, f"{title}: layer without adapters", without, "us")
        self.report.add(way.label, f"{title}: layer, added", with_adapters - without, "us")

    def _drawn(self, *shape: int) -> torch.Tensor:
        like = self.layers[0][0].a[0]
        return torch.randn(shape, device=like.device).to(like.dtype)


def _each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _layer(products: Sequence[Call], inputs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> None:
    """Compute the products of a layer: the last two one from the other, as what they read was just written then."""
    first, second, third, fourth = products
    first(inputs[0], sums[0])
    second(inputs[1], sums[1])
    fourth(third(inputs[2], sums[2]), sums[3])


def products_of(shape: Path) -> list[Product]:
    """Return the products of a layer of the model whose config.json is in `shape`."""
    config = read_config(shape)
    shard = shard_model(config, 0, 1)
    queries, keys = (len(heads) * config.head_dim for heads in (shard.query_heads, shard.kv_heads))
    hidden, columns = config.hidden_size, len(shard.intermediate)
    return [
        Product("qkv", hidden, (queries, keys, keys)),
        Product("attention output", queries, (hidden,)),
        Product(GATED, hidden, (columns, columns)),
        Product("down", columns, (hidden,)),
    ]


if __name__ == "__main__":
    main()
