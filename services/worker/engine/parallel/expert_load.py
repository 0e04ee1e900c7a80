"""Numbers of tokens that the router gives each expert, and the rank that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.steps import ExpertLoad
from services.worker.engine.quantization.formats import Fp8Format

if TYPE_CHECKING:
    from common.steps import EngineSpec
    from services.worker.engine.model.config import ModelConfig
    from services.worker.engine.parallel.shards import Span


class ExpertCounts:
    """Counts of the tokens that chose each expert since `reset`, in the layers of this rank's stage.

    Every rank routes all tokens of its stage, so its counts are those of all ranks. Padding of captured batches counts
    as tokens do, since it is computed as they are.
    """

    @torch.inference_mode()
    def __init__(self, layers: int, experts: int, held: tuple[Span, ...], rank: int, device: torch.device) -> None:
        """Count for `layers` mixtures of `experts`, of which each rank has those in `held`."""
        self._counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self._held = held
        self._rank = rank
        self._given = 0

    def of_next_layer(self) -> torch.Tensor:
        """Return the counts [experts] int64 of one more layer, which its `DividedExperts` advances."""
        self._given += 1
        return self._counts[self._given - 1]

    @torch.inference_mode()
    def reset(self) -> None:
        """Start again from zero."""
        self._counts.zero_()

    @torch.inference_mode()
    def read(self) -> ExpertLoad:
        """Return the counts; waits for a GPU, so it belongs to the thread that launches passes."""
        counts = self._counts.cpu()
        own = self._held[self._rank]
        by_rank = torch.stack([counts[:, span.scaled(1)].sum(dim=1) for span in self._held], dim=1)
        busiest, all_tokens = int(by_rank.max(dim=1).values.sum()), int(by_rank.sum())
        return ExpertLoad(
            first=own.start,
            tokens=tuple(counts[:, own.scaled(1)].sum(dim=0).tolist()),
            imbalance=busiest * len(self._held) / all_tokens if all_tokens else 1.0,
        )


def count_experts(
    spec: EngineSpec, part: ModelConfig, held: tuple[Span | None, ...], device: torch.device
) -> ExpertCounts | None:
    """Return the counts of the stage `part`, whose ranks have the experts in `held`; None: experts are not divided."""
    moe = part.moe
    if moe is None or not spec.expert_parallel:
        return None
    mixtures = sum(part.moe_of(layer) is not None for layer in range(part.layers))
    spans = tuple(span for span in held if span is not None)
    return ExpertCounts(mixtures, moe.experts, spans, spec.tensor_rank, device)


def check_experts(spec: EngineSpec, config: ModelConfig, backend: str, *, is_own: bool) -> None:
    """Raise ConfigurationError for what whole experts do not support; `is_own`: the model has an implementation here.

    `shard_model` and `share_experts` check their number.
    """
    setting = "scheduler.data_parallel" if spec.data_parallel_size > 1 else "scheduler.expert_parallel"
    if not is_own:
        raise ConfigurationError(
            f"{setting}: {config.family} runs through transformers, whose experts cannot be distributed; use "
            + ("more groups" if spec.data_parallel_size > 1 else "tensor parallelism")
        )
    if spec.data_parallel_size > 1 and (spec.world_size > 1 or spec.expert_parallel):
        raise ConfigurationError(
            f"scheduler.data_parallel: groups that share experts have one worker each, not {spec.world_size}; "
            "experts are distributed over all groups, without scheduler.expert_parallel and scheduler.pipeline_parallel"
        )
    if spec.adapter_slots:
        raise ConfigurationError(
            f"{setting} and scheduler.adapters.slots={spec.adapter_slots}: adapters of whole experts "
            "are not supported; use tensor parallelism"
        )
    stored = config.stored_format
    if backend == "gpu" and isinstance(stored, Fp8Format) and stored.has_input_scales:
        # A GPU's experts share the largest scale of their inputs, which would be another one on each rank.
        raise ConfigurationError(
            f"{setting}: FP8 with static scales of activations is not supported on GPUs; use tensor "
            "parallelism, or a checkpoint with dynamic scales"
        )
