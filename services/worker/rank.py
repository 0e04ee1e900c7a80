"""The state of a rank: loading, running the plans of one stream, or neither."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from common.errors import ConfigurationError, InvalidRequestError, UnavailableError
from common.logs import get_logger
from common.steps import StepResult
from services.worker import metrics
from services.worker.adapter_reader import AdapterReader
from services.worker.engine.execution.interface import ExpertGroupError, InvalidPlanError, OutOfMemoryError
from services.worker.expert_metrics import ExpertMetrics
from services.worker.pass_follower import PassFollower
from services.worker.peers.encodings import EncodingQueue
from services.worker.peers.leases import PageLeases
from services.worker.profiles import ProfileRules, Profiles
from services.worker.session import EngineThread, ExecuteSession, SessionEndedError
from services.worker.states import WorkerSnapshot, WorkerState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
    from typing import NoReturn

    from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart, StepPlan
    from common.types import EncoderOutputId, RowImage
    from services.worker.engine.execution.interface import (
        AfterPasses,
        Engine,
        PassCalls,
        ProgressReport,
    )
    from services.worker.profiles import ProfileRecorder

    # Of the loaded model and of another one; returns the bytes of its weights, or raises ConfigurationError.
    CheckWeights = Callable[[EngineSpec, EngineSpec], int]

T = TypeVar("T")
# Far longer than any plan: a thread that is still busy then hangs.
STUCK_AFTER_S = 30.0
JOIN_TIMEOUT_S = 5.0
# A scheduler that lives opens a stream far sooner after the last one or after loading.
UNUSED_S = 2.0
UNUSED_POLL_S = 0.2


class NotReadyError(Exception):
    """The request does not fit the rank's state."""


class SupersededError(Exception):
    """The stream gave way to a newer one, or to another configuration."""


@dataclass(slots=True)
class _Loading:
    """A configuration in progress; it goes on when the caller that `report` belongs to goes away."""

    spec: EngineSpec
    report: ProgressReport | None
    done: asyncio.Future[EngineCapacity]
    started: asyncio.Event = field(default_factory=asyncio.Event)


class Rank:
    """Owns the engine and its thread. Methods belong to the event loop unless they say otherwise."""

    def __init__(
        self,
        engine: Engine,
        stuck_after_s: float = STUCK_AFTER_S,
        profile_rules: ProfileRules | None = None,
        keep_warm_s: float = 0.0,
        check_weights: CheckWeights = lambda _loaded, _replacement: 0,
    ) -> None:
        """Take over `engine`, which only this object uses from now on.

        Idle, it is kept warm every `keep_warm_s` seconds; 0: it is not.
        """
        self._check_weights = check_weights
        # Set if a restart is needed: the thread hangs, or has left a group that it cannot rejoin.
        self.needs_new_process = asyncio.Event()
        self._engine = engine
        self._stuck_after_s = stuck_after_s
        self._thread = EngineThread(self._keep_warm, keep_warm_s) if keep_warm_s else EngineThread()
        self._loop = asyncio.get_running_loop()
        self._state = WorkerState.IDLE
        self._spec: EngineSpec | None = None
        self._capacity: EngineCapacity | None = None
        self._loading: _Loading | None = None
        self._session: ExecuteSession | None = None
        self._finished_passes = 0
        self._expert_metrics = ExpertMetrics()
        self._follower = PassFollower(engine, self._thread.submit, self._report_experts, self._lose_experts)
        self.adapters = AdapterReader(lambda: engine.adapters)
        self._sleep_level: SleepLevel | None = None
        # Kept, as a task that only its loop refers to may be collected.
        self._changing: asyncio.Task[object] | None = None
        self.leases = PageLeases(lambda: engine.device_pages)
        self.encodings = EncodingQueue(self._encode)
        self._log = get_logger("rank")
        self.profiles = Profiles(profile_rules or ProfileRules(), _make_recorder, self._thread.call)
        self._thread.start()

    @property
    def has_session(self) -> bool:
        """Whether a scheduler has a stream of plans open."""
        return self._session is not None

    def snapshot(self) -> WorkerSnapshot:
        """Return the rank's current state."""
        return WorkerSnapshot(
            self._state, self._spec, self._capacity, self._engine.open_rows, self._finished_passes,
            self._thread.heartbeat_age_s, 0 if self._session is None else self._session.open_plans,
            self._sleep_level if self._state is WorkerState.SLEEPING else None,
        )  # fmt: skip

    async def configure(self, spec: EngineSpec, report: ProgressReport) -> EngineCapacity:
        """Load what `spec` names, ending the stream that runs; `report` is called on the event loop.

        If the caller is cancelled, loading goes on, and the next caller with the same spec joins in.

        Raises:
            NotReadyError: another configuration is in progress.
            UnavailableError: the engine's thread hangs.
            Exception: what kept the engine from loading.
        """
        loading = self._loading
        if loading is None:
            loading = self._start_loading(spec, report)
        elif loading.report is not None or loading.spec != spec:
            raise NotReadyError("another Configure is in progress")
        loading.report = report
        try:
            await self._wait_until_started(loading)
            return await asyncio.shield(loading.done)
        finally:
            loading.report = None

    async def check_weights(self, model: str, load_format: str) -> int:
        """Check that other weights can replace the loaded ones, beside plans; return their bytes.

        Raises:
            NotReadyError: no model is loaded.
            ConfigurationError: they cannot.
        """
        replacement = self._replacement(model, load_format)
        assert self._spec is not None, "it is replaced"
        return await asyncio.to_thread(self._check_weights, self._spec, replacement)

    async def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Give back KV memory and weights between two plans, also if the caller is cancelled; return the bytes freed.

        Raises:
            NotReadyError: no model is loaded, or rows are open.
            UnavailableError: it failed; the rank has to be configured again.
        """
        if self._state not in (WorkerState.READY, WorkerState.SLEEPING):
            raise NotReadyError(f"the rank is {self._state.value}, configure it first")
        if self._engine.open_rows:
            raise NotReadyError("rows are open")
        self.leases.revoke_all()
        sleep = functools.partial(self._engine.sleep, level, keeps_host_pages=keeps_host_pages)
        changing = asyncio.create_task(self._change(sleep, lambda _freed: WorkerState.SLEEPING))
        self._changing, self._sleep_level = changing, level
        return await asyncio.shield(changing)

    async def wake_up(self, parts: Collection[SleepPart]) -> bool:
        """Restore parts of what `sleep` has given back; return whether all are back, so that plans may follow.

        Raises:
            NotReadyError: no model is loaded.
            UnavailableError: it failed; the rank has to be configured again.
        """
        if self._state is WorkerState.READY:
            return True
        if self._state is not WorkerState.SLEEPING:
            raise NotReadyError(f"the rank is {self._state.value}, configure it first")
        wake = functools.partial(self._engine.wake, parts, lambda _share, _stage: self._thread.beat())
        changing = asyncio.create_task(
            self._change(wake, lambda awake: WorkerState.READY if awake else WorkerState.SLEEPING)
        )
        self._changing = changing
        return await asyncio.shield(changing)

    async def _change(self, command: Callable[[], T], state_after: Callable[[T], WorkerState]) -> T:
        """Run a command that leads to another state, unless the rank is configured meanwhile."""
        before = self._state
        try:
            outcome = await self._thread.call(command)
        except Exception as error:
            self._log.exception("engine.sleep_failed")
            if self._state is before:
                self._set_state(WorkerState.FAILED)
                self._thread.submit(self._close_engine)
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        if self._state is before:
            self._set_state(state_after(outcome))
        return outcome

    async def prepare_weights(self, model: str, load_format: str) -> bool:
        """Read other weights beside the loaded ones and beside plans, for the next `configure`; return whether it did.

        Raises:
            NotReadyError: no model is loaded.
            ConfigurationError: they cannot be read, or their files have changed meanwhile.
        """
        replacement = self._replacement(model, load_format)
        if self._engine.ends_with_group:
            return False  # a new process will read them
        return await asyncio.to_thread(self._engine.prepare, replacement)

    def drop_prepared_weights(self) -> None:
        """Forget what `prepare_weights` has read."""
        self._engine.drop_prepared()

    def _replacement(self, model: str, load_format: str) -> EngineSpec:
        spec = self._spec
        if spec is None or self._state is not WorkerState.READY:
            raise NotReadyError(f"the rank is {self._state.value}, configure it first")
        return replace(spec, model=model, load_format=load_format or spec.load_format)

    async def grant_pages(self, lease: bytes, pages: Iterable[int], snapshots: Iterable[int] = ()) -> None:
        """Let workers of other groups read pages and snapshots under a lease; see `PageLeases`.

        Snapshots are granted once the plans so far have saved them: the scheduler hears of a plan's tokens from one
        rank, and others may not have come as far.

        Raises:
            NotReadyError: no stream of plans is open, or the rank sleeps, so no scheduler holds the pages.
            InvalidRequestError: the lease's name is invalid, or this rank has no such pages or snapshots.
        """
        session = self._session
        if session is None or self._capacity is None:
            raise NotReadyError("no stream of plans is open")
        if self._state is not WorkerState.READY:
            raise NotReadyError(f"the rank is {self._state.value}, and its pages hold nothing")
        known = list(pages)
        if known and max(known) >= self._capacity.device_pages:
            raise InvalidRequestError(f"a page outside [0, {self._capacity.device_pages})", param="device_pages")
        lent, states = list(snapshots), self._capacity.recurrent_states
        if lent and max(lent) >= (states.snapshots if states else 0):
            raise InvalidRequestError("there is no such snapshot", param="device_snapshots")
        if lent:
            await self._until_passes_end()
            if self._session is not session or self._state is not WorkerState.READY:
                raise NotReadyError("the stream of plans has ended")
        self.leases.grant(lease, known, lent)

    async def _until_passes_end(self) -> None:
        """Wait until the plans that were received have been carried out, on the device as well."""

        def launched() -> AfterPasses | None:
            pages = self._engine.device_pages
            return None if pages is None else pages.after_passes()

        after = await self._thread.call(launched)
        if after is not None:
            await asyncio.to_thread(after)

    async def keep_embeddings(
        self, output: EncoderOutputId, count: int, read: Callable[[int], Awaitable[memoryview]]
    ) -> None:
        """Keep `count` embeddings as an output; `read` reads as many bytes from the worker that has encoded them.

        Raises:
            NotReadyError: no stream of plans is open, or the model sees no images.
            UnavailableError: the stream of plans has ended meanwhile; nothing is kept.
            PandoError: the embeddings could not be read.
        """
        session, capacity = self._session, self._capacity
        if session is None or capacity is None or not capacity.embedding_bytes:
            raise NotReadyError("no stream of plans with images is open")
        content = await read(count * capacity.embedding_bytes)

        def keep() -> bool:
            images = self._engine.images
            # What ends the stream frees everything after that, on this thread.
            if session.is_ended or images is None:
                return False
            images.keep(output, content)
            return True

        if not await self._thread.call(keep):
            raise UnavailableError("the stream of plans has ended")

    def check_encoder(self, identity: str) -> None:
        """Check that the loaded encoder has an identity; an empty one is not checked.

        Raises:
            UnavailableError: it has another one, or none is loaded.
        """
        if identity and (self._capacity is None or self._capacity.encoder_identity != identity):
            raise UnavailableError("this worker has loaded another encoder, as it may encode for several groups")

    async def _encode(self, images: Sequence[RowImage]) -> list[memoryview]:
        """Encode images for other ranks, on the engine's thread."""

        def encode() -> list[memoryview]:
            if self._state is not WorkerState.READY or self._engine.encoder is None:
                raise UnavailableError("this worker does not encode images for others now")
            self._thread.beat()
            return self._engine.encoder.encode(images)

        encoded = await self._thread.call(encode)
        metrics.ENCODED_IMAGES_TOTAL.inc(len(images))
        return encoded

    def open_session(self) -> ExecuteSession:
        """Begin a stream of plans with no rows open; a stream that is open gives way.

        Raises:
            NotReadyError: the rank is not configured.
        """
        if self._session is not None:
            self._end_session(self._session, SupersededError("a newer Execute stream took over"))
        if self._state is not WorkerState.READY:
            raise NotReadyError(f"the rank is {self._state.value}, configure it first")
        self._session = ExecuteSession(self._dispatch)
        return self._session

    def close_session(self, session: ExecuteSession) -> None:
        """End a stream and free its rows, unless that has happened already."""
        if session is self._session:
            self._end_session(session, None)

    async def unload_when_unused(self) -> NoReturn:
        """Give back everything whenever no scheduler has used the awake model for a while, until cancelled.

        The models that share the device can go on then, when the scheduler of this one has died in its turn.
        """
        unused_since: float | None = None
        while True:
            await asyncio.sleep(UNUSED_POLL_S)
            is_used = self._session is not None or self._loading is not None
            is_changing = self._changing is not None and not self._changing.done()
            if is_used or is_changing or self._state not in (WorkerState.READY, WorkerState.FAILED):
                unused_since = None
                continue
            unused_since = self._loop.time() if unused_since is None else unused_since
            if self._loop.time() - unused_since >= UNUSED_S:
                self._log.warning("engine.unused")
                self._set_state(WorkerState.IDLE)
                self._thread.submit(self._close_engine)

    async def stop(self) -> bool:
        """End the stream, give back the engine's memory, end the thread; return whether it has ended."""
        if self._session is not None:
            self._end_session(self._session, UnavailableError("the worker is shutting down"))
        self._thread.submit(self._engine.close)
        self._thread.stop()
        has_ended = await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        if not has_ended:
            self._log.warning("engine.still_busy")
        return has_ended

    def _start_loading(self, spec: EngineSpec, report: ProgressReport) -> _Loading:
        if self._session is not None:
            self._end_session(self._session, SupersededError("the rank is being configured again"))
        if self._engine.ends_with_group:
            self.needs_new_process.set()
            raise UnavailableError("ranks on GPUs meet once in a process; this one is restarting")
        self._set_state(WorkerState.CONFIGURING)
        self._spec, self._capacity = spec, None
        self._loading = _Loading(spec, report, self._loop.create_future())
        self._thread.submit(functools.partial(self._load, self._loading))
        return self._loading

    async def _wait_until_started(self, loading: _Loading) -> None:
        try:
            async with asyncio.timeout(self._stuck_after_s):
                await loading.started.wait()
        except TimeoutError:
            self._log.error("engine.stuck", heartbeat_age_s=round(self._thread.heartbeat_age_s, 1))
            self.needs_new_process.set()
            raise UnavailableError("the engine hangs; this process has to be restarted") from None

    def _load(self, loading: _Loading) -> None:
        """Configure the engine, on its thread."""

        def report(fraction: float, stage: str) -> None:
            self._thread.beat()
            self._call_loop(self._on_progress, loading, fraction, stage)

        self._call_loop(loading.started.set)
        try:
            capacity = self._engine.configure(loading.spec, report)
        except ConfigurationError as error:
            self._log.error("engine.configure_refused", model=loading.spec.model, reason=str(error))
            self._call_loop(self._on_loaded, loading, error)
        except Exception as error:  # noqa: BLE001  (raised again in the caller that waits for it)
            self._log.exception("engine.configure_failed", model=loading.spec.model)
            self._call_loop(self._on_loaded, loading, error)
        else:
            self._follower.follow()
            self._call_loop(self._on_loaded, loading, capacity)

    def _on_progress(self, loading: _Loading, fraction: float, stage: str) -> None:
        if loading.report is not None:
            loading.report(fraction, stage)

    def _on_loaded(self, loading: _Loading, outcome: EngineCapacity | Exception) -> None:
        self._loading = None
        if isinstance(outcome, Exception):
            self._set_state(WorkerState.FAILED)
            loading.done.set_exception(outcome)
            loading.done.exception()  # read here, as no caller may be waiting
            if self._engine.ends_with_group:
                self.needs_new_process.set()
            return
        self._capacity = outcome
        self._set_state(WorkerState.READY)
        loading.done.set_result(outcome)

    def _end_session(self, session: ExecuteSession, error: Exception | None) -> None:
        self._session = None
        session.end(error)
        self.leases.revoke_all()
        metrics.OPEN_ROWS.set(0)
        assert self._spec is not None, "a stream is open only after a configuration"
        if self._state is not WorkerState.READY:
            return
        if self._spec.world_size > 1:
            # Ranks may have stopped at different passes. Leaving the group wakes those that wait for us in it.
            self._set_state(WorkerState.IDLE)
            if self._engine.ends_with_group:
                # The thread itself may wait in a collective.
                self.needs_new_process.set()
            else:
                self._thread.submit(self._engine.close)
        else:
            self._thread.submit(self._engine.reset)

    def _dispatch(self, session: ExecuteSession, plan: StepPlan) -> None:
        self._thread.submit(functools.partial(self._execute, session, plan))

    def _execute(self, session: ExecuteSession, plan: StepPlan) -> None:
        """Run a plan, on the engine's thread."""

        def emit(result: StepResult) -> None:
            if session.is_ended:
                raise SessionEndedError
            self._thread.beat()
            self._count(result)
            self._call_loop(session.deliver, result)

        if session.is_ended:
            return
        try:
            with self.profiles.span(f"plan {plan.step_id}"):
                self._engine.execute(plan, emit, functools.partial(session.is_overtaken, plan))
            self._engine.settle(lambda: self._thread.has_commands)
            self._report_experts()
        except SessionEndedError:
            pass  # the code that ended it frees the rows
        except ExpertGroupError as error:
            session.is_ended = True
            self._lose_experts(self._engine.pass_calls, str(error))
        except InvalidPlanError as error:
            self._log.error("plan.invalid", step_id=plan.step_id, reason=str(error))
            self._fail(session, plan, f"invalid plan: {error}", self._engine.reset)
        except OutOfMemoryError as error:
            self._log.error("plan.out_of_memory", step_id=plan.step_id, reason=str(error))
            self._fail(session, plan, str(error), self._leave_group, out_of_memory=True)
        except Exception as error:  # noqa: BLE001  (becomes the plan's result)
            self._log.exception("plan.failed", step_id=plan.step_id)
            # Closing also wakes other ranks that wait for this one.
            self._fail(session, plan, f"{type(error).__name__}: {error}", self._close_engine)

    def _leave_group(self) -> None:
        """Free the rows; in a group, close the engine: that wakes other ranks that wait for this one."""
        if self._spec is not None and not self._spec.is_alone:
            self._close_engine()
        else:
            self._engine.reset()

    def _close_engine(self) -> None:
        """Give everything back, on the engine's thread; where that cannot be, by the end of this process."""
        if self._engine.ends_with_group:
            self._call_loop(self.needs_new_process.set)
        else:
            self._engine.close()

    def _fail(
        self,
        session: ExecuteSession,
        plan: StepPlan,
        reason: str,
        tidy_up: Callable[[], None],
        *,
        out_of_memory: bool = False,
    ) -> None:
        session.is_ended = True
        result = StepResult(plan.step_id, substep=0, last=True, error=reason, out_of_memory=out_of_memory)
        self._call_loop(self._on_failed, session, result)
        tidy_up()

    def _on_failed(self, session: ExecuteSession, result: StepResult) -> None:
        metrics.PLANS_FAILED_TOTAL.inc()
        if session is self._session:
            self._set_state(WorkerState.FAILED)
            session.deliver(result)
            self._end_session(session, UnavailableError(f"the rank has failed: {result.error}"))

    def _count(self, result: StepResult) -> None:
        if not result.abandoned:
            self._finished_passes += 1
            self.profiles.note_pass()
            metrics.PASS_COMPUTE_SECONDS.observe(result.compute_us / 1e6)
            metrics.PASS_HOST_SECONDS.observe(result.host_us / 1e6)
        metrics.TOKENS_TOTAL.inc(len(result.token_ids))
        metrics.OPEN_ROWS.set(self._engine.open_rows)

    def _report_experts(self) -> None:
        """Update the metrics of experts, on the engine's thread."""
        passes = self._finished_passes + self._follower.joined
        if not self._expert_metrics.are_due(passes, is_idle=not self._thread.has_commands):
            return
        load = self._engine.read_expert_load()
        if load is not None:
            self._expert_metrics.update(load)

    def _lose_experts(self, calls: PassCalls | None, reason: str) -> None:
        """Leave ranks that share experts, which all have to meet again; any thread may call this."""
        self._call_loop(self._on_experts_lost, calls, reason)

    def _on_experts_lost(self, calls: PassCalls | None, reason: str) -> None:
        if self._state is not WorkerState.READY or self._engine.pass_calls is not calls:
            return  # of a model that was loaded before, or noticed twice
        self._log.warning("experts.lost", reason=reason)
        self._set_state(WorkerState.FAILED)
        if self._session is not None:
            self._end_session(self._session, UnavailableError(reason))
        if self._engine.ends_with_group:
            # The thread itself may wait in a collective.
            self.needs_new_process.set()
        else:
            self._thread.submit(self._engine.close)

    def _keep_warm(self) -> None:
        """Give an idle engine something to do, on its thread."""
        if self._state is WorkerState.READY:
            self._engine.keep_warm()

    def _call_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        metrics.READY.set(state is WorkerState.READY)
        metrics.SLEEPING.set((self._sleep_level or 0) if state is WorkerState.SLEEPING else 0)


def _make_recorder() -> ProfileRecorder:
    # Imported here because it loads torch.
    from services.worker.engine.measuring.torch_recorder import TorchRecorder

    return TorchRecorder()
