"""Runs the core: sends plans to the workers, applies results, pushes output to the detokenizer, keeps time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from common.audit.log import NoAudit
from common.errors import UnavailableError
from common.limits import Limits, changes, load_limits
from common.logs import get_logger
from common.reloading import Reloading
from common.types import Admission, GroupRole, LoadReport, RequestId
from services.scheduler import metrics
from services.scheduler.adapter_desk import AdapterDesk
from services.scheduler.audit_desk import note_decisions
from services.scheduler.boundaries import Boundaries
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache_meter import CacheMeter
from services.scheduler.core.costs import OperationTimes
from services.scheduler.core_assembler import CoreAssembler
from services.scheduler.core_meter import CoreMeter
from services.scheduler.defects import BrokenStates, begin_again
from services.scheduler.grammar_recovery import GrammarRecovery
from services.scheduler.group import GroupState
from services.scheduler.group_roles import GroupRoles
from services.scheduler.hand_back import HandBack
from services.scheduler.memory_checks import MemoryChecks
from services.scheduler.past_decisions import PastDecisions
from services.scheduler.plan_pacing import PlanPacing
from services.scheduler.storage_desk import StorageDesk
from services.scheduler.timelines import Timelines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from common.audit.log import Audit
    from common.grammars import Grammar
    from common.settings import SchedulerSettings
    from common.steps import EngineCapacity, StepResult
    from common.transfers import TransferAck
    from common.types import ReplyTo, RoleWish, ScheduleRequest, SessionGrant, SessionWish, View
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.output import EndedChoice
    from services.scheduler.core.sequence import PrefillFollower
    from services.scheduler.core.sessions import Sessions
    from services.scheduler.decision_log import DecisionLog
    from services.scheduler.group import WorkerGroup
    from services.scheduler.heartbeats import RankHealth
    from services.scheduler.outlets import Outlets
    from services.scheduler.rank import LoadedWeights
    from services.scheduler.remote_work import RemoteEncoders, RemotePrefills

HOUSEKEEPING_INTERVAL_S = 0.25
# Messages to clients of a model that sleeps.
TOO_MANY_WHILE_ASLEEP = "the model sleeps, and no further requests may wait for it; try again later"
NOT_WOKEN = "the model slept, and was not woken in time; try again later"
ASLEEP_RETRY_MS = 10_000


class SchedulerLoop:
    """Owns the core and connects it to workers and detokenizer. Runs in one thread on one event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Callable[[], float] = time.monotonic,
        decisions: DecisionLog | None = None,
        limits_file: Path | None = None,
        *,
        has_fleet: bool = False,
        audit: Audit | None = None,
    ) -> None:
        """Start without a core, which is created when the workers have reported their capacity.

        `has_fleet`: evidence is counted together with other scheduler groups. `audit` records decisions of the cache,
        and changes of limits, adapters and weights; None: they are not recorded.

        Raises:
            ConfigurationError: the limits file is invalid.
        """
        self.core: SchedulerCore | None = None
        self.meter: CacheMeter | None = None
        self.past_decisions: PastDecisions | None = None
        self._core_meter: CoreMeter | None = None
        self._checks: MemoryChecks | None = None
        self._boundaries = Boundaries(settings.cache, clock)
        self._settings = settings
        self._clock = clock
        self._storage = StorageDesk(settings.storage)
        self._capacity: EngineCapacity | None = None
        # The weights at the last `on_ready`.
        self._weights: LoadedWeights | None = None
        self._holds_new = False
        # The workers are about to sleep.
        self._holds_all = False
        self._asleep_since: float | None = None
        # Set when a request comes that may wake the workers.
        self.asked_to_wake = asyncio.Event()
        self._group: WorkerGroup | None = None
        self._outlets: Outlets | None = None
        self._audit = audit or NoAudit()
        self._wake = asyncio.Event()
        self._pacing = PlanPacing(clock, self._wake_later, holds_back=settings.late_planning)
        # Changes of the core that were interrupted, which end `run`.
        self.broken = BrokenStates()
        self._recovery = GrammarRecovery(self.prepare, self._wake.set)
        self.adapters = AdapterDesk(
            settings.adapters,
            lambda: self.core,
            lambda: self._group.ranks if self._group else (),
            self._on_adapters_lost,
            self._audit,
        )
        self._limits_file = (
            Reloading(limits_file, load_limits, on_change=self._note_limits) if limits_file is not None else None
        )
        self._limits = self._limits_file.value if self._limits_file else Limits()
        choices = SharingChoices(lambda tenant: self._limits.sharing_of(tenant))
        self._assembler = CoreAssembler(
            settings, choices, self._storage, decisions, self.adapters.find, has_fleet=has_fleet
        )
        self._step_cpu_s = 0.0
        self._is_draining = False
        self._hand_back = HandBack(clock)
        self.timelines = Timelines()
        self.roles = GroupRoles(GroupRole(settings.role), settings.automatic_role, clock, self._audit)
        # Has prompts computed by other groups; None: it never does.
        self.prefills: RemotePrefills | None = None
        # Encodes images outside the group; None: the workers do.
        self.encoders: RemoteEncoders | None = None
        self._log = get_logger("loop")

    def connect(self, group: WorkerGroup, outlets: Outlets) -> None:
        """Set the worker group and the links to detokenizers, which in turn call the `on_…` methods."""
        self._group, self._outlets = group, outlets

    @property
    def can_serve(self) -> bool:
        """Whether a request submitted now would run."""
        return self._is_group_ready and (self._has_outlet or self.roles.role is GroupRole.PREFILL)

    @property
    def capacity(self) -> EngineCapacity | None:
        """The workers' capacity when they were last ready; None before."""
        return self._capacity

    def can_use_pages(self, fingerprint: str, kv_identity: str) -> bool:
        """Whether the workers can use pages of a group with these names of weights and shards, and of weights alone."""
        own = self._capacity
        if own is None:
            return False
        return own.fingerprint == fingerprint or (bool(kv_identity) and own.kv_identity == kv_identity)

    @property
    def is_healthy(self) -> bool:
        """Whether a request submitted now would run, or waits for the workers to be woken."""
        return self._has_outlet and (self._is_group_ready or self.is_sleeping)

    @property
    def load(self) -> LoadReport:
        """The load for tokenizers, which choose among groups by it."""
        open_choices = 0 if self.core is None else len(self.core.queue) + self.core.rows.running
        is_open = not self._is_draining
        sleeps = is_open and self.is_sleeping and self._has_outlet
        serves = is_open and self.can_serve and not self.roles.is_changing
        free_tokens = None if self.core is None else self.core.free_tokens
        signals = None if self.core is None else self.roles.signals(self.core)
        return LoadReport(open_choices, serves, sleeps, self.roles.role, free_tokens, signals)

    @property
    def is_sleeping(self) -> bool:
        """Whether the workers sleep, or are being woken."""
        return self.group_state is GroupState.SLEEPING

    @property
    def group_state(self) -> GroupState:
        return self._group.state if self._group else GroupState.CONNECTING

    @property
    def rank_healths(self) -> tuple[RankHealth, ...]:
        """The ranks' health by number; empty unless the workers are ready."""
        return self._group.healths if self._group else ()

    @property
    def sleep_level(self) -> int:
        """Level at which the workers sleep; 0: they do not, or are being woken."""
        return self._group.sleep_level or 0 if self._group else 0

    @property
    def now(self) -> float:
        """Time of the loop's clock in seconds."""
        return self._clock()

    def submit(self, request: ScheduleRequest) -> Admission:
        """Submit a request to the core, or return an admission with the reason for its refusal."""
        if self.core is None or self._is_draining or not self._can_reach(request.reply_to):
            error = UnavailableError(self._why_unavailable(), retry_after_ms=1000)
            admission = Admission(request.request_id, len(request.token_ids), error.to_failure())
        elif self.is_sleeping and len(self.core.queue) >= self._settings.sleep.max_waiting_requests:
            error = UnavailableError(TOO_MANY_WHILE_ASLEEP, retry_after_ms=ASLEEP_RETRY_MS)
            admission = Admission(request.request_id, len(request.token_ids), error.to_failure())
        else:
            admission = self.core.submit(request, self.now)
            leader = self.core.leader_of(request.request_id)
            if self.prefills is not None and admission.rejected is None and leader is not None:
                self.prefills.consider(self.core, leader)
        metrics.ADMISSIONS_TOTAL.labels(admission.rejected.code.value if admission.rejected else "accepted").inc()
        self._wake.set()
        if self.is_sleeping and self._settings.sleep.wake_on_request and not self._is_draining:
            self.asked_to_wake.set()
        return admission

    def submit_prefill(self, request: ScheduleRequest, follower: PrefillFollower) -> Admission:
        """Submit a request of which only the prompt is computed, for another group, and inform `follower`."""
        if self.core is None or self._is_draining or not self._is_group_ready:
            reason = "the scheduler is shutting down" if self._is_draining else "the scheduler waits for its workers"
            error = UnavailableError(reason, retry_after_ms=1000)
            return Admission(request.request_id, len(request.token_ids), error.to_failure())
        admission = self.core.submit(request, self.now, follower)
        self._wake.set()
        return admission

    async def prepare(self, grammar: Grammar) -> None:
        """Let the workers compile a grammar.

        Raises:
            PandoError: the grammar is refused, or the workers are not connected.
        """
        if self._group is None:
            raise UnavailableError(self._why_unavailable(), retry_after_ms=1000)
        await self._group.prepare(grammar)

    def note_others(self, tokenizer: object, *, serve: bool) -> None:
        """Record whether `tokenizer` could send requests to another group."""
        self._hand_back.note_others(tokenizer, serve=serve)

    def wish_role(self, wish: RoleWish) -> None:
        """Change the role of this group after a drain, if the settings let the load do so, and it is time."""
        if self.core is not None:
            self.roles.wish(wish, self.core)

    @property
    def has_others(self) -> bool:
        """Whether another group would serve requests now."""
        return self._hand_back.has_others

    def refuse_new(self) -> None:
        """Refuse new requests; open ones continue."""
        self._is_draining = True

    def _why_unavailable(self) -> str:
        if self._is_draining:
            return "the scheduler is shutting down"
        if self.core is None and self.is_sleeping:
            return "the model sleeps"
        if self.core is None:
            return "the scheduler waits for its workers"
        return f"the scheduler is not connected to {'this' if self._has_outlet else 'a'} detokenizer"

    def abort(self, request_id: RequestId) -> None:
        """Abort a request by its exact id; unknown ids are ignored."""
        with self.broken.changing():
            is_open = self.core is not None and self.core.abort(request_id)
        if is_open:
            self._log.info("request.aborted", request_id=request_id)
            self._wake.set()

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session, whose turns stay in the cache; see `Sessions.open`.

        Raises:
            PandoError: it is refused.
        """
        return self._sessions().open(wish)

    async def close_session(self, view: View, session: str) -> bool:
        """Close a session; return whether it was open."""
        return self._sessions().close(view, session)

    async def find_session(self, view: View, session: str, after: str | None = None) -> bool:
        """Return whether a session is open, and has the turn `after` if that is not None."""
        return self._sessions().has(view, session, after)

    def _sessions(self) -> Sessions:
        if self.core is None:
            raise UnavailableError("the scheduler waits for its workers", retry_after_ms=1000)
        return self.core.sessions

    def count_started(self) -> int:
        """Return the number of open choices whose requests have started."""
        return len(self.core.started_sequences) if self.core else 0

    def hold_new(self, *, held: bool) -> None:
        """Keep requests from starting, or let them; they are accepted and wait. Those that have started continue."""
        self._holds_new = held
        if self.core is not None:
            self.core.hold_new(held=held)
        self._wake.set()

    @property
    def holds_all(self) -> bool:
        """Whether no request may run, as the workers are about to sleep."""
        return self._holds_all

    def hold_all(self, *, held: bool, puts_back: bool = False) -> None:
        """Keep all requests from running, or let them. `puts_back`: those that run wait again, with their tokens."""
        self._holds_all = held
        if self.core is not None:
            self.core.hold_all(held=held, puts_back=puts_back)
            self._push()
        self._wake.set()

    def abort_started(self) -> None:
        """Abort all requests that have started."""
        if self.core is not None:
            self.core.abort_started()
            self._push()

    def wake(self) -> None:
        """Check for work after a change outside the loop."""
        self._wake.set()

    async def run(self) -> None:
        """Make a plan whenever something has changed, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._housekeep())
            tasks.create_task(self._keep_tidy())
            tasks.create_task(self.broken.watch())
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._turn()
                # Let pending messages be sent before the next plan is made.
                await asyncio.sleep(0)

    # --- called by the neighbours ---

    def on_ready(self, capacity: EngineCapacity, *, engine_failed: bool) -> None:
        """Start serving, or continue with the requests that were open when the workers were lost."""
        weights = self._group.weights if self._group else None
        if self.core is not None and not self._fits(capacity, weights):
            self.core.fail_all(UnavailableError("the workers came back with another capacity", retry_after_ms=1000))
            self._push()
            self.core = None
        if self.core is not None:
            self._judge_loss(self.core, engine_failed=engine_failed)
            self._recovery.start(self.core)
        else:
            times = OperationTimes(time.thread_time)
            core = self._assembler.assemble(capacity, times)
            cache = core.memory.cache
            self._note_decisions(cache)
            self._boundaries.follow(cache, times)
            self.core = core
            self.core.adapters.pinned = self.adapters.pinned
            if self._limits_file is not None:
                self.core.adopt(self._limits)
            metrics.CACHE_INFO.clear()
            metrics.CACHE_INFO.labels(self.core.config.page_size, self.core.config.device_pages).set(1)
            self.meter = CacheMeter(times)
            self._core_meter = CoreMeter(self.core, self.meter, capacity)
            self._checks = MemoryChecks(self.core)
            self.core.hold_new(held=self._holds_new)
            self.core.hold_all(held=self._holds_all)
        self._note_ready(capacity, weights)

    def _note_decisions(self, cache: PrefixCache) -> None:
        note_decisions(self._audit, cache.events)
        self.past_decisions = PastDecisions(cache.events, self._clock)

    def _fits(self, capacity: EngineCapacity, weights: LoadedWeights | None) -> bool:
        """Whether open requests can go on: with equal weights, or with others that an update has brought.

        No KV outlives the loss of the workers, so what was computed with earlier weights is never used.
        """
        if self._capacity is not None and weights != self._weights:
            return replace(capacity, fingerprint=self._capacity.fingerprint) == self._capacity
        return capacity == self._capacity

    def _note_ready(self, capacity: EngineCapacity, weights: LoadedWeights | None) -> None:
        if weights is not None and weights != self._weights:
            self._audit.note("weights.loaded", {"model": weights.model, "version": weights.version})
        self._capacity, self._weights = capacity, weights
        if weights is not None:
            metrics.WEIGHTS_INFO.clear()
            metrics.WEIGHTS_INFO.labels(weights.version).set(1)
        metrics.GROUP_READY.set(1)
        self._wake.set()

    @property
    def weights(self) -> LoadedWeights | None:
        """The weights that serve, or served last; None before the workers were ready."""
        return self._weights

    def _on_adapters_lost(self) -> None:
        self._push()
        self._wake.set()

    def _judge_loss(self, core: SchedulerCore, *, engine_failed: bool) -> None:
        """End the requests that made the engine fail; only their ids and sizes are logged."""
        for sequence in core.judge_loss(self.now, engine_failed=engine_failed):
            metrics.QUARANTINED_TOTAL.inc()
            self._log.error(
                "request.quarantined",
                request_id=sequence.request.request_id,
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=len(sequence.token_ids) - sequence.prompt_tokens,
            )
        self._push()

    def on_result(self, result: StepResult) -> None:
        """Apply the result of one forward pass and push its tokens before the next plan is made."""
        assert self.core is not None, "results follow plans, which the core made"
        started = time.thread_time()
        self.core.apply(result)
        self._push()
        self._step_cpu_s += time.thread_time() - started
        if result.partial:
            return
        if not result.abandoned:
            metrics.STEP_COMPUTE_SECONDS.observe(result.compute_us / 1e6)
        metrics.GENERATED_TOKENS_TOTAL.inc(len(result.token_ids) + len(result.accepted_token_ids))
        if result.last:
            metrics.STEPS_TOTAL.inc()
            self._pacing.ended()
        self._wake.set()

    def on_transfer(self, ack: TransferAck) -> None:
        """Finish a transfer; sequences that wait for its pages can continue."""
        assert self.core is not None, "transfers are the core's"
        self.core.finish_transfer(ack, self.now)
        self._wake.set()

    def on_lost(self, *, out_of_memory: bool, is_silent: bool = False) -> None:
        """Requeue all sequences until the workers return; after an out-of-memory error, plan smaller steps.

        They are handed back for another group at once if a rank has been silent, as it may be stopped.
        """
        metrics.GROUP_READY.set(self.is_sleeping)
        self._recovery.stop()
        self._pacing.lost()
        if self.core is None:
            return
        if out_of_memory:
            could_shrink = self.core.shrink_steps()
            limits = self.core.limits
            self._log.warning("steps.shrunk", tokens=limits.tokens, rows=limits.rows, gave_up=not could_shrink)
        self.core.requeue_all()
        if is_silent:
            self._hand_back.check(self.core, is_group_ready=self._is_group_ready, at_once=True)
        self._push()

    def on_choices_ended(self, ended: Iterable[EndedChoice]) -> None:
        """End the choices that the detokenizer has ended."""
        if self.core is None:
            return
        for choice in ended:
            with self.broken.changing():
                self.core.end_silently(choice.handle, choice.completion_tokens)
        self._wake.set()

    def on_outlet_connected(self) -> None:
        """Serve the requests that waited for a detokenizer."""
        self._wake.set()

    def on_outlet_broken(self, process: str | None) -> None:
        """End every sequence with that detokenizer: gateways see the break, too, and resubmit unfinished requests."""
        if self.core is None:
            return
        # Requests that name no detokenizer are those of the only one.
        broken = (None, process)
        for sequence in list(self.core.open_sequences):
            if sequence.request.reply_to.detokenizer in broken:
                self.core.end_silently(sequence.handle)
        # Output of sequences that have ended here must not be sent after a reconnection.
        self._push()

    # --- one turn ---

    @property
    def _is_group_ready(self) -> bool:
        return self.core is not None and self.group_state is GroupState.READY

    @property
    def _has_outlet(self) -> bool:
        return self._outlets is not None and self._outlets.is_connected

    def _can_reach(self, reply_to: ReplyTo) -> bool:
        return self._outlets is not None and self._outlets.can_reach(reply_to)

    def _has_room(self, core: SchedulerCore) -> bool:
        is_early = core.config.micro_batches == 1 and self._pacing.is_early()
        return core.in_flight < core.config.plans_in_flight and not is_early

    def _wake_later(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._wake.set)

    def _turn(self) -> None:
        """Send a plan if the pipeline has room and there is work, and schedule another turn after it."""
        if self.core is None or self._group is None:
            return
        if self.can_serve and (self._has_room(self.core) or self.core.can_overtake):
            started = time.thread_time()
            encodings = self.core.memory.images.encodings
            encodings.room = self.encoders.room if self.encoders else 0
            plan = self.core.plan(self.now, self.core.memory.cache.epoch)
            for encoding in encodings.take_begun():
                assert self.encoders is not None, "without encoders there is no room"
                self.encoders.start(self.core, encoding)
            if plan is not None:
                self._group.send(plan)
                self._pacing.sent(self.core.expected_s)
                if self._core_meter is not None:
                    self._core_meter.note_starts(plan)
                self._step_cpu_s += time.thread_time() - started
                metrics.STEP_CPU_SECONDS.observe(self._step_cpu_s)
                self._step_cpu_s = 0.0
                self._wake.set()
        self._push()

    def _push(self) -> None:
        """Push collected output to the detokenizers; that for unreachable ones is discarded."""
        if self.core is not None:
            self.timelines.note(self.core.milestones.take(), time.time())
        output = self.core.take_output() if self.core else None
        if output is not None and self._outlets is not None:
            self._outlets.send(output, self._weights.version if self._weights else "")

    async def _housekeep(self) -> None:
        """Enforce time limits, advance the cache's epoch, check page accounting and update gauges, periodically."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
            metrics.SLEEPING.set(self.sleep_level)
            self.roles.export()
            if self.is_sleeping:
                metrics.GROUP_READY.set(1)  # it waits to be woken, so there is nothing to repair
            if self.core is None:
                continue
            self._reload_limits(self.core)
            self.core.expire(self.now)
            self._expire_while_asleep(self.core)
            self._hand_back.check(self.core, is_group_ready=self._is_group_ready)
            self._boundaries.pass_due()
            self._storage.advance(self._boundaries.epoch)
            self._push()
            if self._core_meter is not None:
                self._core_meter.export()
            if self._checks is not None:
                self._checks.check()
            self._wake.set()

    async def _keep_tidy(self) -> None:
        """Free the memory of unused adapters; apart from housekeeping, as workers may take seconds to answer."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)
            await begin_again("adapters", self.adapters.tidy)

    def _expire_while_asleep(self, core: SchedulerCore) -> None:
        """End requests that have waited too long for the workers to be woken."""
        if not self.is_sleeping:
            self._asleep_since = None
            return
        if self._asleep_since is None:
            self._asleep_since = self.now
        error = UnavailableError(NOT_WOKEN, retry_after_ms=ASLEEP_RETRY_MS)
        core.expire_unstarted(self._asleep_since, self.now, self._settings.sleep.timeout_s, error)

    def _reload_limits(self, core: SchedulerCore) -> None:
        if self._limits_file is None:
            return
        limits = self._limits_file.value
        if limits is not self._limits:
            self._limits = limits
            core.adopt(limits)

    def _note_limits(self, before: Limits, after: Limits) -> None:
        self._audit.note("limits.changed", changes(before, after))
