"""Models that torch computes: the runner and executor of each kind, and the context of a plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart
from common.types import Pooling
from services.worker.engine.encoder.runner import EncoderExecutor, EncoderRunner
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.interface import OutOfMemoryError, ProgressReport
from services.worker.engine.execution.out_of_memory import is_out_of_memory
from services.worker.engine.execution.staged_executor import StagedExecutor
from services.worker.engine.execution.staged_runner import StagedRunner
from services.worker.engine.execution.synchronous_executor import Runner, SynchronousExecutor
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.grammars.row_masks import RowMasks
from services.worker.engine.grammars.vocabulary_source import VocabularySource
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.plans.plan import PlanLimits
from services.worker.engine.plans.rows import RowStates
from services.worker.engine.sampling.table import SamplingTable
from services.worker.engine.sleeping import release_host_memory, release_memory, used_memory
from services.worker.engine.vision.row_images import RowImages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from common.steps import ExpertLoad
    from services.worker.engine.adapters.shelf import AdapterShelf
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.execution.captured_model import CapturedExecutor
    from services.worker.engine.execution.engine import LoadedModel, LoadModel
    from services.worker.engine.execution.interface import PassCalls, PeerPageCopies
    from services.worker.engine.execution.overlapped_runner import OverlappedRunner
    from services.worker.engine.grammars.library import GrammarLibrary
    from services.worker.engine.host_tier.device_pages import DevicePages
    from services.worker.engine.host_tier.pool import HostPool

log = logging.getLogger(__name__)


class LoadedRunner(Runner, Protocol):
    """A decoder that can sleep, as `ModelRunner` can."""

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> None:
        """Give back weights and pools; see `Engine.sleep`."""

    def wake_weights(self, report: ProgressReport) -> None:
        """Undo `sleep` for the weights."""

    def wake_cache(self) -> None:
        """Undo `sleep` for the pools, which are empty."""


LoadRunner = Callable[[EngineSpec, ProgressReport], LoadedRunner | EncoderRunner]
# 8 products of 2,048 x 2,048 are 137 GFLOP: about a quarter of a millisecond on an H200.
_SIZE = 2048
_PRODUCTS = 8


def torch_engine(
    load: LoadRunner, library: GrammarLibrary | None = None, options: RunnerOptions | None = None
) -> ModelEngine:
    """Return an engine for the models that `load` returns; rows' grammars come from `library`.

    With `options`, those of `load`, other weights can be read ahead.
    """
    return ModelEngine(
        lambda spec, report: TorchModel(load(spec, report), spec, report, library),
        None if options is None else lambda spec, serving: prepare_model(spec, options, serving, library),
    )


def prepare_model(
    spec: EngineSpec, options: RunnerOptions, serving: LoadedModel, library: GrammarLibrary | None = None
) -> LoadModel | None:
    """Read the weights of a decoder beside those of `serving`; see `prepare_decoder`."""
    if not isinstance(serving, TorchModel) or not isinstance(serving.runner, ModelRunner):
        return None
    # Imported here, as tests make models without a loader.
    from services.worker.engine.prepared_weights import prepare_decoder

    prepared = prepare_decoder(spec, options, serving.runner)
    if prepared is None:
        return None
    return lambda its, report: TorchModel(prepared.load(its, report), its, report, library)


class TorchModel:
    """A decoder or an encoder; see `LoadedModel`.

    A decoder on a GPU whose passes are captured gets the runner of `captured_model.py`; every other model gets the
    synchronous one, or that of stages which do not sample.
    """

    def __init__(
        self,
        runner: LoadedRunner | EncoderRunner,
        spec: EngineSpec,
        report: ProgressReport,
        library: GrammarLibrary | None = None,
    ) -> None:
        """Take over `runner`; CUDA graphs are captured here, which `report` follows."""
        self.runner = runner
        self._spec = spec
        self._library = library
        self._warmer: DeviceWarmer | None = None
        self._has_warned_of_cpu = False
        # None: passes are not captured, or this rank sleeps.
        self._executor: CapturedExecutor | None = None
        self._is_captured = False
        self._asleep: set[SleepPart] = set()
        self.encoder = None
        # Of the last runner.
        self.images: RowImages | None = None
        if isinstance(runner, ModelRunner) and runner.is_captured:
            self._is_captured = True
            self._executor = _capture(runner, spec, report)

    @property
    def capacity(self) -> EngineCapacity:
        """The runner's, and whether rows jump forward, drafts are verified and passes can be abandoned.

        Rows do not jump with a sliding-window KV pool, whose pages the scheduler frees by row lengths that it computes
        itself, nor with recurrent layers, whose states it saves at lengths that it chooses. The state after a rejected
        draft could not be taken back either. A pass is abandoned by one rank alone, as several would have to agree
        before each layer, and without recurrent layers, whose saved states later plans rely on.
        """
        capacity = self.runner.capacity
        is_decoder = not isinstance(self.runner, EncoderRunner)
        is_synchronous_decoder = is_decoder and not self._is_captured
        generates = is_decoder and not capacity.only_pools
        has_own_lengths = capacity.window_pool is None and capacity.recurrent_states is None
        jumps = is_synchronous_decoder and self._follows_grammars and has_own_lengths
        verifies = generates and capacity.recurrent_states is None
        abandons = is_synchronous_decoder and self._spec.is_alone and capacity.recurrent_states is None
        return replace(capacity, jumps_forward=jumps, verifies_drafts=verifies, abandons_passes=abandons)

    @property
    def host_pages(self) -> HostPool | None:
        return self.runner.host_pool

    @property
    def device_pages(self) -> DevicePages | None:
        return self.runner.device_pages if isinstance(self.runner, ModelRunner) else None

    @property
    def peer_copies(self) -> PeerPageCopies | None:
        return self.runner.peer_copies if isinstance(self.runner, ModelRunner) else None

    @property
    def adapters(self) -> AdapterShelf | None:
        return self.runner.adapters if isinstance(self.runner, ModelRunner) else None

    def read_expert_load(self) -> ExpertLoad | None:
        counts = self.runner.expert_counts if isinstance(self.runner, ModelRunner) else None
        return None if counts is None else counts.read()

    @property
    def pass_calls(self) -> PassCalls | None:
        return self.runner.pass_calls if isinstance(self.runner, ModelRunner) else None

    def join_pass(self, number: int) -> bool:
        assert isinstance(self.runner, ModelRunner), "encoders share no experts"
        return self.runner.join_pass(number)

    @property
    def ends_with_group(self) -> bool:
        """True on GPUs: NCCL within graphs hangs once a process has met others before (seen with torch 2.11)."""
        distributed = torch.distributed
        return distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "nccl"

    def make_runner(self) -> SynchronousRunner | StagedRunner | OverlappedRunner:
        spec, capacity = self._spec, self.runner.capacity
        window = capacity.window_pool
        head = self.runner.head
        rows = RowStates(
            spec.max_rows,
            capacity.max_context,
            capacity.page_size,
            has_window_pool=window is not None,
            has_states=capacity.recurrent_states is not None,
            head_input=(head and head.input) or Pooling.LAST,
        )
        limits = PlanLimits(
            capacity.vocabulary_size,
            capacity.device_pages,
            spec.max_step_tokens,
            capacity.host_pages,
            is_encoder=capacity.is_encoder,
            head=capacity.head,
            only_pools=capacity.only_pools,
            window_pages=window.pages if window else 0,
            window_tokens=window.window_tokens if window else 0,
            snapshots=capacity.recurrent_states.snapshots if capacity.recurrent_states else 0,
            host_snapshots=capacity.recurrent_states.host_snapshots if capacity.recurrent_states else 0,
            adapters=self.adapters.slots if self.adapters else 0,
        )
        if self.adapters is not None:
            self.adapters.reset()
        if isinstance(self.runner, ModelRunner) and self.runner.expert_counts is not None:
            # What was counted while kernels warmed up.
            self.runner.expert_counts.reset()
        if isinstance(self.runner, EncoderRunner):
            return SynchronousRunner(rows, limits, EncoderExecutor(self.runner))
        images = self.images = self._row_images()
        transfers, is_first, grammars = self.runner.transfers, spec.samples, self._row_masks()
        states = self.runner.states if isinstance(self.runner, ModelRunner) else None
        if self._executor is not None:
            # Imported here because it needs Triton.
            from services.worker.engine.execution.captured_model import make_runner

            return make_runner(
                self._executor, rows, limits, transfers=transfers, states=states, reports_tokens=is_first,
                grammars=grammars, adapters=self.adapters, images=images,
            )  # fmt: skip
        if not spec.is_last_stage:
            assert isinstance(self.runner, ModelRunner), "other models run in one stage"
            return StagedRunner(rows, limits, StagedExecutor(self.runner), transfers=transfers, states=states)
        table = SamplingTable(spec.max_rows, capacity.vocabulary_size, grammars)
        # A pass that has advanced some of the states cannot be computed again in parts.
        is_final = not spec.is_alone or capacity.recurrent_states is not None
        executor = SynchronousExecutor(
            self.runner, table, rank=spec.tensor_rank, is_shared=is_final, images=images,
            has_earlier_stages=spec.stages > 1,
        )  # fmt: skip
        return SynchronousRunner(
            rows, limits, executor, transfers=transfers, states=states, reports_tokens=is_first, adapters=self.adapters,
            images=images,
        )  # fmt: skip

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Run without gradients; errors that mean lack of memory become OutOfMemoryError."""
        try:
            with torch.inference_mode():
                yield
        except OutOfMemoryError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(f"memory does not suffice for a plan: {error}") from error

    def keep_warm(self) -> None:
        """Run a little work on an idle GPU."""
        device = self.runner.device
        if device.type == "cpu":
            if not self._has_warned_of_cpu:
                log.warning("worker.keep_warm_ms changes nothing here: a CPU needs no work to stay fast")
            self._has_warned_of_cpu = True
            return
        if self._warmer is None:
            self._warmer = DeviceWarmer(device)
        self._warmer.run()

    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Drop the CUDA graphs, whose addresses will not be valid, and give back weights and pools."""
        device = self.runner.device
        before = used_memory(device)
        self._asleep = set(SleepPart)
        self._executor = self._warmer = self.images = None
        self.runner.sleep(level, keeps_host_pages=keeps_host_pages)
        release_memory(device)
        return max(before - used_memory(device), 0)

    def wake(self, parts: Collection[SleepPart], report: ProgressReport) -> bool:
        """Restore what `parts` name; CUDA graphs are captured again once all is there."""
        if SleepPart.WEIGHTS in self._asleep.intersection(parts):
            self.runner.wake_weights(report)
        if SleepPart.KV_CACHE in self._asleep.intersection(parts):
            self.runner.wake_cache()
        self._asleep.difference_update(parts)
        if self._asleep:
            return False
        if self._is_captured and isinstance(self.runner, ModelRunner):
            self._executor = _capture(self.runner, self._spec, report)
        return True

    def close(self) -> None:
        """Free the model's memory and leave its group."""
        self._executor = self._warmer = self.images = None
        self.runner.close()
        if self.runner.device.type == "cuda":
            release_host_memory()

    @property
    def _follows_grammars(self) -> bool:
        """Whether this rank, which samples, has a library of grammars."""
        return self._library is not None and self._spec.samples

    def _row_images(self) -> RowImages | None:
        if not isinstance(self.runner, ModelRunner) or self.runner.vision is None:
            return None
        return RowImages(self.runner, self.runner.vision.config)

    def _row_masks(self) -> RowMasks | None:
        if self._library is None or not self._follows_grammars:
            return None
        capacity, spec = self.runner.capacity, self._spec
        self._library.serve(
            VocabularySource(spec.model, spec.load_format, capacity.vocabulary_size, capacity.eos_token_ids)
        )
        return RowMasks(self._library, capacity.vocabulary_size)


def _capture(runner: ModelRunner, spec: EngineSpec, report: ProgressReport) -> CapturedExecutor:
    # Imported here because it needs Triton.
    from services.worker.engine.execution.captured_model import capture

    return capture(runner, spec, report)


class DeviceWarmer:
    """Multiplies matrices of its own on a stream that gives way to all others.

    It touches no rows, no pages and no other rank, so it may run whenever a rank thinks it is idle: a plan that comes
    meanwhile is launched at once, and its kernels go first.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate, on a GPU."""
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, whatever torch's stubs say
        self._stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]  # torch leaves it so
        # Products of zeros: nothing can overflow.
        self._factors = torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        self._product = torch.zeros_like(self._factors)

    def run(self) -> None:
        """Launch the products, unless the last ones are still computed."""
        if not self._stream.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(_PRODUCTS):
                torch.mm(self._factors, self._factors, out=self._product)
