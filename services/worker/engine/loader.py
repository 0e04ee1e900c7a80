"""Loading a model on one rank: the steps in their order, each of which has a module of its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.encoders import is_encoder_directory
from common.errors import ConfigurationError
from common.models import ModelKind, resolve_model
from services.worker.engine.backends import RunnerOptions, agreed_backend
from services.worker.engine.decoder_weights import DecoderWeights, build_decoder, find_kv_scales, read_weights
from services.worker.engine.encoder.runner import EncoderRunner
from services.worker.engine.host_tier.device_pages import rank_form
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.measuring.capacity import longest_context
from services.worker.engine.measuring.measurements import calibrate
from services.worker.engine.measuring.reserve import free_memory, pass_bytes, slots_bytes
from services.worker.engine.model_runner import ModelRunner, ReadModel
from services.worker.engine.parallel.expert_group import ExpertGroup, join_ranks, left_on_error
from services.worker.engine.parallel.shards import are_cut_alike
from services.worker.engine.parallel.symmetric_memory import ExchangeShape
from services.worker.engine.quantization.fp8 import FP8
from services.worker.engine.rank_capacity import (
    decoder_capacity,
    encoder_capacity,
    fingerprint_of,
    identity_of_rank_files,
)
from services.worker.engine.rank_model import open_rank
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from services.worker.engine.vision.registry import load_vision

if TYPE_CHECKING:
    from common.steps import EngineCapacity, EngineSpec
    from services.worker.engine.decoder_weights import LoadedDecoder
    from services.worker.engine.execution.interface import ProgressReport
    from services.worker.engine.host_tier.page_form import PageForm
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.rank_model import RankModel
    from services.worker.engine.vision.encoder import VisionEncoder

log = logging.getLogger(__name__)


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


@torch.inference_mode()
def load_encoder(
    spec: EngineSpec, report: ProgressReport, options: RunnerOptions
) -> tuple[VisionEncoder, EngineCapacity]:
    """Load the vision encoder beside a decoder, and not the decoder.

    Raises:
        ConfigurationError: the model cannot be found, or has no encoder that is supported.
    """
    rank = open_rank(spec, options, report)
    if isinstance(rank.checkpoint, TransformersCheckpoint) or rank.vision is None:
        raise ConfigurationError(f"{spec.model} has no encoder of images that is supported")
    report(0.0, "loading weights")
    vision = load_vision(rank.checkpoint, rank.vision, rank.backend.kernels, rank.device)
    capacity = encoder_capacity(rank)
    log.info("encoder.loaded model=%s device=%s backend=%s", spec.model, rank.device, rank.backend.name)
    return vision, capacity


class DecoderLoader:
    """Loads a decoder on one rank, at once or with weights that were read while another one serves."""

    def __init__(self, spec: EngineSpec, options: RunnerOptions, report: ProgressReport) -> None:
        """Read the configuration, and choose device, number types and kernels.

        Raises:
            ConfigurationError: the model cannot be found or run as configured.
        """
        self._report = report
        self._rank: RankModel = open_rank(spec, options, report)
        # Read ahead by `prepare`.
        self._weights: DecoderWeights | None = None

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
        experts = group if isinstance(group, ExpertGroup) else None
        with left_on_error(experts):
            runner = self._load(group)
            if experts is not None:
                self._report(0.99, "waiting for the other groups")
                experts.calls.load_together(runner.join_pass)
            self._report(1.0, "ready")
            return runner

    @torch.inference_mode()
    def read_again(self, runner: ModelRunner) -> ReadModel:
        """Read the weights of `runner`, which were dropped; all of its group's ranks do so at the same time."""
        decoder = self._decoder(self._rank, runner.group)
        scales = tuple(layer.scales for layer in runner.pool.layers if layer.scales is not None)
        rank = replace(decoder.rank, kv_scales=scales)
        shelf = decoder.shelf()
        if shelf is not None and runner.adapters is not None:
            shelf.take_over(runner.adapters)
        fingerprint = fingerprint_of(rank, decoder.model.kv_layout, runner.group)
        return ReadModel(decoder.model, decoder.head, shelf, decoder.vision, fingerprint)

    @property
    def can_prepare(self) -> bool:
        """Whether weights can be read before the ranks meet."""
        return not isinstance(self._rank.checkpoint, TransformersCheckpoint)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Read the weights for `load_prepared`."""
        checkpoint, device = self._rank.checkpoint, self._rank.device
        assert not isinstance(checkpoint, TransformersCheckpoint), "the caller has asked"
        self._weights = read_weights(self._rank.within(self._context), checkpoint, self._report)
        # Waits until all blocks are hashed: after that nothing but heads is read of the files, which may change.
        checkpoint.identity()
        if self._rank.spec.load_format != "dummy":
            self._rank = replace(self._rank, files_identity=identity_of_rank_files(self._rank))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def load_prepared(self, spec: EngineSpec, report: ProgressReport) -> ModelRunner:
        """Load with the weights that `prepare` has read, in the engine's thread."""
        self._rank, self._report = replace(self._rank, spec=spec), report
        if self._rank.device.type == "cuda":
            torch.cuda.set_device(self._rank.device)
        return self.load()

    @property
    def _context(self) -> int:
        return longest_context(self._rank.spec, self._rank.config)

    def _join(self) -> RankGroup:
        rank = self._rank
        spec, config, dtype = rank.spec, rank.config, rank.activation_dtype
        if not spec.is_alone:
            self._report(0.0, "waiting for the other ranks")
        shape = ExchangeShape(dtype, config.hidden_size, spec.max_rows, config.vocabulary_size)
        alike = config, rank.dtype, dtype, rank.held_format
        return join_ranks(spec, rank.device, shape if rank.may_be_captured else None, alike=alike)

    def _decoder(self, rank: RankModel, group: RankGroup) -> LoadedDecoder:
        weights, self._weights = self._weights, None
        context = self._context
        return build_decoder(rank.within(context), group, context, self._report, weights)

    def _load(self, group: RankGroup) -> ModelRunner:
        rank = replace(self._rank, backend=agreed_backend(self._rank.backend, group))
        free_before, context = free_memory(rank.device), self._context
        decoder = self._decoder(rank, group)
        model, rank = decoder.model, decoder.rank
        if rank.kv_dtype == FP8:
            rank = replace(rank, kv_scales=find_kv_scales(decoder, context, self._report))
            decoder = replace(decoder, rank=rank)
        pool, pages = self._allocate(decoder, group, free_before)
        granted = min(context, pages * rank.spec.page_size)
        capacity = decoder_capacity(rank, pool, pages, granted, model.kv_layout, group)
        log.info(
            "model.loaded model=%s device=%s backend=%s dtype=%s weights=%s kv_dtype=%s pages=%d context=%d threads=%d",
            rank.spec.model, rank.device, rank.backend.name, rank.dtype, rank.held_format or "as stored", rank.kv_dtype,
            pages, capacity.max_context, torch.get_num_threads(),
        )  # fmt: skip
        host_pages, host_snapshots = (group.minimum(count) for count in rank.memory.count_host_pages(pool))
        host_pool = allocate_host_pool(pool, host_pages, host_snapshots) if host_pages else None
        runner = ModelRunner(
            model, pool, capacity, group, activation_dtype=rank.activation_dtype, form=_form(decoder, pool),
            is_captured=rank.is_captured, host_pool=host_pool, head=decoder.head, adapters=decoder.shelf(),
            vision=decoder.vision, nixl=rank.options.nixl, read_again=partial(_read_again, rank.spec, rank.options),
            hidden_size=rank.config.hidden_size, takes_turns=rank.options.takes_turns,
        )  # fmt: skip
        if host_pool is not None and runner.transfers is not None:
            self._report(0.99, "measuring prefill and the host tier")
            measured = calibrate(runner, host_pool, runner.transfers, rank.spec.max_step_tokens)
            runner.capacity = measured.added_to(runner.capacity)
        return runner

    def _allocate(self, decoder: LoadedDecoder, group: RankGroup, free_before: int) -> tuple[KvPool, int]:
        """Return the KV pool in the memory that all ranks have left, and how many of its pages may be granted."""
        rank, layout, context = decoder.rank, decoder.model.kv_layout, self._context
        self._report(0.98, "measuring memory" if rank.is_captured else "allocating the KV pool")
        reserve = pass_bytes(decoder, context) + slots_bytes(decoder)
        memory, free = rank.memory, (free_before, free_memory(rank.device))
        pages, window_pages = (group.minimum(count) for count in memory.count_pages(context, free, reserve))
        # One page more than granted ones: padding rows of captured batches write there.
        pool = memory.pool(pages + rank.is_captured, layout, window_pages)
        if rank.config.recurrent is not None:
            # Ranks with other numbers of heads count others.
            pool = replace(pool, states=memory.states(group.minimum(memory.count_snapshots(pages))))
        return pool, pages


def _form(decoder: LoadedDecoder, pool: KvPool) -> PageForm | None:
    """Return the form by which other ranks find their heads in this one's pages, or None if they cannot."""
    rank = decoder.rank
    if not are_cut_alike(rank.kinds):
        return None
    return rank_form(pool, decoder.model.kv_layout, rank.shapes[0], rank.shard, rank.config)


def _read_again(spec: EngineSpec, options: RunnerOptions, runner: ModelRunner, report: ProgressReport) -> ReadModel:
    return DecoderLoader.beside(runner, spec, options, report).read_again(runner)
