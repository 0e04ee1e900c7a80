"""A decoder on one rank before its weights are read: configuration, device, number types, kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.heads import has_pooling_module, only_embeds, read_head
from common.models import ModelKind, resolve_model
from services.worker.engine.backends import (
    count_threads,
    find_library,
    select_backend,
    select_device,
    select_dtype,
    select_gpu_backend,
    select_kv_dtype,
    select_products,
    use_device,
)
from services.worker.engine.checkpoints.opening import open_stage
from services.worker.engine.checkpoints.safetensors_directory import read_json
from services.worker.engine.decoder_memory import DecoderMemory, check_memory
from services.worker.engine.determinism import check_deterministic
from services.worker.engine.kernels.cpu.products import Products, layer_shapes
from services.worker.engine.layer_attention import attention_shape
from services.worker.engine.parallel.expert_load import check_experts
from services.worker.engine.parallel.shards import ModelShard, Span, shards_of
from services.worker.engine.parallel.stages import check_stages, layers_of_stages
from services.worker.engine.quantization.fp8 import FP8
from services.worker.engine.quantization.policy import check_device, check_model, held_format
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from services.worker.engine.vision.registry import find_vision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.heads import Head
    from common.steps import EngineSpec
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.execution.interface import ProgressReport
    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.interface import AttentionShape, KernelBackend, KvScales
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.quantization.formats import StoredFormat
    from services.worker.engine.vision.config import VisionConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankModel:
    """A rank's part of a model, and the choices of how it is computed.

    Loading goes on with copies that know more: the ranks' common backend, the scales of keys and values, and of models
    that run through `transformers` all that only tracing them finds out.
    """

    spec: EngineSpec
    options: RunnerOptions
    device: torch.device
    checkpoint: Checkpoint | TransformersCheckpoint
    config: ModelConfig
    head: Head | None
    # None: images are not to be seen.
    vision: VisionConfig | None
    only_embeds: bool
    dtype: torch.dtype
    backend: KernelBackend
    held_format: StoredFormat | None
    kv_dtype: torch.dtype
    # Of models that run through `transformers`, this is found out by trying.
    can_be_captured: bool
    # By samples of the files, of weights that were read ahead: the files may have changed since. Empty: not known yet.
    files_identity: str = ""
    # Of keys and values in FP8.
    kv_scales: tuple[KvScales, ...] = ()

    def within(self, context: int) -> RankModel:
        """Return the model as it computes sequences of up to `context` tokens."""
        return replace(self, config=self.config.within(context))

    @property
    def activation_dtype(self) -> torch.dtype:
        """The type in which layers hand over what they compute."""
        return self.backend.kernels.activation_dtype

    @property
    def kinds(self) -> list[tuple[ModelConfig, ModelShard]]:
        """The model and this rank's share of it; twice if layers with a window have other heads."""
        return shards_of(self.spec, self.config, self.spec.tensor_rank)

    @property
    def shard(self) -> ModelShard:
        """This rank's share."""
        return self.shard_of(self.spec.tensor_rank)

    def shard_of(self, tensor_rank: int) -> ModelShard:
        """Return the share of a rank of this stage."""
        return shards_of(self.spec, self.config, tensor_rank)[0][1]

    @property
    def local_shard(self) -> ModelShard | None:
        """This rank's share of layers with a window, where these have other heads."""
        _, *local = self.kinds
        return local[0][1] if local else None

    @property
    def layers(self) -> Span:
        """The layers of this rank's stage."""
        return layers_of_stages(self.config, self.spec.stages)[self.spec.stage]

    @property
    def part(self) -> ModelConfig:
        """The model that these layers are."""
        return self.config.part(self.layers.start, self.layers.stop)

    @property
    def shapes(self) -> tuple[AttentionShape, AttentionShape]:
        """The attention of layers without a window, and of those with one but for the window."""
        return _shapes(self.kinds, self.spec.page_size, has_float8_kv=self.kv_dtype == FP8)

    @property
    def memory(self) -> DecoderMemory:
        """The memory of each row in the layers."""
        return DecoderMemory(
            self.spec, self.config, self.layers, self.shapes, len(self.shard.state_heads or ()), self.device,
            self.kv_dtype, self.activation_dtype, self.is_captured, self.kv_scales,
        )  # fmt: skip

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one embedding of an image; 0 without an encoder."""
        return 0 if self.vision is None else self.vision.components * self.activation_dtype.itemsize

    @property
    def has_vocabulary(self) -> bool:
        """Whether logits are computed. Models for embeddings often come without the head that would do so."""
        if isinstance(self.checkpoint, TransformersCheckpoint):
            return True
        is_there = self.config.tied_embeddings or self.checkpoint.has("lm_head.weight")
        return self.head is None and (is_there or not self.only_embeds)

    @property
    def is_captured(self) -> bool:
        """Whether passes run in CUDA graphs; known once the model is loaded."""
        return self.may_be_captured and self.can_be_captured

    @property
    def may_be_captured(self) -> bool:
        """Whether passes run in CUDA graphs if the model can."""
        # Captured passes sample. Between groups, the host has to know how many tokens ranks exchange.
        may_be = self.options.graphs and self.spec.data_parallel_size == 1
        return self.backend.name == "gpu" and self.head is None and self.has_vocabulary and may_be


def open_rank(spec: EngineSpec, options: RunnerOptions, report: ProgressReport) -> RankModel:
    """Read the configuration, and choose device, number types and kernels.

    Raises:
        ConfigurationError: the model cannot be found or run as configured.
    """
    device = select_device(options)
    report(0.0, "reading the model's configuration")
    checkpoint = open_stage(spec, device)
    config = checkpoint.config
    files = resolve_model(spec.model, weights=False)
    described = read_json(files.path / "config.json") if files.kind is ModelKind.DIRECTORY else {}
    is_own = not isinstance(checkpoint, TransformersCheckpoint)
    vision = find_vision(described) if spec.vision else None
    if vision is not None and not is_own:
        log.warning("images.refused reason=%s runs through transformers, without its encoder", config.family)
        vision = None
    kinds = shards_of(spec, config, spec.tensor_rank)
    report(0.0, "preparing kernels, which takes longest the first time")
    dtype, backend = _select_kernels(spec, options, config, device, is_own=is_own)
    held = held_format(spec, config)
    if held is not None:
        for kind in kinds:
            check_model(held, *kind, is_own=is_own)
        if backend.name == "gpu":
            check_device(held, dtype, torch.cuda.get_device_capability(device))
    rank = RankModel(
        spec=spec,
        options=options,
        device=device,
        checkpoint=checkpoint,
        config=config,
        head=read_head(described, spec.classifier_from_token),
        vision=vision,
        only_embeds=only_embeds(described, has_pooling=has_pooling_module(files.path)),
        dtype=dtype,
        backend=backend,
        held_format=held,
        kv_dtype=select_kv_dtype(spec.kv_dtype, backend, _shapes(kinds, spec.page_size, has_float8_kv=False)),
        can_be_captured=is_own,
    )
    _check_support(rank, is_own=is_own)
    return rank


def _select_kernels(
    spec: EngineSpec, options: RunnerOptions, config: ModelConfig, device: torch.device, *, is_own: bool
) -> tuple[torch.dtype, KernelBackend]:
    """Return the type of weights, and the kernels."""
    threads = count_threads(options, spec)
    use_device(device, threads)
    library = find_library(options, device)
    # Of models that run through `transformers`, products cannot be changed.
    for_layers = library if is_own else None
    dtype = select_dtype(spec.dtype, config, device, for_layers)
    if device.type == "cpu":
        blocks = None if for_layers is None else _blocks(spec, options, config, for_layers, dtype)
        return dtype, select_backend(library, dtype, device, threads, blocks)
    return dtype, select_gpu_backend(options, dtype, device, spec.max_rows, is_deterministic=spec.deterministic)


def _blocks(
    spec: EngineSpec, options: RunnerOptions, config: ModelConfig, library: CpuLibrary, dtype: torch.dtype
) -> BlockFunctions | None:
    """Return oneDNN's products, if layers are to use them."""
    shapes, *others = (layer_shapes(*kind) for kind in shards_of(spec, config, spec.tensor_rank))
    shapes += tuple(shape for other in others for shape in other if shape not in shapes)
    wanted = options.products
    if spec.deterministic and wanted == "auto":
        # Bits must not depend on a measurement either.
        wanted = Products.OWN.value
    return select_products(wanted, library, dtype, shapes)


def _shapes(
    kinds: Sequence[tuple[ModelConfig, ModelShard]], page_size: int, *, has_float8_kv: bool
) -> tuple[AttentionShape, AttentionShape]:
    shapes = [attention_shape(*kind, page_size, has_float8_kv=has_float8_kv) for kind in kinds]
    return shapes[0], shapes[-1]


def _check_support(rank: RankModel, *, is_own: bool) -> None:
    """Raise ConfigurationError for stages, kinds of KV memory or exactness that model or device do not support."""
    spec, config = rank.spec, rank.config
    for shape in dict.fromkeys(rank.shapes):
        check_deterministic(spec, config, rank.backend, shape, is_own=is_own, sees=rank.vision is not None)
    if spec.deterministic and rank.head is not None:
        raise ConfigurationError("model.deterministic is not available with classification heads")
    if spec.has_whole_experts:
        check_experts(spec, config, rank.backend.name, is_own=is_own)
    if spec.stages > 1:
        check_stages(spec, config, is_own=is_own)
    check_memory(spec, config, rank.backend, rank.kv_dtype)
