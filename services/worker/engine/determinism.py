"""Where `model.deterministic` can be had: which models and kernels give a row the same bits in every batch.

The compiled operators, and on GPUs the programs in `kernels/gpu/ordered_*.py`, sum up every result in an order that
depends neither on the number of rows nor on the division of a prompt into passes: products over inputs from first to
last, attention over blocks of keys that begin at fixed positions. So a token's numbers are the same beside other
requests, after a cache hit, and in a pass that verifies a draft. Parts of models that have no such order are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.quantization.policy import held_format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import EngineSpec
    from services.worker.engine.kernels.interface import AttentionShape, KernelBackend
    from services.worker.engine.model.config import ModelConfig


# The compute capability whose matrix instructions the GPU's programs are written for.
HOPPER = (9, 0)


def check_deterministic(
    spec: EngineSpec, config: ModelConfig, backend: KernelBackend, shape: AttentionShape, *, is_own: bool, sees: bool
) -> None:
    """Raise ConfigurationError, with all reasons, if `spec` asks for what this rank cannot give.

    `is_own`: the model does not run through `transformers`. `sees`: its vision encoder is loaded, too.
    """
    if not spec.deterministic:
        return
    reasons = [*_of_kernels(spec, backend, shape), *_of_model(spec, config, is_own=is_own, sees=sees)]
    if backend.name == "gpu":
        reasons += _of_gpu(spec, config, backend, torch.cuda.get_device_capability())
    if reasons:
        raise ConfigurationError(f"model.deterministic is not available with {'; '.join(reasons)}")


def _of_kernels(spec: EngineSpec, backend: KernelBackend, shape: AttentionShape) -> Iterator[str]:
    if backend.name not in ("compiled", "gpu"):
        yield (
            "plain torch: leave worker.backend on auto, and install a C++ compiler for CPUs, so that operators can be "
            "compiled, or Triton for GPUs"
        )
    elif isinstance(backend, CpuBackend) and shape.latent_dim is None and not backend.can_attend(shape):
        yield f"scheduler.page_size {shape.page_size} and heads of {shape.head_dim}: attention would be plain torch's"
    if spec.world_size > spec.stages:
        yield "several tensor-parallel ranks, whose sums depend on the size of the batch"
    if spec.data_parallel_size > 1:
        yield "scheduler.data_parallel, where other groups' tokens are in the batches of experts"


def _of_gpu(
    spec: EngineSpec, config: ModelConfig, backend: KernelBackend, capability: tuple[int, int]
) -> Iterator[str]:
    if capability != HOPPER:
        yield (
            f"GPUs of compute capability {'.'.join(map(str, capability))}, which have other matrix instructions than "
            f"{'.'.join(map(str, HOPPER))}: set worker.device to cpu"
        )
    if backend.kernels.activation_dtype != torch.bfloat16:
        yield f"{backend.kernels.activation_dtype} on GPUs: set model.dtype to bfloat16"
    if spec.kv_dtype not in ("auto", "bfloat16"):
        yield f"keys and values in {spec.kv_dtype} on GPUs: set model.kv_dtype to auto"
    if held_format(spec, config) is not None:
        yield "quantised matrices on GPUs"
    if config.projection_norm:
        yield f"norms over all heads of a token on GPUs ({config.family})"


def _of_model(spec: EngineSpec, config: ModelConfig, *, is_own: bool, sees: bool) -> Iterator[str]:
    if not is_own:
        yield f"{config.family}, which runs through transformers"
    if config.latent is not None:
        yield f"latent attention ({config.family})"
    if config.recurrent is not None:
        yield f"recurrent layers ({config.family}), whose blocks begin where chunks of prompts do"
    if spec.adapter_slots:
        yield "adapters: set scheduler.adapters.slots to 0"
    if sees:
        yield "images, which are encoded together: set model.images to off"
