"""The worker group: all ranks of all stages, configured together and sent the same plans."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc

from common.errors import ConfigurationError, InvalidRequestError, PandoError, UnavailableError
from common.logs import get_logger
from common.rpc.stream import RefusalLog
from common.steps import sampling_rank
from services.scheduler.acknowledgements import GroupAcks
from services.scheduler.heartbeats import RankSilentError, RankWatch
from services.scheduler.rank import EngineFailedError, LoadedWeights, PlanStream, RankConnection, RankLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from common.grammars import Grammar
    from common.steps import EngineCapacity, EngineSpec, SleepLevel, SleepPart, StepPlan, StepResult
    from common.transfers import TransferAck
    from services.scheduler.heartbeats import RankHealth
    from services.scheduler.rank import RankIdentity


RECONNECT_S = 0.2
# A failure during loading is likely to repeat: pauses double up to this limit.
MAX_RECONNECT_S = 5.0
WATCH_INTERVAL_S = 1.0
# The version of weights that have not been replaced.
DEFAULT_VERSION = "default"
# Seconds for which ranks may be away while they are configured with other weights, as processes on several GPUs have to
# be restarted for that; then they get the weights that they had.
REPLACE_PATIENCE_S = 90.0
# Time to wait for the other ranks' errors after one has failed.
REASON_GRACE_S = 0.5


class GroupState(Enum):
    """State of a group; FAILED lasts until the ranks answer again, SLEEPING until they are woken."""

    CONNECTING = "CONNECTING"
    CONFIGURING = "CONFIGURING"
    READY = "READY"
    SLEEPING = "SLEEPING"
    FAILED = "FAILED"


class _ReplacingError(RankLostError):
    """The ranks are about to be configured with other weights."""


@dataclass(slots=True)
class _Replacement:
    """Weights that the group is being configured with, and those that it had."""

    weights: LoadedWeights
    before: EngineSpec
    done: asyncio.Future[None]
    began_at: float


@dataclass(slots=True)
class _Waking:
    """A group that slept at `level` is configured again."""

    level: SleepLevel
    done: asyncio.Future[None]


class GroupListener(Protocol):
    """Receives the group's events. The calls run on the event loop."""

    def on_ready(self, capacity: EngineCapacity, *, engine_failed: bool) -> None:
        """All ranks are ready for plans, their rows and KV empty; `engine_failed`: the group had been lost to that."""

    def on_result(self, result: StepResult) -> None:
        """The rank that samples has reported a forward pass."""

    def on_transfer(self, ack: TransferAck) -> None:
        """All ranks have finished a transfer."""

    @property
    def has_others(self) -> bool:
        """Whether another group would serve requests now."""

    def on_lost(self, *, out_of_memory: bool, is_silent: bool = False) -> None:
        """The group is lost with all rows and all KV.

        `out_of_memory`: its last steps were too large; `is_silent`: a rank does not answer, so it may stay away.
        """


class WorkerGroup:
    """Keeps the ranks configured and their Execute streams open; reconfigures all of them if one breaks."""

    def __init__(
        self,
        channels: Sequence[Callable[[], grpc.aio.Channel]],
        spec: EngineSpec,
        listener: GroupListener,
        timeout_s: float,
        restore: Callable[[Sequence[RankConnection]], Awaitable[None]] | None = None,
        sleep_level: SleepLevel | None = None,
    ) -> None:
        """Prepare a group; `channels` open the ranks' channels, and each rank's number is set in its `spec`.

        `restore` is called with the ranks once they are configured, before they get plans. With a `sleep_level`, the
        group sleeps at it from the start: ranks are configured when it is woken.
        """
        # The connections, while the group is ready.
        self.ranks: Sequence[RankConnection] = ()
        self._watches: tuple[RankWatch, ...] = ()
        self._restore = restore
        self.state = GroupState.CONNECTING
        # Whether all ranks answered when they were last looked for.
        self.is_reachable = False
        self._open_channels = channels
        self._spec = spec
        # The rank that samples, reports tokens and compiles grammars.
        self._sampler = sampling_rank(len(channels), spec.stages)
        self._listener = listener
        self._timeout_s = timeout_s
        self._streams: list[PlanStream] = []
        self._acks = GroupAcks(len(channels))
        # One rank has failed, and the others' streams are read only for their errors.
        self._is_losing = False
        # Whether the engine failed when the group was lost, memory aside; None: if one of the processes has died since.
        self._has_engine_failed: bool | None = False
        self._processes: list[str] = []
        self._replacement: _Replacement | None = None
        # Raises its exception in `_serve`, to have the group configured again.
        self._break: asyncio.Future[NoReturn] | None = None
        # None: the ranks are awake, or are being woken.
        self.sleep_level = sleep_level
        # Set unless the group sleeps without connections: ranks were lost, or the scheduler was restarted meanwhile.
        self._may_configure = asyncio.Event()
        if sleep_level is None:
            self._may_configure.set()
        self._waking: _Waking | None = None
        self._loading: asyncio.Task[EngineCapacity] | None = None
        # How often ranks could not be configured, or were lost meanwhile.
        self.failed_loads = 0
        self._pause_s = RECONNECT_S
        self._refusals = RefusalLog("worker")
        self._log = get_logger("group")

    def send(self, plan: StepPlan) -> None:
        """Queue a plan for every rank."""
        assert self.state is GroupState.READY, "plans need a group that is ready"
        PlanStream.send_to_all(plan, self._streams)

    @property
    def _has_plans_in_flight(self) -> bool:
        """Whether tokens of a plan are missing; results of the other ranks may arrive later."""
        return bool(self._streams) and self._streams[self._sampler].in_flight > 0

    @property
    def healths(self) -> tuple[RankHealth, ...]:
        """The ranks' health as of their last heartbeats; empty unless the group is ready."""
        return tuple(watch.health for watch in self._watches)

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar before rows need it.

        Raises:
            PandoError: the grammar is refused, or the workers are not connected.
        """
        if not self.ranks:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        await self.ranks[self._sampler].prepare(grammar)

    @property
    def spec(self) -> EngineSpec:
        """The configuration that all ranks share; each adds its own number."""
        return self._spec

    @property
    def shares_experts(self) -> bool:
        """Whether workers of other groups need those of this group for their own passes."""
        return self._spec.data_parallel_size > 1

    @property
    def weights(self) -> LoadedWeights:
        """The weights that the group is configured with."""
        return LoadedWeights(self._spec.model, self._spec.load_format, self._spec.weight_version or DEFAULT_VERSION)

    async def check_weights(self, weights: LoadedWeights) -> None:
        """Check on all ranks that other weights fit.

        Raises:
            PandoError: they do not, or a rank is unreachable.
        """
        if not self.ranks:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        await asyncio.gather(*(rank.check_weights(weights) for rank in self.ranks))

    async def prepare_weights(self, weights: LoadedWeights) -> bool:
        """Have all ranks read other weights beside the loaded ones, while plans run; return whether all could.

        Raises:
            PandoError: they cannot be read, or a rank is unreachable; none of them keeps any.
        """
        if not self.ranks:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        results = await asyncio.gather(*(rank.prepare_weights(weights) for rank in self.ranks), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.drop_prepared_weights()
            raise errors[0]
        return all(results)

    async def drop_prepared_weights(self) -> None:
        """Have all ranks forget what `prepare_weights` made them read."""
        await asyncio.gather(*(rank.prepare_weights(None) for rank in self.ranks), return_exceptions=True)

    async def replace_weights(self, weights: LoadedWeights) -> None:
        """Configure all ranks with other weights; if any of them fails, all get the weights that they had.

        The listener is notified that the group is lost, and that it is ready again.

        Raises:
            PandoError: the weights could not be loaded, or a rank was lost; the earlier ones serve again, or soon will.
        """
        assert self._replacement is None, "the caller makes one update at a time"
        if self._break is None or self._break.done():
            raise UnavailableError("the workers were lost before their weights were replaced", retry_after_ms=1000)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._replacement = _Replacement(weights, self._spec, done, time.monotonic())
        self._break.set_exception(_ReplacingError("the weights are replaced"))
        try:
            await done
        finally:
            self._replacement = None

    def _begin_replacement(self, replacement: _Replacement) -> None:
        weights, before = replacement.weights, replacement.before
        self._spec = replace(
            before, model=weights.model, load_format=weights.load_format or before.load_format,
            weight_version=weights.version, base_model=before.base_model or before.model, reload_weights=True,
        )  # fmt: skip
        self._log.info("weights.replacing", model=weights.model, version=weights.version)

    def _roll_back(self, error: Exception) -> None:
        """Return to the weights before, if the group was lost while it was configured with others."""
        replacement = self._replacement
        if replacement is None or replacement.done.done():
            return
        is_final = isinstance(error, ConfigurationError)
        if not is_final and time.monotonic() - replacement.began_at < REPLACE_PATIENCE_S:
            return
        self._spec = replacement.before
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        self._log.error("weights.rolled_back", model=replacement.weights.model, reason=reason)
        kind = InvalidRequestError if is_final else UnavailableError
        replacement.done.set_exception(kind(f"the weights were not replaced: {reason}"))

    def _adopt(self, ranks: Sequence[RankIdentity]) -> None:
        """Go on with weights that replaced those of the settings before this scheduler started."""
        for rank in ranks:
            is_replaced = bool(rank.weights.version) and rank.base_model == self._spec.model
            if is_replaced and not self._spec.weight_version:
                self._spec = replace(
                    self._spec, model=rank.weights.model, load_format=rank.weights.load_format,
                    weight_version=rank.weights.version, base_model=rank.base_model,
                )  # fmt: skip
                self._log.info("weights.adopted", model=rank.weights.model, version=rank.weights.version)

    def _adopt_sleep(self, ranks: Sequence[RankIdentity]) -> None:
        """Leave ranks asleep that an earlier scheduler has put to sleep, unless they are being woken."""
        levels = [rank.sleep_level for rank in ranks if rank.sleep_level is not None]
        if levels and self._may_configure.is_set() and self._waking is None:
            self.sleep_level, self.state = max(levels), GroupState.SLEEPING
            self._may_configure.clear()
            self._log.info("group.sleeping", sleep_level=int(max(levels)), adopted=True)

    async def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> int:
        """Have all ranks give back KV memory and weights, without plans in flight; return the bytes that became free.

        If any of them fails, all are configured again, and awake.

        Raises:
            PandoError: a rank has failed, or was lost.
        """
        if self.sleep_level is not None and not self.ranks:
            self.sleep_level = level  # they were lost, so there is nothing to give back
            return 0
        if not self.ranks or self.state not in (GroupState.READY, GroupState.SLEEPING):
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        assert not self._has_plans_in_flight, "ranks fall asleep between two plans"
        before, self.state = self.state, GroupState.SLEEPING
        try:
            freed = await asyncio.gather(*(rank.sleep(level, keeps_host_pages=keeps_host_pages) for rank in self.ranks))
        except PandoError as error:
            if self.ranks:
                self.state = before
            self._give_up(f"a rank could not be put to sleep: {error}")
            outcome = (
                "the model is loaded again" if before is GroupState.READY else "the model sleeps, and is not loaded"
            )
            raise UnavailableError(f"a rank could not be put to sleep; {outcome}: {error}") from error
        if not self.ranks:
            raise UnavailableError("a worker was lost while the model was put to sleep; the model is loaded again")
        self.sleep_level = level
        self._log.info("group.sleeping", sleep_level=int(level), freed_mib=sum(freed) >> 20)
        return sum(freed)

    async def wake_up(self, parts: Sequence[SleepPart]) -> bool:
        """Have all ranks restore parts of what they have given back; return whether the group is ready.

        Ranks that were lost meanwhile, or that fail, are configured, whichever parts are named.

        Raises:
            UnavailableError: the model cannot be loaded; the group sleeps on.
        """
        if self.sleep_level is None:
            return True
        level, self.sleep_level = self.sleep_level, None
        if self.ranks:
            try:
                awake = await asyncio.gather(*(rank.wake_up(parts) for rank in self.ranks))
            except PandoError as error:
                self._give_up(f"a rank could not be woken: {error}")
            else:
                if self.ranks and not all(awake):
                    self.sleep_level = level
                    return False
                if self.ranks and self.state is GroupState.SLEEPING:
                    self.state = GroupState.READY
                    self._log.info("group.awake")
        if self.state is not GroupState.READY or not self.ranks:
            self._waking = _Waking(level, asyncio.get_running_loop().create_future())
            self._may_configure.set()
            try:
                await self._waking.done
            finally:
                self._waking = None
        return True

    def _sleep_again(self, waking: _Waking, error: ConfigurationError) -> None:
        """Stay asleep, as the ranks cannot load the model."""
        self._may_configure.clear()
        self.sleep_level, self.state = waking.level, GroupState.SLEEPING
        self._log.error("group.not_woken", reason=str(error))
        waking.done.set_exception(UnavailableError(f"the model cannot be loaded, and sleeps on: {error}"))

    def step_back(self, level: SleepLevel, reason: str) -> None:
        """Sleep at once, without ranks, if the group is not ready; loading is abandoned, and `wake_up` fails."""
        if self.state is GroupState.READY or (self.state is GroupState.SLEEPING and self._waking is None):
            return
        self._may_configure.clear()
        self.sleep_level, self.state = level, GroupState.SLEEPING
        if self._waking is not None and not self._waking.done.done():
            self._waking.done.set_exception(UnavailableError(f"the model sleeps on: {reason}"))
        if self._loading is not None:
            self._loading.cancel()
        self._log.warning("group.stepped_back", reason=reason)

    def _give_up(self, reason: str) -> None:
        """Have all ranks configured again, unless they are already lost."""
        if self._break is not None and not self._break.done():
            self._break.set_exception(RankLostError(reason))

    async def run(self) -> NoReturn:
        """Configure and serve the group indefinitely.

        Raises:
            ConfigurationError: a rank rejects its configuration, so a retry would fail again.
        """
        while True:
            channels = [open_channel() for open_channel in self._open_channels]
            try:
                await self._run_once([RankConnection(channel) for channel in channels])
            except _ReplacingError as error:
                self._lose(error)
                assert self._replacement is not None, "it has raised the error"
                self._begin_replacement(self._replacement)
                continue
            except ConfigurationError as error:
                if self._waking is not None and not self._waking.done.done():
                    self._sleep_again(self._waking, error)
                    continue
                if self._replacement is None or self._replacement.done.done():
                    raise
                self._roll_back(error)
            except (RankLostError, grpc.aio.AioRpcError) as error:
                self._roll_back(error)
                self._lose(error)
            finally:
                for channel in channels:
                    await channel.close()
            await asyncio.sleep(self._pause_s)

    def _lose(self, error: Exception) -> None:
        if isinstance(error, grpc.RpcError):
            self._refusals.note(error)
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self.state in (GroupState.CONFIGURING, GroupState.READY):
            self._log.warning("group.lost", reason=reason)
        if self.state is GroupState.SLEEPING:
            if not self._may_configure.is_set():
                return
            self._has_engine_failed = False
            if self.sleep_level is None:
                self.state = GroupState.FAILED
            else:
                # They come back asleep: nothing is loaded until the group is woken.
                self._may_configure.clear()
            self._listener.on_lost(out_of_memory=False)
        elif self.state is GroupState.READY:
            self.state = GroupState.FAILED
            if isinstance(error, _ReplacingError):
                # Even if the processes end, as those on several GPUs do.
                self._has_engine_failed = False
            else:
                self._has_engine_failed = not error.out_of_memory if isinstance(error, EngineFailedError) else None
            self._listener.on_lost(
                out_of_memory=isinstance(error, EngineFailedError) and error.out_of_memory,
                is_silent=isinstance(error, RankSilentError),
            )
        elif self.state is GroupState.CONFIGURING:
            self.state = GroupState.CONNECTING
            self._pause_s = min(2 * self._pause_s, MAX_RECONNECT_S)

    async def _run_once(self, ranks: list[RankConnection]) -> None:
        """Configure all ranks, then serve them until one fails."""
        processes = await self._find(ranks)
        if self.state is not GroupState.FAILED:
            self.state = GroupState.CONFIGURING
        capacity = await self._load(ranks)
        self._acks = GroupAcks(len(ranks))
        self._is_losing = False
        self._streams = [rank.execute() for rank in ranks]
        try:
            await asyncio.gather(*(stream.wait_until_open() for stream in self._streams))
            if not self._may_configure.is_set():
                raise RankLostError("the group has stepped back")
            self.state, self._pause_s = GroupState.READY, RECONNECT_S
            self._refusals.clear()
            self.ranks = ranks
            self._watches = tuple(
                RankWatch(number, rank, stream, self._timeout_s)
                for number, (rank, stream) in enumerate(zip(ranks, self._streams, strict=True))
            )
            self._break = asyncio.get_running_loop().create_future()
            self._log.info("group.ready", ranks=len(ranks), pages=capacity.device_pages, device=capacity.device)
            if self._has_engine_failed is None:
                self._has_engine_failed = processes != self._processes
            self._processes = processes
            self._listener.on_ready(capacity, engine_failed=self._has_engine_failed)
            if self._replacement is not None and not self._replacement.done.done():
                self._replacement.done.set_result(None)
            if self._waking is not None and not self._waking.done.done():
                self._waking.done.set_result(None)
            await self._serve(self._break)
        finally:
            self.ranks, self._watches = (), ()
            for stream in self._streams:
                stream.cancel()

    async def _find(self, ranks: list[RankConnection]) -> list[str]:
        """Return the ranks' processes, once they are up, and once the group is to be awake."""
        found = await self._wait_until_up(ranks)
        if not self._processes:
            self._adopt(found)
            if self._waking is None:
                self._adopt_sleep(found)
        while not self._may_configure.is_set():
            await self._may_configure.wait()
            self.state = GroupState.FAILED if self._processes else GroupState.CONNECTING
            found = await self._wait_until_up(ranks)
        return [rank.process for rank in found]

    async def _wait_until_up(self, ranks: list[RankConnection]) -> list[RankIdentity]:
        self.is_reachable = False
        found = await asyncio.gather(*(rank.wait_until_up() for rank in ranks))
        self.is_reachable = True
        return found

    async def _load(self, ranks: list[RankConnection]) -> EngineCapacity:
        """Configure all ranks and restore what they had, unless the group steps back."""
        self._loading = asyncio.create_task(self._configure_and_restore(ranks))
        try:
            await asyncio.wait([self._loading])
            if self._loading.cancelled():
                raise RankLostError("the group has stepped back")
            self.failed_loads += self._loading.exception() is not None
            return self._loading.result()
        finally:
            self._loading.cancel()
            self._loading = None

    async def _configure_and_restore(self, ranks: list[RankConnection]) -> EngineCapacity:
        capacity = await self._configure(ranks)
        if self._restore is not None:
            try:
                await self._restore(ranks)
            except UnavailableError as error:
                raise RankLostError(str(error)) from error
        return capacity

    async def _configure(self, ranks: list[RankConnection]) -> EngineCapacity:
        """Configure all ranks concurrently, as they synchronise; return the capacity that they agreed on."""
        specs = [replace(self._spec, rank=number, world_size=len(ranks)) for number in range(len(ranks))]
        resumes = self.state is GroupState.FAILED
        tasks = [
            asyncio.create_task(rank.configure(spec, resumes=resumes)) for rank, spec in zip(ranks, specs, strict=True)
        ]
        try:
            capacities = await asyncio.gather(*tasks)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConfigurationError(f"worker: {error.details()}") from error
            raise
        finally:
            for task in tasks:
                task.cancel()
        # A page is stored by all ranks or not at all.
        has_storage = all(capacity.has_storage for capacity in capacities)
        # After a restart the group needs the same number of pages: waiting requests were admitted by this capacity.
        first = capacities[self._sampler]
        self._spec = replace(
            self._spec,
            device_pages=first.device_pages,
            host_pages=first.host_pages,
            window_pages=first.window_pool.pages if first.window_pool else None,
            snapshots=first.recurrent_states.snapshots if first.recurrent_states else None,
            host_snapshots=first.recurrent_states.host_snapshots if first.recurrent_states else None,
            chosen_device_pages=self._spec.chosen_device_pages or self._spec.device_pages is None,
            chosen_host_pages=self._spec.chosen_host_pages or self._spec.host_pages is None,
            reload_weights=False,
        )
        return replace(first, has_storage=has_storage)

    async def _serve(self, broken: asyncio.Future[NoReturn]) -> None:
        """Read all ranks' results until one of them fails, or until `broken` has an exception, which is raised."""
        readers = [asyncio.create_task(self._read(stream, rank)) for rank, stream in enumerate(self._streams)]
        watches = [asyncio.create_task(self._watch())]
        watches += [
            asyncio.create_task(watch.run(lambda: self._listener.has_others, lambda: self._has_plans_in_flight))
            for watch in self._watches
        ]
        try:
            waited: list[asyncio.Future[Any]] = [*readers, *watches, broken]
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._is_losing = True
            if broken.done():
                broken.result()
            # Weights can no longer be replaced, whose caller would not be answered by what follows.
            broken.cancel()
            if len(readers) > 1:
                # A failing rank makes others fail, and their errors may arrive first; only its own error has the cause.
                done = (await asyncio.wait(readers, timeout=REASON_GRACE_S))[0] | done
            raise _most_informative([error for task in done if (error := task.exception()) is not None])
        finally:
            broken.cancel()
            for task in (*readers, *watches):
                task.cancel()
            await asyncio.gather(*readers, *watches, return_exceptions=True)

    async def _read(self, stream: PlanStream, rank: int) -> None:
        async for result in stream.results():
            if result.error is not None:
                raise EngineFailedError(f"rank {rank}: {result.error}", out_of_memory=result.out_of_memory)
            if self._is_losing:
                continue
            for ack in result.acks:
                together = self._acks.add(rank, ack)
                if together is not None:
                    self._listener.on_transfer(together)
            if rank == self._sampler:
                self._listener.on_result(result)
        raise RankLostError(f"rank {rank} closed its stream")

    async def _watch(self) -> None:
        """Fail the group if plans are in flight and no result arrives in time."""
        stream = self._streams[self._sampler]
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            silence = time.monotonic() - stream.last_sign
            if stream.in_flight and silence > self._timeout_s:
                raise EngineFailedError(f"no result for {silence:.0f} s")


def _most_informative(errors: list[BaseException]) -> BaseException:
    """Return the root cause among the errors of several ranks."""
    return next((error for error in errors if isinstance(error, EngineFailedError) and error.out_of_memory), errors[0])
