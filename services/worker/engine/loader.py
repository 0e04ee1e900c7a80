"""Loading a model on one rank: kernels, weights, memory for KV, calibration."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.encoders import is_encoder_directory
from common.errors import ConfigurationError
from common.heads import has_pooling_module, only_embeds, read_head
from common.host import available_memory
from common.models import ModelKind, resolve_model
from common.steps import EngineCapacity
from services.worker.engine.adapters.shelf import AdapterShelf
from services.worker.engine.adapters.sites import adapter_bytes
from services.worker.engine.backends import (
    RunnerOptions,
    agreed_backend,
    count_threads,
    find_library,
    select_adapter_products,
    select_backend,
    select_device,
    select_dtype,
    select_gpu_backend,
    select_kv_dtype,
    select_products,
    use_device,
)
from services.worker.engine.checkpoints.opening import open_stage
from services.worker.engine.checkpoints.replacing import identity_by_samples
from services.worker.engine.checkpoints.safetensors_directory import read_json
from services.worker.engine.decoder_memory import DecoderMemory, check_memory
from services.worker.engine.determinism import check_deterministic
from services.worker.engine.encoder.runner import EncoderRunner
from services.worker.engine.host_memory import return_freed_memory
from services.worker.engine.host_tier.device_pages import rank_form
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.identities import KvTraits, encoder_identity, fingerprint, kv_identity, scaled_identity
from services.worker.engine.kernels.cpu.backend import CpuBackend
from services.worker.engine.kernels.cpu.layers import fuse_layers
from services.worker.engine.kernels.cpu.products import Products, layer_shapes
from services.worker.engine.layer_attention import attention_of_layers, attention_shape
from services.worker.engine.measuring.capacity import activation_reserve, longest_context, sampler_bytes
from services.worker.engine.measuring.largest_pass import measured_pass
from services.worker.engine.measuring.measurements import calibrate, pages_of, random_prompts
from services.worker.engine.model.assembly import Assembler, without_adapters
from services.worker.engine.model.kv_scales import MEASURED_TOKENS, measured_scales, stored_scales
from services.worker.engine.model.rotary import AxisAngles, rotary_table
from services.worker.engine.model.tensors import CheckedTensors
from services.worker.engine.model.transformer import Transformer
from services.worker.engine.model_runner import ModelRunner, ReadModel
from services.worker.engine.parallel.expert_exchange import exchange_with
from services.worker.engine.parallel.expert_group import ExpertGroup, join_ranks, left_on_error
from services.worker.engine.parallel.expert_load import check_experts, count_experts
from services.worker.engine.parallel.shards import ModelShard, Span, are_cut_alike, shard_model, shards_of
from services.worker.engine.parallel.stages import check_stages, kept_bytes, layers_of_stages
from services.worker.engine.parallel.symmetric_memory import ExchangeShape
from services.worker.engine.pooler_heads import read_pooler_head
from services.worker.engine.quantization.fp8 import FP8
from services.worker.engine.quantization.policy import check_device, check_model, held_format, quantiser
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from services.worker.engine.transformers_models.decoder import TransformersDecoder, pages_to_check
from services.worker.engine.vision.registry import find_vision, load_vision

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.steps import EngineSpec
    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.execution.interface import ProgressReport
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.kernels.cpu.library import CpuLibrary
    from services.worker.engine.kernels.cpu.onednn import BlockFunctions
    from services.worker.engine.kernels.interface import AttentionBackend, AttentionShape, KernelBackend, KvScales
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.model.decoder import Decoder
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.transformer import TransformerWeights
    from services.worker.engine.parallel.expert_load import ExpertCounts
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.vision.encoder import VisionEncoder

log = logging.getLogger(__name__)

# Memory on a GPU is kept for adapters of this rank, of all products, in all slots.
_RANK_OF_SLOTS = 16


def load_model(spec: EngineSpec, report: ProgressReport, options: RunnerOptions) -> ModelRunner | EncoderRunner:
    """Load the decoder or encoder that `spec` names.

    Raises:
        ConfigurationError: it cannot be found or run as configured.
    """
    files = resolve_model(spec.model, weights=False)
    if files.kind is ModelKind.DIRECTORY and is_encoder_directory(files.path):
        if spec.deterministic:
            raise ConfigurationError("model.deterministic is not available with encoders, whose batches are padded")
        files = resolve_model(spec.model, weights=spec.load_format != "dummy")
        return EncoderRunner.load(files.path, spec, report, options)
    return load_decoder(spec, report, options)


def load_decoder(spec: EngineSpec, report: ProgressReport, options: RunnerOptions | None = None) -> ModelRunner:
    """Load a decoder and allocate its KV pool; blocks until all ranks have joined.

    Raises:
        ConfigurationError: the model cannot be found or run as configured, or no memory is left for KV.
    """
    return DecoderLoader(spec, options or RunnerOptions(), report).load()


def load_encoder(
    spec: EngineSpec, report: ProgressReport, options: RunnerOptions
) -> tuple[VisionEncoder, EngineCapacity]:
    """Load the vision encoder beside a decoder, and not the decoder.

    Raises:
        ConfigurationError: the model cannot be found, or has no encoder that is supported.
    """
    return DecoderLoader(spec, options, report).load_encoder()


def _read_again(spec: EngineSpec, options: RunnerOptions, runner: ModelRunner, report: ProgressReport) -> ReadModel:
    return DecoderLoader.beside(runner, spec, options, report).read_again(runner)


class DecoderLoader:
    """The steps of loading a decoder on one rank, and the state that they share."""

    def __init__(self, spec: EngineSpec, options: RunnerOptions, report: Callable[[float, str], None]) -> None:
        """Read the configuration, and choose device, number types and kernels.

        Raises:
            ConfigurationError: the model cannot be found or run as configured.
        """
        self._spec = spec
        self._options = options
        self._report = report
        self._device = select_device(options)
        report(0.0, "reading the model's configuration")
        self._checkpoint = open_stage(spec, self._device)
        self._config = self._checkpoint.config
        files = resolve_model(spec.model, weights=False)
        described = read_json(files.path / "config.json") if files.kind is ModelKind.DIRECTORY else {}
        self._head = read_head(described, spec.classifier_from_token)
        # None: images are not to be seen.
        self._vision_config = find_vision(described) if spec.vision else None
        self._only_embeds = only_embeds(described, has_pooling=has_pooling_module(files.path))
        self._shard: ModelShard = self._shard_of(spec.tensor_rank)
        threads = count_threads(options, spec)
        use_device(self._device, threads)
        report(0.0, "preparing kernels, which takes longest the first time")
        library = find_library(options, self._device)
        is_own = not isinstance(self._checkpoint, TransformersCheckpoint)
        if self._vision_config is not None and not is_own:
            log.warning("images.refused reason=%s runs through transformers, without its encoder", self._config.family)
            self._vision_config = None
        # Of models that run through `transformers`, this is found out by trying.
        self._can_be_captured = is_own
        self._dtype = select_dtype(spec.dtype, self._config, self._device, library if is_own else None)
        self._backend: KernelBackend = (
            select_backend(library, self._dtype, self._device, threads, self._blocks(library if is_own else None))
            if self._device.type == "cpu"
            else select_gpu_backend(
                options, self._dtype, self._device, spec.max_rows, is_deterministic=spec.deterministic
            )
        )
        self._held_format = held_format(spec, self._config)
        if self._held_format is not None:
            for config, shard in self._kinds(spec.tensor_rank):
                check_model(self._held_format, config, shard, is_own=is_own)
            if self._backend.name == "gpu":
                check_device(self._held_format, self._dtype, torch.cuda.get_device_capability(self._device))
        self._kv_dtype = select_kv_dtype(spec.kv_dtype, self._backend, self._shapes_of(has_float8_kv=False))
        self._kv_scales: tuple[KvScales, ...] = ()
        # Of models that run through `transformers`, products cannot be changed.
        self._adapters: AdapterProducts | None = None
        self._vision: VisionEncoder | None = None
        self._expert_group: ExpertGroup | None = None
        # Read ahead by `prepare`.
        self._weights: TransformerWeights | None = None
        self._check_support(is_own=is_own)

    @classmethod
    def beside(
        cls, serving: ModelRunner, spec: EngineSpec, options: RunnerOptions, report: ProgressReport
    ) -> DecoderLoader:
        """Return the loader of weights that replace those of `serving`, as whose ranks agreed on products."""
        return cls(spec, replace(options, products=serving.capacity.products or options.products), report)

    @torch.inference_mode()
    def load(self) -> ModelRunner:
        """Load the model and allocate its KV pool; blocks until all ranks have joined."""
        group = self._join()
        with left_on_error(self._expert_group):
            return self._load(group)

    def _load(self, group: RankGroup) -> ModelRunner:
        spec, config = self._spec, self._config
        self._backend = agreed_backend(self._backend, group)
        free_before = self._free_memory()
        context = longest_context(spec, config)
        config = self._config = config.within(context)
        model = self._decoder(group, context)
        head = self._pooler_head()
        if self._kv_dtype == FP8:
            self._kv_scales = self._find_kv_scales(model, context)
        self._report(0.98, "measuring memory" if self._is_captured else "allocating the KV pool")
        reserve = self._reserve(model, context) + self._slots_bytes()
        memory, free = self._memory, (free_before, self._free_memory())
        pages, window_pages = (group.minimum(count) for count in memory.count_pages(context, free, reserve))
        # One page more than granted ones: padding rows of captured batches write there.
        pool = memory.pool(pages + self._is_captured, model.kv_layout, window_pages)
        if config.recurrent is not None:
            # Ranks with other numbers of heads count others.
            pool = replace(pool, states=memory.states(group.minimum(memory.count_snapshots(pages))))
        capacity = self._capacity(pool, pages, min(context, pages * spec.page_size), model.kv_layout.value, group)
        log.info(
            "model.loaded model=%s device=%s backend=%s dtype=%s weights=%s kv_dtype=%s pages=%d context=%d threads=%d",
            spec.model, self._device, self._backend.name, self._dtype, self._held_format or "as stored", self._kv_dtype,
            pages, capacity.max_context, torch.get_num_threads(),
        )  # fmt: skip
        host_pages, host_snapshots = (group.minimum(count) for count in memory.count_host_pages(pool))
        host_pool = allocate_host_pool(pool, host_pages, host_snapshots) if host_pages else None
        form = None
        if are_cut_alike(self._kinds(spec.tensor_rank)):
            form = rank_form(pool, model.kv_layout, self._shapes[0], self._shard, config)
        runner = ModelRunner(
            model, pool, capacity, group, activation_dtype=self._backend.kernels.activation_dtype, form=form,
            is_captured=self._is_captured, host_pool=host_pool, head=head, adapters=self._shelf(), vision=self._vision,
            nixl=self._options.nixl,
            read_again=partial(_read_again, spec, self._options), hidden_size=config.hidden_size,
        )  # fmt: skip
        if host_pool is not None and runner.transfers is not None:
            self._report(0.99, "measuring prefill and the host tier")
            measured = calibrate(runner, host_pool, runner.transfers, spec.max_step_tokens)
            runner.capacity = measured.added_to(runner.capacity)
        if isinstance(group, ExpertGroup):
            self._report(0.99, "waiting for the other groups")
            group.calls.load_together(runner.join_pass)
        self._report(1.0, "ready")
        return runner

    def _join(self) -> RankGroup:
        spec, config, dtype = self._spec, self._config, self._backend.kernels.activation_dtype
        if not spec.is_alone:
            self._report(0.0, "waiting for the other ranks")
        shape = ExchangeShape(dtype, config.hidden_size, spec.max_rows, config.vocabulary_size)
        alike = config, self._dtype, dtype, self._held_format
        group = join_ranks(spec, self._device, shape if self._may_be_captured else None, alike=alike)
        self._expert_group = group if isinstance(group, ExpertGroup) else None
        return group

    @torch.inference_mode()
    def read_again(self, runner: ModelRunner) -> ReadModel:
        """Read the weights of `runner`, which were dropped; all of its group's ranks do so at the same time."""
        context = longest_context(self._spec, self._config)
        self._config = self._config.within(context)
        model = self._decoder(runner.group, context)
        self._kv_scales = tuple(layer.scales for layer in runner.pool.layers if layer.scales is not None)
        shelf = self._shelf()
        if shelf is not None and runner.adapters is not None:
            shelf.take_over(runner.adapters)
        fingerprint = self._fingerprint(model.kv_layout.value, runner.group)
        return ReadModel(model, self._pooler_head(), shelf, self._vision, fingerprint)

    @torch.inference_mode()
    def load_encoder(self) -> tuple[VisionEncoder, EngineCapacity]:
        """Load the vision encoder only."""
        if isinstance(self._checkpoint, TransformersCheckpoint) or self._vision_config is None:
            raise ConfigurationError(f"{self._spec.model} has no encoder of images that is supported")
        self._report(0.0, "loading weights")
        kernels = self._backend.kernels
        self._vision = load_vision(self._checkpoint, self._vision_config, kernels, self._device)
        capacity = EngineCapacity(
            device_pages=0,
            page_size=self._spec.page_size,
            max_context=0,
            vocabulary_size=self._config.vocabulary_size,
            eos_token_ids=(),
            kv_bytes_per_token=0,
            fingerprint="",
            device=str(self._device),
            layers=0,
            embedding_bytes=self._embedding_bytes,
            encoder_identity=self._encoder_identity(),
        )
        log.info("encoder.loaded model=%s device=%s backend=%s", self._spec.model, self._device, self._backend.name)
        return self._vision, capacity

    def _check_support(self, *, is_own: bool) -> None:
        """Raise ConfigurationError for stages, kinds of KV memory or exactness that model or device do not support."""
        spec, config = self._spec, self._config
        for shape in dict.fromkeys(self._shapes):
            check_deterministic(spec, config, self._backend, shape, is_own=is_own, sees=self._vision_config is not None)
        if spec.deterministic and self._head is not None:
            raise ConfigurationError("model.deterministic is not available with classification heads")
        if spec.has_whole_experts:
            check_experts(spec, config, self._backend.name, is_own=is_own)
        if spec.stages > 1:
            check_stages(spec, config, is_own=is_own)
        check_memory(spec, config, self._backend, self._kv_dtype)

    def _blocks(self, library: CpuLibrary | None) -> BlockFunctions | None:
        """Return oneDNN's products, if layers are to use them."""
        if library is None:
            return None
        shapes, *others = (layer_shapes(*kind) for kind in self._kinds(self._spec.tensor_rank))
        shapes += tuple(shape for other in others for shape in other if shape not in shapes)
        wanted = self._options.products
        if self._spec.deterministic and wanted == "auto":
            # Bits must not depend on a measurement either.
            wanted = Products.OWN.value
        return select_products(wanted, library, self._dtype, shapes)

    def _decoder(self, group: RankGroup, context: int) -> Decoder:
        """Load the weights and put the model together."""
        if isinstance(self._checkpoint, TransformersCheckpoint):
            return self._transformers_decoder(self._checkpoint, context, group)
        kernels, ranks = self._backend.kernels, self._spec.tensor_ranks
        weights = self._weights or self._read(self._checkpoint)
        adapters, self._weights = self._adapters, None
        if self._backend.name == "gpu":
            self._report(0.98, "preparing products, which takes longest the first time")
        self._backend.prepare(self._spec.max_step_tokens)
        vocabulary = tuple(self._shard_of(rank).vocabulary for rank in range(ranks))
        attention, (*inner, last) = self._attention(context), weights.layers
        # Several ranks add up what their parts of a layer contribute: no one call.
        if ranks == 1 and last.input_norm is not None:
            bare = [without_adapters(layer) for layer in inner]
            joined = fuse_layers(bare, attention, last.input_norm, self._config.norm_epsilon)
            weights = replace(weights, joined=joined)
        return Transformer(
            weights, self._part, vocabulary, kernels=kernels, attention=attention, group=group, adapters=adapters,
            angles=self._axis_angles(context),
        )  # fmt: skip

    def _read(self, checkpoint: Checkpoint) -> TransformerWeights:
        """Read the weights, those of the vision encoder, too, and prepare the sites of adapters."""
        tensors = CheckedTensors(checkpoint, self._device, quantiser(self._spec, self._config))
        slots = self._spec.adapter_slots
        self._adapters = select_adapter_products(self._backend, slots, self._device) if slots else None
        kernels = self._backend.kernels
        if self._vision_config is not None:
            try:
                self._vision = load_vision(checkpoint, self._vision_config, kernels, self._device)
            except ConfigurationError as error:
                raise ConfigurationError(f"{error}; model.images=off serves the model without its encoder") from error
        assembler = Assembler(
            tensors, self._shard, kernels, self._dtype, self._device, self._has_vocabulary, self._layers,
            self._adapters, self._count_experts(),
            exchange_with(self._expert_group, self._part, kernels.activation_dtype, self._device), self._local_shard,
        )  # fmt: skip
        return assembler.weights(lambda share: self._report(0.98 * share, "loading weights"))

    def _shard_of(self, tensor_rank: int) -> ModelShard:
        return self._kinds(tensor_rank)[0][1]

    def _kinds(self, tensor_rank: int) -> list[tuple[ModelConfig, ModelShard]]:
        return shards_of(self._spec, self._config, tensor_rank)

    @property
    def _local_shard(self) -> ModelShard | None:
        """The rank's share of layers with a window, where these have other heads."""
        _, *local = self._kinds(self._spec.tensor_rank)
        return local[0][1] if local else None

    def _count_experts(self) -> ExpertCounts | None:
        held = tuple(self._shard_of(rank).experts for rank in range(self._spec.tensor_ranks))
        return count_experts(self._spec, self._part, held, self._device)

    @property
    def can_prepare(self) -> bool:
        """Whether weights can be read before the ranks meet."""
        return not isinstance(self._checkpoint, TransformersCheckpoint)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Read the weights for `load_prepared`."""
        assert not isinstance(self._checkpoint, TransformersCheckpoint), "the caller has asked"
        self._config = self._config.within(longest_context(self._spec, self._config))
        self._weights = self._read(self._checkpoint)
        # Waits until all blocks are hashed: after that nothing reads the files, which may change.
        self._checkpoint.identity()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def load_prepared(self, spec: EngineSpec, report: ProgressReport) -> ModelRunner:
        """Load with the weights that `prepare` has read, in the engine's thread."""
        self._spec, self._report = spec, report
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return self.load()

    def _shelf(self) -> AdapterShelf | None:
        """Return the place of adapters, if the model is to have any and can."""
        if self._adapters is None:
            return None
        kernels = self._backend.kernels
        return AdapterShelf(self._adapters, self._config, kernels.activation_dtype, self._device)

    def _transformers_decoder(self, checkpoint: TransformersCheckpoint, context: int, group: RankGroup) -> Decoder:
        self._report(0.0, "loading weights")
        model = TransformersDecoder(checkpoint, self._dtype, self._device, group)
        # Heads, scales and windows are known only after tracing.
        self._config = model.config
        self._shard = shard_model(self._config, group.rank, group.world_size)
        model.use(self._attention(context), self._backend.kernels.activation_dtype)
        self._report(0.97, "comparing attention")
        pool = self._memory.unquantised_pool(pages_to_check(self._spec.page_size), model.kv_layout)
        model.check(pool)
        if self._may_be_captured:
            obstacle = model.obstacle_to_graphs(pool)
            self._can_be_captured = obstacle is None
            if obstacle is not None:
                log.warning(
                    "%r runs without CUDA graphs, many times slower with few rows: %s", self._config.family, obstacle
                )
        return model

    @property
    def _memory(self) -> DecoderMemory:
        return DecoderMemory(
            self._spec, self._config, self._layers, self._shapes, len(self._shard.state_heads or ()), self._device,
            self._kv_dtype, self._backend.kernels.activation_dtype, self._is_captured, self._kv_scales,
        )  # fmt: skip

    def _pooler_head(self) -> PoolerHead | None:
        return read_pooler_head(self._checkpoint, self._head, self._config, self._spec.model, self._device)

    def _axis_angles(self, context: int) -> AxisAngles | None:
        """Return the angles of tokens of images; None: their positions are as those of texts."""
        vision, config = self._vision_config, self._config
        if vision is not None and len(vision.deep_layers) >= config.layers:
            raise ConfigurationError(f"vision_config: embeddings for more than the {config.layers - 1} first layers")
        if vision is None or not vision.axes:
            return None
        return AxisAngles(rotary_table(config.rotary, config.rotary_dim, context, self._device), vision.axes)

    def _free_memory(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self._device)[0])
        return_freed_memory()
        return available_memory()

    @property
    def _layers(self) -> Span:
        """The layers of this rank's stage."""
        return layers_of_stages(self._config, self._spec.stages)[self._spec.stage]

    @property
    def _part(self) -> ModelConfig:
        """The model that these layers are."""
        return self._config.part(self._layers.start, self._layers.stop)

    @property
    def _has_vocabulary(self) -> bool:
        """Whether logits are computed. Models for embeddings often come without the head that would do so."""
        if isinstance(self._checkpoint, TransformersCheckpoint):
            return True
        is_there = self._config.tied_embeddings or self._checkpoint.has("lm_head.weight")
        return self._head is None and (is_there or not self._only_embeds)

    @property
    def _is_captured(self) -> bool:
        """Whether passes run in CUDA graphs; known once the model is loaded."""
        return self._may_be_captured and self._can_be_captured

    @property
    def _may_be_captured(self) -> bool:
        # Captured passes sample. Between groups, the host has to know how many tokens ranks exchange.
        may_be = self._options.graphs and self._spec.data_parallel_size == 1
        return self._backend.name == "gpu" and self._head is None and self._has_vocabulary and may_be

    @property
    def _shapes(self) -> tuple[AttentionShape, AttentionShape]:
        """The attention of layers without a window, and of those with one but for the window."""
        return self._shapes_of(has_float8_kv=self._kv_dtype == FP8)

    def _shapes_of(self, *, has_float8_kv: bool) -> tuple[AttentionShape, AttentionShape]:
        kinds = self._kinds(self._spec.tensor_rank)
        shapes = [attention_shape(*kind, self._spec.page_size, has_float8_kv=has_float8_kv) for kind in kinds]
        return shapes[0], shapes[-1]

    def _attention(self, context: int) -> list[AttentionBackend]:
        return attention_of_layers(self._backend, self._part, self._shapes, context, self._device)

    def _find_kv_scales(self, model: Decoder, context: int) -> tuple[KvScales, ...]:
        """Return the scales of keys and values in FP8: the checkpoint's, or else measured on fixed tokens."""
        if not isinstance(self._checkpoint, TransformersCheckpoint):
            local = self._local_shard or self._shard
            heads = self._shard.kv_heads, local.kv_heads
            scales = stored_scales(self._checkpoint, heads, self._layers, self._device)
            if scales:
                log.info("model.kv_scales source=checkpoint")
                return scales
        self._report(0.98, "measuring scales of keys and values")
        length = min(MEASURED_TOKENS, self._spec.max_step_tokens, context)
        batch = random_prompts([length], self._spec.page_size, self._config.vocabulary_size, self._device)
        pool = self._memory.unquantised_pool(pages_of([length], self._spec.page_size), model.kv_layout)
        model.forward(batch, pool)
        log.info("model.kv_scales source=measured tokens=%d", length)
        return measured_scales(pool, model.kv_layout)

    def _reserve(self, model: Decoder, context: int) -> int:
        """Return bytes that passes take beside weights and KV: measured where a pass costs nothing, else estimated."""
        spec, element_bytes = self._spec, self._backend.kernels.activation_dtype.itemsize
        # Embeddings of a pass and of images that it cuts in two stay beside what the pass computes.
        encoder = 0
        if self._vision is not None:
            encoder = self._vision.batch_bytes() + spec.kept_embeddings * self._embedding_bytes
            encoder += 2 * spec.max_step_tokens * self._config.hidden_size * element_bytes
        # A rank may get the tokens of all groups that share experts.
        of_all = replace(spec, max_step_tokens=spec.max_step_tokens * spec.data_parallel_size)
        estimate = activation_reserve(of_all, self._config, element_bytes) + encoder
        if not self._is_captured or spec.device_pages is not None:
            return estimate
        peak = measured_pass(model, spec, self._config, self._memory, context) + encoder
        peak += kept_bytes(spec, self._config.hidden_size, element_bytes)
        log.info("model.measured activations_mib=%d estimated_mib=%d", peak >> 20, estimate >> 20)
        # The host's sampler copies logits; the device's has tables.
        vocabulary_size = self._config.vocabulary_size
        return peak + 3 * spec.max_rows * vocabulary_size * 4 + sampler_bytes(spec.max_rows, vocabulary_size)

    def _slots_bytes(self) -> int:
        """Return the bytes to keep for adapters in slots; on a CPU they stay where they were read."""
        if self._adapters is None or self._device.type == "cpu":
            return 0
        element_bytes = self._backend.kernels.activation_dtype.itemsize
        each = adapter_bytes(self._adapters.sites, self._config, _RANK_OF_SLOTS, element_bytes)
        log.info("adapters.reserved slots=%d mib=%d", self._adapters.slots, self._adapters.slots * each >> 20)
        return self._adapters.slots * each

    def _traits(self, layout: str) -> KvTraits:
        return KvTraits(
            self._config, self._dtype, self._kv_dtype, layout, self._spec.page_size, self._vision_config,
            is_quantised=quantiser(self._spec, self._config) is not None,
            has_ordered_sums=self._spec.deterministic and self._backend.name == "gpu",
        )  # fmt: skip

    def _fingerprint(self, layout: str, group: RankGroup) -> str:
        """Return the digest of all that decides about KV, with the weights of all ranks."""
        # A rank's KV depends on the weights of all ranks, as layers add up what all of them contribute.
        identity = scaled_identity(self._checkpoint.identity(), self._kv_scales)
        weights = "".join(group.gather_digests(identity))
        return fingerprint(weights, self._traits(layout), self._spec, self._shard.kv_heads, self._layers)

    def _kv_identity(self, layout: str) -> str:
        """Return the digest of all that decides about KV but the number of ranks; see `WorkerCapacity.kv_identity`."""
        if self._spec.stages > 1 or self._kv_scales:
            return ""
        is_made_up = self._spec.load_format == "dummy"
        weights = self._checkpoint.identity() if is_made_up else identity_by_samples(self._spec.model)
        return kv_identity(weights, self._traits(layout), whole_experts=self._spec.has_whole_experts)

    def _capacity(self, pool: KvPool, pages: int, context: int, layout: str, group: RankGroup) -> EngineCapacity:
        return EngineCapacity(
            device_pages=pages,
            page_size=self._spec.page_size,
            max_context=context,
            vocabulary_size=self._config.vocabulary_size,
            eos_token_ids=self._config.eos_token_ids,
            kv_bytes_per_token=pool.bytes_per_token,
            fingerprint=self._fingerprint(layout, group),
            kv_identity=self._kv_identity(layout),
            device=str(self._device),
            layers=self._config.layers,
            window_pool=self._memory.window_pool(pool),
            recurrent_states=self._memory.recurrent_states(pool.states.snapshots if pool.states else 0),
            head=self._head.pooling if self._head else None,
            only_pools=self._head is not None or self._only_embeds,
            sees_images=self._vision is not None,
            embedding_bytes=self._embedding_bytes,
            image_block=self._vision.config.block if self._vision is not None else 0,
            encoder_identity=self._encoder_identity(),
            products=self._backend.products.value if isinstance(self._backend, CpuBackend) else "",
        )

    def _encoder_identity(self) -> str:
        """Return the digest of all that decides about embeddings; see `WorkerCapacity.encoder_identity`."""
        if self._vision is None:
            return ""
        weights = "" if self._spec.load_format == "dummy" else identity_by_samples(self._spec.model)
        dtype = self._backend.kernels.activation_dtype
        return encoder_identity(weights, self._vision.config, dtype)

    @property
    def _embedding_bytes(self) -> int:
        """Bytes of one embedding of an image; 0 without an encoder."""
        if self._vision is None:
            return 0
        return self._vision.config.components * self._backend.kernels.activation_dtype.itemsize
