"""A timed worker and users with habits around the real scheduler core, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from common.steps import RowStop, StepResult
from common.types import (
    FinishReason,
    ReplyTo,
    RequestId,
    RequestOptions,
    RowSlot,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.core.config import CoreConfig
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.queue import QueueOrder
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.policies import PolicyName, make_policy

if TYPE_CHECKING:
    from common.steps import StepPlan
    from services.scheduler.core.output import Output
    from services.scheduler.core.sequence import Sequence

GREEDY = "greedy"
PAGE_SIZE = 16
VOCABULARY = 30_000
SYSTEM_TOKENS = 512
TURN_TOKENS = 96
MODEST_OUTPUT, GREEDY_OUTPUT = 48, 64
GREEDY_DOCUMENTS, GREEDY_TOKENS, GREEDY_OPEN = 12, 4096, 64
THINK_S = 2.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Users and the amount of their requests; seconds of simulated time."""

    modest_users: int = 8
    duration_s: float = 120.0
    seed: int = 7


@dataclass(slots=True)
class TimedWorker:
    """Answers plans with made-up tokens; `run` returns the results and how long they took."""

    step_s: float = 0.004
    prompt_token_s: float = 60e-6
    row_s: float = 40e-6
    _limits: dict[int, tuple[int, int]] = field(default_factory=dict)
    _decoding: dict[int, int] = field(default_factory=dict)
    _unfinished: dict[int, int] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> list[tuple[float, StepResult]]:
        for row in plan.closes:
            self._decoding.pop(row, None)
            self._unfinished.pop(row, None)
        for opened in plan.opens:
            self._unfinished[opened.row] = len(opened.token_ids)
            self._limits[opened.row] = (len(opened.token_ids), opened.max_total_tokens)
        results = []
        for substep in range(plan.steps):
            sampled = list(self._decoding)
            chunks = plan.prefills if substep == 0 else ()
            for chunk in chunks:
                if chunk.start + chunk.length == self._unfinished.get(chunk.row):
                    del self._unfinished[chunk.row]
                    self._decoding[chunk.row] = self._limits[chunk.row][0]
                    sampled.append(chunk.row)
            seconds = self.step_s + self.row_s * len(sampled)
            seconds += self.prompt_token_s * sum(chunk.length for chunk in chunks)
            results.append((seconds, self._result(plan, substep, sampled, seconds)))
        return results

    def _result(self, plan: StepPlan, substep: int, sampled: list[int], seconds: float) -> StepResult:
        stops = []
        for row in sampled:
            self._decoding[row] += 1
            if self._decoding[row] >= self._limits[row][1]:
                del self._decoding[row]
                stops.append(RowStop(RowSlot(row), FinishReason.LENGTH))
        return StepResult(
            step_id=plan.step_id,
            substep=substep,
            last=substep == plan.steps - 1,
            rows=np.array(sampled, np.int32),
            token_ids=np.array([(17 * row + plan.step_id) % VOCABULARY for row in sampled], np.int32),
            stops=tuple(stops),
            compute_us=int(seconds * 1e6),
        )


@dataclass(slots=True)
class Observed:
    """Times of one request."""

    user: str
    submitted_at: float
    prompt_tokens: int
    cached_tokens: int = 0
    first_token_at: float | None = None
    output_tokens: int = 0


class SharesSimulation:
    """One policy, one workload."""

    def __init__(self, policy: PolicyName, workload: Workload, slack_tokens: float = 512.0) -> None:
        config = CoreConfig(
            page_size=PAGE_SIZE,
            device_pages=4096,
            max_rows=24,
            max_step_tokens=512,
            max_context=8192,
            vocabulary_size=VOCABULARY,
            eos_token_ids=(),
            max_waiting=4096,
            waiting_timeout_s=1e9,
            running_timeout_s=1e9,
            target_plan_s=0.008,
            max_steps_per_plan=8,
        )
        allocator = PageAllocator(config.device_pages)
        counters = VirtualCounters(ShareConfig()) if policy == "fair" else None
        cache = make_cache("user_aware", allocator, PAGE_SIZE)
        self.core = SchedulerCore(
            config, allocator, cache, QueueOrder(make_policy(policy, counters, slack_tokens), counters)
        )
        self.requests: dict[str, Observed] = {}
        self._worker = TimedWorker()
        self.workload = workload
        self._chance = random.Random(workload.seed)
        self._numbers = count()
        self._now = 0.0
        self._arrivals: list[tuple[float, int, str]] = []
        self._names: dict[int, str] = {}
        self._histories: dict[str, list[int]] = {}
        self._system = self._tokens(SYSTEM_TOKENS)

    def run(self) -> None:
        """Simulate until the time is over; what is open then is left out of the figures."""
        for number in range(self.workload.modest_users):
            self._arrive(f"modest {number}", self._chance.uniform(0, THINK_S))
        for _ in range(GREEDY_OPEN):
            self._arrive(GREEDY, 1.0)
        # Two plans in flight, as in the real loop: the worker is never idle.
        running: deque[tuple[float, StepResult]] = deque()
        busy_until = 0.0
        while self._now < self.workload.duration_s:
            self._submit_due()
            while self.core.in_flight < 2 and (plan := self.core.plan(self._now, epoch=0)) is not None:
                for seconds, result in self._worker.run(plan):
                    busy_until = max(busy_until, self._now) + seconds
                    running.append((busy_until, result))
            self._collect()
            next_arrival = self._arrivals[0][0] if self._arrivals else float("inf")
            if running and running[0][0] <= next_arrival:
                self._now, result = running.popleft()
                self.core.apply(result)
                self._collect()
            else:
                self._now = next_arrival
            self.core.memory.cache.advance(int(self._now / 10))

    def _submit_due(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            _, number, user = heapq.heappop(self._arrivals)
            prompt, output = self._prompt(user)
            name = f"{user}/{number}"
            request = ScheduleRequest(
                request_id=RequestId(name),
                view=View(Subject("tenant", user)),
                reply_to=ReplyTo(SubscriberId("bench")),
                token_ids=np.array(prompt, np.int32),
                options=RequestOptions(SamplingParams(temperature=0.0), StopConditions(max_tokens=output)),
            )
            self.requests[name] = Observed(user, self._now, len(prompt))
            admission = self.core.submit(request, self._now)
            assert admission.rejected is None, admission.rejected

    def _prompt(self, user: str) -> tuple[list[int], int]:
        if user == GREEDY:
            # Longer than any conversation, so that longest-prefix order always finds them first.
            number = self._chance.randrange(GREEDY_DOCUMENTS)
            document = random.Random(number).choices(range(VOCABULARY), k=GREEDY_TOKENS)
            return [*self._system, *document, *self._tokens(64)], GREEDY_OUTPUT
        history = self._histories.setdefault(user, list(self._system))
        if len(history) > 4096:
            del history[SYSTEM_TOKENS:]
        history += self._tokens(TURN_TOKENS)
        return list(history), MODEST_OUTPUT

    def _collect(self) -> None:
        output: Output | None = self.core.take_output()
        if output is None:
            return
        for sequence in output.opens:
            self._names[sequence.handle] = sequence.request.request_id
        for sequence in output.starts:
            self.requests[self._name(sequence)].cached_tokens = sequence.cached_tokens or 0
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            observed = self.requests[self._names[handle]]
            observed.output_tokens += 1
            if observed.first_token_at is None:
                observed.first_token_at = self._now
            if observed.user != GREEDY:
                self._histories[observed.user].append(token)
        for handle, finish in output.finishes:
            assert finish.reason is FinishReason.LENGTH
            user = self.requests[self._names[handle]].user
            self._arrive(user, self._now + (0.0 if user == GREEDY else self._chance.expovariate(1 / THINK_S)))

    def _name(self, sequence: Sequence) -> str:
        return self._names[sequence.handle]

    def _arrive(self, user: str, when: float) -> None:
        heapq.heappush(self._arrivals, (when, next(self._numbers), user))

    def _tokens(self, number: int) -> list[int]:
        return self._chance.choices(range(VOCABULARY), k=number)


def jain(values: list[float]) -> float:
    """Return Jain's index: 1 where all have the same, 1/n where one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def figures(simulation: SharesSimulation) -> dict[str, float]:
    """Return the reported figures, times in milliseconds."""
    started = [observed for observed in simulation.requests.values() if observed.first_token_at is not None]
    modest = [observed for observed in started if observed.user != GREEDY]
    greedy = [observed for observed in started if observed.user == GREEDY]

    def ttft(of: list[Observed], percent: float) -> float:
        return float(np.percentile([(o.first_token_at or 0.0) - o.submitted_at for o in of], percent)) * 1000

    prompt = sum(observed.prompt_tokens for observed in started)
    cached = sum(observed.cached_tokens for observed in started)
    # Not an index of tokens: a modest user that never waits is not wronged by having asked for little.
    speeds: dict[str, list[float]] = {}
    for observed in started:
        alone = 0.004 + 60e-6 * (observed.prompt_tokens - observed.cached_tokens)
        waited = (observed.first_token_at or 0.0) - observed.submitted_at
        speeds.setdefault(observed.user, []).append(alone / waited)
    return {
        "modest_ttft_p50": ttft(modest, 50),
        "modest_ttft_p95": ttft(modest, 95),
        "greedy_ttft_p50": ttft(greedy, 50),
        "jain_index_of_speed": jain([float(np.mean(values)) for values in speeds.values()]),
        "hit_rate": cached / prompt,
        "modest_turns": float(len(modest)),
        "output_tokens_per_s": sum(observed.output_tokens for observed in started) / simulation.workload.duration_s,
    }
