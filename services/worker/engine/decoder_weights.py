"""Reading a decoder's weights on one rank, and putting the model together, with adapters and an encoder of images."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from services.worker.engine.adapters.shelf import AdapterShelf
from services.worker.engine.backends import select_adapter_products
from services.worker.engine.kernels.cpu.layers import fuse_layers
from services.worker.engine.layer_attention import attention_of_layers
from services.worker.engine.measuring.measurements import pages_of, random_prompts
from services.worker.engine.model.assembly import Assembler, without_adapters
from services.worker.engine.model.kv_scales import MEASURED_TOKENS, measured_scales, stored_scales
from services.worker.engine.model.rotary import AxisAngles, rotary_table
from services.worker.engine.model.tensors import CheckedTensors
from services.worker.engine.model.transformer import Transformer
from services.worker.engine.parallel.expert_exchange import exchange_with
from services.worker.engine.parallel.expert_group import ExpertGroup
from services.worker.engine.parallel.expert_load import count_experts
from services.worker.engine.pooler_heads import read_pooler_head
from services.worker.engine.quantization.policy import quantiser
from services.worker.engine.transformers_models.checkpoint import TransformersCheckpoint
from services.worker.engine.transformers_models.decoder import TransformersDecoder, pages_to_check
from services.worker.engine.vision.registry import load_vision

if TYPE_CHECKING:
    from services.worker.engine.adapters.active import AdapterProducts
    from services.worker.engine.checkpoints.interface import Checkpoint
    from services.worker.engine.execution.interface import ProgressReport
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.kernels.interface import AttentionBackend, KvScales
    from services.worker.engine.model.decoder import Decoder
    from services.worker.engine.model.transformer import TransformerWeights
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.rank_model import RankModel
    from services.worker.engine.vision.encoder import VisionEncoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder, those of its vision encoder, and the sites of adapters in the layers."""

    layers: TransformerWeights
    vision: VisionEncoder | None
    adapters: AdapterProducts | None


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder with its weights on the device."""

    # With what was found out while they were read.
    rank: RankModel
    model: Decoder
    head: PoolerHead | None = None
    vision: VisionEncoder | None = None
    adapters: AdapterProducts | None = None

    def shelf(self) -> AdapterShelf | None:
        """Return the place of adapters, if the model is to have any and can."""
        if self.adapters is None:
            return None
        return AdapterShelf(self.adapters, self.rank.config, self.rank.activation_dtype, self.rank.device)


def read_weights(
    rank: RankModel, checkpoint: Checkpoint, report: ProgressReport, experts: ExpertGroup | None = None
) -> DecoderWeights:
    """Read the weights of this rank; `experts` are the groups with which it shares those of mixtures.

    Raises:
        ConfigurationError: they are not those of the model, or its encoder of images is not supported.
    """
    spec, kernels, device = rank.spec, rank.backend.kernels, rank.device
    tensors = CheckedTensors(checkpoint, device, quantiser(spec, rank.config))
    adapters = select_adapter_products(rank.backend, spec, device) if spec.adapter_slots else None
    vision = None
    if rank.vision is not None:
        try:
            vision = load_vision(checkpoint, rank.vision, kernels, device)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; model.images=off serves the model without its encoder") from error
    held = tuple(rank.shard_of(tensor_rank).experts for tensor_rank in range(spec.tensor_ranks))
    assembler = Assembler(
        tensors, rank.shard, kernels, rank.dtype, device, rank.has_vocabulary, rank.layers, adapters,
        count_experts(spec, rank.part, held, device), exchange_with(experts, rank.part, rank.activation_dtype, device),
        rank.local_shard,
    )  # fmt: skip
    return DecoderWeights(assembler.weights(lambda share: report(0.98 * share, "loading weights")), vision, adapters)


def build_decoder(
    rank: RankModel, group: RankGroup, context: int, report: ProgressReport, ahead: DecoderWeights | None = None
) -> LoadedDecoder:
    """Put the model together for sequences of up to `context` tokens; reads its weights unless they were read `ahead`.

    Raises:
        ConfigurationError: the files do not have what the configuration names.
    """
    if isinstance(rank.checkpoint, TransformersCheckpoint):
        decoder = _traced(rank, rank.checkpoint, group, context, report)
    else:
        experts = group if isinstance(group, ExpertGroup) else None
        weights = ahead or read_weights(rank, rank.checkpoint, report, experts)
        decoder = _assembled(rank, weights, group, context, report)
    rank = decoder.rank
    return replace(
        decoder, head=read_pooler_head(rank.checkpoint, rank.head, rank.config, rank.spec.model, rank.device)
    )


def find_kv_scales(decoder: LoadedDecoder, context: int, report: ProgressReport) -> tuple[KvScales, ...]:
    """Return the scales of keys and values in FP8: the checkpoint's, or else measured on fixed tokens."""
    rank = decoder.rank
    spec, device = rank.spec, rank.device
    if not isinstance(rank.checkpoint, TransformersCheckpoint):
        local = rank.local_shard or rank.shard
        scales = stored_scales(rank.checkpoint, (rank.shard.kv_heads, local.kv_heads), rank.layers, device)
        if scales:
            log.info("model.kv_scales source=checkpoint")
            return scales
    report(0.98, "measuring scales of keys and values")
    length = min(MEASURED_TOKENS, spec.max_step_tokens, context)
    batch = random_prompts([length], spec.page_size, rank.config.vocabulary_size, device)
    pool = rank.memory.unquantised_pool(pages_of([length], spec.page_size), decoder.model.kv_layout)
    decoder.model.forward(batch, pool)
    log.info("model.kv_scales source=measured tokens=%d", length)
    return measured_scales(pool, decoder.model.kv_layout)


def _assembled(
    rank: RankModel, read: DecoderWeights, group: RankGroup, context: int, report: ProgressReport
) -> LoadedDecoder:
    spec, weights = rank.spec, read.layers
    if rank.backend.name == "gpu":
        report(0.98, "preparing products, which takes longest the first time")
    rank.backend.prepare(spec.max_step_tokens)
    vocabulary = tuple(rank.shard_of(tensor_rank).vocabulary for tensor_rank in range(spec.tensor_ranks))
    attention, (*inner, last) = _attention(rank, context), weights.layers
    # Several ranks add up what their parts of a layer contribute: no one call.
    if spec.tensor_ranks == 1 and last.input_norm is not None:
        bare = [without_adapters(layer) for layer in inner]
        joined = fuse_layers(bare, attention, last.input_norm, rank.config.norm_epsilon)
        weights = replace(weights, joined=joined)
    model = Transformer(
        weights, rank.part, vocabulary, kernels=rank.backend.kernels, attention=attention, group=group,
        adapters=read.adapters, angles=_axis_angles(rank, context),
    )  # fmt: skip
    return LoadedDecoder(rank, model, vision=read.vision, adapters=read.adapters)


def _traced(
    rank: RankModel, checkpoint: TransformersCheckpoint, group: RankGroup, context: int, report: ProgressReport
) -> LoadedDecoder:
    report(0.0, "loading weights")
    model = TransformersDecoder(checkpoint, rank.dtype, rank.device, group)
    # Heads, scales and windows are known only after tracing.
    rank = replace(rank, config=model.config)
    model.use(_attention(rank, context), rank.activation_dtype)
    report(0.97, "comparing attention")
    pool = rank.memory.unquantised_pool(pages_to_check(rank.spec.page_size), model.kv_layout)
    model.check(pool)
    if rank.may_be_captured:
        obstacle = model.obstacle_to_graphs(pool)
        rank = replace(rank, can_be_captured=obstacle is None)
        if obstacle is not None:
            log.warning(
                "%r runs without CUDA graphs, many times slower with few rows: %s", rank.config.family, obstacle
            )
    return LoadedDecoder(rank, model)


def _attention(rank: RankModel, context: int) -> list[AttentionBackend]:
    return attention_of_layers(rank.backend, rank.part, rank.shapes, context, rank.device)


def _axis_angles(rank: RankModel, context: int) -> AxisAngles | None:
    """Return the angles of tokens of images; None: their positions are as those of texts."""
    vision, config = rank.vision, rank.config
    if vision is not None and len(vision.deep_layers) >= config.layers:
        raise ConfigurationError(f"vision_config: embeddings for more than the {config.layers - 1} first layers")
    if vision is None or not vision.axes:
        return None
    return AxisAngles(rotary_table(config.rotary, config.rotary_dim, context, rank.device), vision.axes)
