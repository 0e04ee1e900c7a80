"""The choice of device, number types and kernels: every "auto" of the engine is resolved here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common import host
from common.errors import ConfigurationError
from services.worker.engine.adapters.active import GroupedAdapters
from services.worker.engine.host_memory import keep_freed_memory
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.kernels.cpu.build import BuildError, build_library, cache_directory, find_openmp
from services.worker.engine.kernels.cpu.library import CpuLibrary
from services.worker.engine.kernels.cpu.onednn import find_block_functions
from services.worker.engine.kernels.cpu.prebuilt import find_prebuilt
from services.worker.engine.kernels.cpu.products import (
    ChoiceStore,
    ProductBench,
    Products,
    are_worth_measuring,
    choice_key,
    measured_choice,
)
from services.worker.engine.kernels.gpu.libraries import has_triton
from services.worker.engine.kernels.torch.backend import TorchBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.steps import EngineSpec
    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.host_tier.nixl_agents import NixlAgents
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.cpu.products import ProductShape
    from services.worker.engine.kernels.interface import AttentionShape, KernelBackend
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.group import RankGroup

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Types of the KV pool; `fp8` is short for e4m3.
KV_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
_FIRST_FLOAT8_CAPABILITY = (8, 9)
# Freed host memory that a worker with a GPU keeps.
_KEPT_BYTES = 256 * 1024**2
BACKENDS = ("auto", "torch", "compiled", "gpu")
PRODUCTS = ("auto", *(way.value for way in Products))


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The settings of this host; the scheduler sends the `EngineSpec`."""

    device: str = "auto"
    """auto, cpu or cuda; auto takes the GPU if there is one."""
    device_index: int = 0
    threads: int = 0
    """CPU threads; 0: the cores this process may use, shared out among ranks that meet on this host."""
    backend: str = "auto"
    """auto, torch, compiled or gpu; auto compiles operators for CPUs, and takes Triton and FlashInfer on GPUs."""
    products: str = "auto"
    """auto, own or onednn; of compiled operators, auto takes what was measured to be faster."""
    graphs: bool = True
    """Whether passes on GPUs are captured as CUDA graphs; without, they run program by program, for comparison."""
    takes_turns: bool = False
    """Whether other models share the device, so that this one will sleep again each time it has woken."""
    nixl: NixlAgents | None = None
    """Reads pages of other groups, and lends them; None: CUDA IPC does on GPUs of one host, and gRPC elsewhere."""


def select_device(options: RunnerOptions) -> torch.device:
    """Return the device to run on.

    Raises:
        ConfigurationError: CUDA was asked for and is not there, or the name is unknown.
    """
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ConfigurationError("device=cuda, but torch sees no CUDA device; install a CUDA build of torch or use cpu")
    match options.device:
        case "cpu":
            return torch.device("cpu")
        case "auto" | "cuda":
            return torch.device("cuda", options.device_index) if has_cuda else torch.device("cpu")
        case other:
            raise ConfigurationError(f"device {other!r} is not one of auto, cpu, cuda")


def use_device(device: torch.device, threads: int) -> None:
    """Have this thread compute on a device, on a CPU by `threads` threads."""
    if device.type == "cpu":
        torch.set_num_threads(threads)
        keep_freed_memory()
    else:
        # For this thread, the engine's only one: launches and captures use the current device.
        torch.cuda.set_device(device)
        # For pixels, and pages of other groups, which pass through host memory.
        host.keep_freed_memory(_KEPT_BYTES)


def select_dtype(name: str, config: ModelConfig, device: torch.device, library: CpuLibrary | None) -> torch.dtype:
    """Return the type of the weights: unless asked otherwise, the checkpoint's own on GPUs.

    Models whose activations would overflow in float16 are computed in bfloat16 there. On CPUs see `_auto_dtype_on_cpu`.
    """
    if name == "auto" and device.type == "cpu":
        name = _auto_dtype_on_cpu(config, library)
    elif name == "auto":
        name = "bfloat16" if config.overflows_float16 and config.dtype == "float16" else config.dtype
    if name not in DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    if name == "float16" and config.overflows_float16 and device.type != "cpu":
        raise ConfigurationError(f"activations of {config.family} overflow in float16; use dtype=bfloat16")
    return DTYPES[name]


def _auto_dtype_on_cpu(config: ModelConfig, library: CpuLibrary | None) -> str:
    """Return bfloat16 if the processor multiplies pairs of them, at twice the rate; otherwise the checkpoint's type.

    Operators then widen weights exactly when they multiply them: results have the bits of float32, and weights take
    half of its memory and bandwidth. Some quantised matrices, once unpacked, only fit into float32, and plain torch
    does not multiply float32 with narrower types.
    """
    if library is not None and library.rounds_inputs:
        return "bfloat16"
    if library is None or config.stored_format is not None or config.dtype not in DTYPES:
        return "float32"
    return config.dtype


def select_kv_dtype(name: str, backend: KernelBackend, shapes: Iterable[AttentionShape]) -> torch.dtype:
    """Return the type of the KV pool: unless asked otherwise that of the activations, or what a CPU's tiles multiply.

    `shapes` are those of the layers' attention.
    """
    if name != "auto" and name not in KV_DTYPES:
        raise ConfigurationError(f"kv_dtype {name!r} is not one of auto, {', '.join(KV_DTYPES)}")
    if name != "auto":
        return KV_DTYPES[name]
    return backend.kv_dtype(shapes) if isinstance(backend, CpuBackend) else backend.kernels.activation_dtype


def check_float8_kv(capability: tuple[int, int]) -> None:
    """Raise ConfigurationError if a GPU of this compute capability cannot convert numbers to FP8."""
    if capability < _FIRST_FLOAT8_CAPABILITY:
        raise ConfigurationError(
            f"kv_dtype=fp8 needs a GPU of compute capability {'.'.join(map(str, _FIRST_FLOAT8_CAPABILITY))} or later; "
            f"this one has {'.'.join(map(str, capability))}: use kv_dtype=auto"
        )


def count_threads(options: RunnerOptions, spec: EngineSpec) -> int:
    """Return the CPU threads of this rank. Ranks that meet over the loopback share this host's cores."""
    if options.threads:
        return options.threads
    return max(1, host.available_cores() // ranks_on_host(spec))


def ranks_on_host(spec: EngineSpec) -> int:
    """Return the number of ranks on this host: all of them if they meet at a loopback address, else one."""
    host = spec.rendezvous.rpartition(":")[0].strip("[]")
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    return spec.world_size if is_local else 1


def find_library(options: RunnerOptions, device: torch.device) -> CpuLibrary | None:
    """Return the compiled operators, built if they are not there yet; without a compiler None, with a warning.

    Raises:
        ConfigurationError: compiled operators were asked for and cannot be had.
    """
    if options.backend not in BACKENDS:
        raise ConfigurationError(f"backend {options.backend!r} is not one of {', '.join(BACKENDS)}")
    if options.backend == "compiled" and device.type != "cpu":
        raise ConfigurationError(f"backend=compiled runs on CPUs, not on {device}")
    if options.backend == "gpu" and device.type == "cpu":
        raise ConfigurationError("backend=gpu needs a GPU")
    if options.backend == "torch" or device.type != "cpu":
        return None
    try:
        return CpuLibrary(find_prebuilt() or build_library(find_openmp()))
    except (BuildError, OSError) as error:
        if options.backend == "compiled":
            raise ConfigurationError(f"backend=compiled: {error}") from error
        log.warning(
            "The CPU operators could not be compiled; plain torch is slower, most of all with many rows: %s", error
        )
        return None


def select_backend(
    library: CpuLibrary | None, dtype: torch.dtype, device: torch.device, threads: int,
    blocks: BlockFunctions | None = None,
) -> KernelBackend:  # fmt: skip
    """Return the kernels to use: the compiled ones if they are there, with `blocks` if given, else those of torch."""
    return TorchBackend(dtype, device) if library is None else CpuBackend(library, dtype, threads, blocks)


def select_products(
    wanted: str, library: CpuLibrary, dtype: torch.dtype, shapes: Sequence[ProductShape]
) -> BlockFunctions | None:
    """Return oneDNN's products if they are to compute those of `shapes`, None for the operators' own.

    Unless one way is asked for, the faster one on this processor is chosen, see `products.py`. oneDNN's have to be as
    exact as the others and the same in any batch, also when they are asked for.

    Raises:
        ConfigurationError: oneDNN's products were asked for and cannot be had.
    """
    if wanted not in PRODUCTS:
        raise ConfigurationError(f"products {wanted!r} is not one of {', '.join(PRODUCTS)}")
    if wanted == Products.OWN.value or (wanted == "auto" and not are_worth_measuring(shapes)):
        return None
    blocks = find_block_functions()
    if blocks is None or not library.has_blocks(blocks, dtype):
        if wanted == Products.ONEDNN.value:
            raise ConfigurationError(
                f"worker.products=onednn: this torch, or this processor, has no block products of {dtype}; use auto"
            )
        return None
    bench = ProductBench(library, blocks, dtype, shapes)
    if not bench.agree():
        log.warning("oneDNN's products are not used: they differ from the exact ones, or with the size of the batch")
        return None
    if wanted == Products.ONEDNN.value:
        return blocks
    choice = measured_choice(bench, ChoiceStore(cache_directory()), choice_key(library, dtype, shapes))
    return blocks if choice.products is Products.ONEDNN else None


def agreed_backend(backend: KernelBackend, group: RankGroup) -> KernelBackend:
    """Return `backend`; without oneDNN's products if a rank does not use them, since each measures by itself."""
    if not isinstance(backend, CpuBackend):
        return backend
    uses_onednn = backend.products is Products.ONEDNN
    if group.minimum(int(uses_onednn)) == uses_onednn:
        return backend
    log.info("products.chosen products=own origin=%s", "other ranks")
    return backend.with_own_products()


def select_adapter_products(backend: KernelBackend, spec: EngineSpec, device: torch.device) -> AdapterProducts:
    """Return the products of adapters in the slots of `spec` that are fastest on `device`, beside `backend`'s."""
    if has_triton():
        # Imported here because they need Triton.
        from services.worker.engine.adapters.segmented import SegmentedAdapters
        from services.worker.engine.kernels.gpu.backend import GpuBackend

        if isinstance(backend, GpuBackend):
            return SegmentedAdapters(spec.adapter_slots, device, changes_experts=spec.adapter_experts)
    return GroupedAdapters(spec.adapter_slots)


def select_gpu_backend(
    options: RunnerOptions, dtype: torch.dtype, device: torch.device, max_rows: int, *, is_deterministic: bool = False
) -> KernelBackend:
    """Return the kernels to use on a GPU, for up to `max_rows` rows; those of torch, with a warning, if need be.

    If it `is_deterministic`, the GPU's own kernels are those whose sums have one order.

    Raises:
        ConfigurationError: backend=gpu was asked for and cannot be had.
    """
    if options.backend == "torch":
        return TorchBackend(dtype, device)
    reason = None
    if dtype.itemsize != 2:
        reason = f"the GPU's own kernels compute in bfloat16 or float16, not {dtype}"
    elif not has_triton():
        reason = "Triton is not installed; install it: pip install triton"
    if reason is None:
        # Imported here because it needs Triton.
        from services.worker.engine.kernels.gpu.backend import GpuBackend

        return GpuBackend(dtype, device, max_rows, is_deterministic=is_deterministic)
    if options.backend == "gpu":
        raise ConfigurationError(f"backend=gpu: {reason}")
    log.warning("Plain torch computes, many times slower: %s", reason)
    return TorchBackend(dtype, device)
