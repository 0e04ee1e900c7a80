"""The engine that runs a model: row state here, the forward pass in the model runner, then the sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from common.steps import EngineCapacity, EngineSpec, RowOpen, StepPlan
from services.worker.engine.encoder.runner import EncoderRunner, EncoderStepper
from services.worker.engine.engine import Emit, OutOfMemoryError, ProgressReport
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.engine.measuring.warm_up import warm_up
from services.worker.engine.model.batch import ForwardBatch
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plans.lagged_plan_runner import LaggedPlanRunner
from services.worker.engine.plans.passes import ForwardPass, HostBatch, gather
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.plan_runner import PlanRunner, Sampled, join
from services.worker.engine.plans.rows import RowTable
from services.worker.engine.plans.scoring import RowSpans, Scored, ScoringTable, with_scored
from services.worker.engine.pooler import Pooler, with_pooled
from services.worker.engine.sampling.forcing import empty_told, split_forced, with_forced
from services.worker.engine.sampling.prompt_scores import score
from services.worker.engine.sampling.sampler import Samples, sample
from services.worker.engine.sampling.table import SamplingTable
from services.worker.engine.shortage import compute_in_parts, is_out_of_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.worker.engine.gpu.gpu_stepper import GpuStepper
    from services.worker.engine.gpu.keep_warm import DeviceWarmer
    from services.worker.engine.grammars.library import GrammarLibrary
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.host_tier.transfers import Transfers


class Runner(Protocol):
    """One rank's model, as `ModelRunner` implements it."""

    capacity: EngineCapacity
    device: torch.device
    host_pool: HostPool | None
    transfers: Transfers | None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return logits of the batch's samples, [samples, vocabulary] float32; the caller may overwrite them."""

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a pass, but return what the logits of its samples are made of, [samples, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states [samples, hidden], as `forward` does, in any float type."""

    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `token_ids` on every rank."""

    def close(self) -> None:
        """Give everything back."""


log = logging.getLogger(__name__)

# Bytes, of what travels to a device together.
_ALIGNMENT = 16

LoadRunner = Callable[[EngineSpec, ProgressReport], Runner | EncoderRunner]


class TorchEngine:
    """Runs plans with a model runner; see `Engine`."""

    def __init__(self, load_runner: LoadRunner, library: GrammarLibrary | None = None) -> None:
        """Prepare; `load_runner` loads what is configured, in the calling thread. `library` has rows' grammars."""
        self._load_runner = load_runner
        self._library = library
        self._spec: EngineSpec | None = None
        self._runner: Runner | EncoderRunner | None = None
        self._stepper: GpuStepper | None = None
        self._warmer: DeviceWarmer | None = None
        self._has_told_of_cpu = False
        self._plans: PlanRunner | LaggedPlanRunner | None = None

    @property
    def open_rows(self) -> int:
        """How many row slots are taken."""
        return self._plans.rows.open_count if self._plans else 0

    @property
    def host_pages(self) -> HostPool | None:
        """The host tier's pages, None without one; other threads may touch them until `reset` or `close`."""
        return self._runner.host_pool if self._runner else None

    @property
    def ends_with_group(self) -> bool:
        """True on GPUs: NCCL within graphs hangs once a process has met others before (seen with torch 2.11)."""
        distributed = torch.distributed
        return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "nccl"

    def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Load the model, unless the very same one is loaded; see `Engine.configure`."""
        if self._runner is None or not self._is_loaded(spec):
            self.close()
            self._runner = self._load_runner(spec, report)
            self._spec = spec
        capacity = self._runner.capacity
        window = capacity.window_pool
        rows = RowTable(spec.max_rows, capacity.max_context, capacity.page_size, has_window_pool=window is not None)
        limits = PlanLimits(
            capacity.vocabulary_size,
            capacity.device_pages,
            spec.max_step_tokens,
            capacity.host_pages,
            is_encoder=capacity.is_encoder,
            window_pages=window.pages if window else 0,
            window_tokens=window.window_tokens if window else 0,
        )
        if isinstance(self._runner, EncoderRunner):
            self._plans = PlanRunner(rows, limits, EncoderStepper(self._runner))
            return capacity
        transfers, is_first = self._runner.transfers, spec.rank == 0
        grammars = self._row_masks(spec, capacity)
        if isinstance(self._runner, ModelRunner) and self._runner.is_resident:
            stepper = self._stepper or self._make_gpu_stepper(self._runner, spec, report)
            stepper.heed(grammars)
            self._plans = LaggedPlanRunner(rows, limits, stepper, transfers=transfers, reports_tokens=is_first)
            return capacity
        table = SamplingTable(spec.max_rows, capacity.vocabulary_size, grammars)
        plain = TorchStepper(self._runner, table, rank=spec.rank, is_shared=spec.world_size > 1)
        self._plans = PlanRunner(rows, limits, plain, transfers=transfers, reports_tokens=is_first)
        # Where layers have windows of their own, the scheduler gives back what it thinks that no row sees any more.
        return replace(capacity, jumps_forward=grammars is not None and window is None)

    def _row_masks(self, spec: EngineSpec, capacity: EngineCapacity) -> RowMasks | None:
        """Return what follows rows' grammars, on the rank that samples."""
        if self._library is None or spec.rank != 0:
            return None
        self._library.serve(
            VocabularySource(spec.model, spec.load_format, capacity.vocabulary_size, capacity.eos_token_ids)
        )
        return RowMasks(self._library, capacity.vocabulary_size)

    def _make_gpu_stepper(self, runner: ModelRunner, spec: EngineSpec, report: ProgressReport) -> GpuStepper:
        # Only here: it imports Triton.
        from services.worker.engine.gpu.gpu_stepper import GpuStepper

        with torch.inference_mode():
            stepper = GpuStepper(runner, spec)
            stepper.capture(lambda share: report(0.99 + 0.01 * share, "capturing graphs"))
            warm_up(stepper, runner.capacity, spec)
        self._stepper = stepper
        return stepper

    def execute(self, plan: StepPlan, emit: Emit) -> None:
        """Run a plan; see `Engine.execute`."""
        assert self._plans is not None, "execute before configure"
        try:
            with torch.inference_mode():
                self._plans.run(plan, emit)
        except OutOfMemoryError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(f"memory does not suffice for a plan: {error}") from error

    def settle(self, is_wanted: Callable[[], bool]) -> None:
        """Emit what is still computed; see `Engine.settle`."""
        if self._plans is not None:
            self._plans.settle(is_wanted)

    def keep_warm(self) -> None:
        """Let an idle GPU do a little; see `Engine.keep_warm`."""
        if self._runner is None:
            return
        device = self._runner.device
        if device.type == "cpu":
            if not self._has_told_of_cpu:
                log.warning("worker.keep_warm_ms changes nothing here: a CPU needs no work to stay fast")
            self._has_told_of_cpu = True
            return
        if self._warmer is None:
            from services.worker.engine.gpu.keep_warm import DeviceWarmer

            self._warmer = DeviceWarmer(device)
        self._warmer.run()

    def reset(self) -> None:
        """Free all rows."""
        if self._plans is not None:
            self._plans.reset()

    def close(self) -> None:
        """Give back the model's memory and its group."""
        runner, self._runner, self._plans, self._spec = self._runner, None, None, None
        self._stepper = self._warmer = None
        if runner is not None:
            runner.close()

    def _is_loaded(self, spec: EngineSpec) -> bool:
        assert self._runner is not None, "asked of a loaded engine"
        if self._spec is None or spec.world_size > 1:
            # Whether the other ranks still belong to our group cannot be known from here: all of them meet anew.
            return False
        # A scheduler that lost its worker asks for as many pages as it was once given.
        capacity = self._runner.capacity
        return (
            spec.device_pages in (self._spec.device_pages, capacity.device_pages)
            and spec.host_pages in (self._spec.host_pages, capacity.host_pages)
            and spec.window_pages in (self._spec.window_pages, capacity.window_pool and capacity.window_pool.pages)
            and _without_pages(spec) == _without_pages(self._spec)
        )


def _without_pages(spec: EngineSpec) -> EngineSpec:
    return replace(spec, device_pages=None, host_pages=None, window_pages=None)


class TorchStepper:
    """Computes passes with a model runner. Rank 0 samples, and the others learn from it what came out."""

    def __init__(self, runner: Runner, table: SamplingTable, rank: int, *, is_shared: bool = False) -> None:
        """Use `runner`, which `is_shared` with other ranks; rows' sampling parameters go into `table`."""
        self._runner = runner
        self._table = table
        self._scoring = ScoringTable()
        self._pooler = Pooler()
        self._rank = rank
        self._is_shared = is_shared

    def open(self, opened: RowOpen) -> None:
        """Take note of a row's sampling parameters."""
        self._table.open(opened)
        self._scoring.open(opened)
        self._pooler.open(opened)

    def step(self, rows: RowTable, forward: ForwardPass) -> Sampled:
        """Run one pass, in parts if memory does not suffice."""
        made = compute_in_parts(forward, lambda part: self._step(rows, part), is_shared=self._is_shared)
        return join(forward, [sampled for _, sampled in made.parts], made.failed)

    def _step(self, rows: RowTable, forward: ForwardPass) -> Sampled:
        logits, prompt_logprobs = self._compute(gather(rows, forward), self._scoring.of(rows, forward))
        embeddings = self._pooler.finish(forward.pooled_rows) if self._rank == 0 else ()
        slots = forward.sampled_rows
        if slots.size == 0:
            return Sampled(embeddings=embeddings, prompt_logprobs=prompt_logprobs)
        room = rows.jump_room(slots)
        if self._rank == 0:
            samples = sample(logits, slots, rows, self._table)
            told = with_forced(samples.token_ids, slots, rows, self._table, room)
        else:
            told = empty_told(slots, room, self._runner.device)
            samples = Samples(told)
        chosen, forced = split_forced(self._runner.broadcast_tokens(told), slots)
        return Sampled(chosen, samples.logprobs, embeddings, prompt_logprobs=prompt_logprobs, forced=forced)

    def _compute(self, batch: HostBatch, scored: Sequence[Scored]) -> tuple[torch.Tensor, RowSpans]:
        """Return logits of the batch's samples, and log probabilities of prompt tokens; pool what is to be pooled."""
        if not scored and not batch.pooled_indices.size:
            return self._runner.forward(to_device(batch, self._runner.device)), ()
        samples, pooled = batch.sample_indices.size, batch.pooled_indices.size
        wanted = with_pooled(with_scored(batch, scored))
        hidden = self._runner.hidden_states(to_device(wanted, self._runner.device))
        if pooled and self._rank == 0:
            self._pooler.add(batch.pooled_slots, hidden[-pooled:])
        if not scored:
            return self._runner.logits(hidden[:samples]).float(), ()
        vocabulary_size, is_first = self._table.vocabulary_size, self._rank == 0
        unpooled = hidden[samples : len(hidden) - pooled]
        spans = score(unpooled, scored, vocabulary_size, self._runner.logits, is_first=is_first)
        return self._runner.logits(hidden[:samples]).float(), spans


def to_device(batch: HostBatch, device: torch.device) -> ForwardBatch:
    """Return the batch as tensors on `device`, in two transfers whatever the number of fields."""
    # Fields of one type travel packed in one buffer.
    longs = (batch.token_ids, batch.positions, batch.write_slots, batch.sample_indices)
    ints = (batch.query_starts, batch.key_lengths, batch.page_table)
    window_longs = () if batch.window_slots is None else (batch.window_slots,)
    window_ints = () if batch.window_table is None else (batch.window_table,)
    token_ids, positions, write_slots, sample_indices, *window_slots = _transfer((*longs, *window_longs), device)
    query_starts, key_lengths, page_table, *window_table = _transfer((*ints, *window_ints), device)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        key_lengths=key_lengths,
        page_table=page_table,
        write_slots=write_slots,
        sample_indices=sample_indices,
        decode_rows=batch.decode_rows,
        max_query_length=batch.max_query_length,
        max_key_length=batch.max_key_length,
        window_table=window_table[0] if window_table else None,
        window_slots=window_slots[0] if window_slots else None,
    )


def _transfer(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Each begins at the same alignment whatever the others' sizes: programs are compiled for what they are given.
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT // array.itemsize for array in arrays]).tolist()
    packed = torch.empty(ends[-1], dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=True)
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = torch.from_numpy(array.ravel())
    sent = packed.to(device, non_blocking=True)
    return [sent[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]
