"""Subjects of several tenants that always have more to ask than there is room for, in simulated time."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from common.types import (
    ReplyTo,
    RequestId,
    RequestOptions,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    SubscriberId,
    View,
)
from deploy.evaluation.experiments.shares_simulation import PAGE_SIZE, VOCABULARY, TimedWorker
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.core.config import CoreConfig
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.policies import PolicyName, make_policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.limits import Limits
    from common.steps import StepResult
    from common.types import Subject

PROMPT_TOKENS, OUTPUT_TOKENS = 384, 48
OUTPUT_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """A subject that keeps `open_requests` in the queue; with `salted`, each of them has a view of its own."""

    subject: Subject
    open_requests: int
    salted: bool = False


def service(
    policy: PolicyName, backlogs: Sequence[Backlog], limits: Limits, *, duration_s: float, slack_tokens: float = 512.0
) -> Mapping[Subject, float]:
    """Return the service of each subject, in weighted tokens, over the time after the first fifth."""
    run = _Run(policy, backlogs, limits, slack_tokens)
    run.until(duration_s / 5)
    before = Counter(run.served)
    run.until(duration_s)
    return {backlog.subject: run.served[backlog.subject] - before[backlog.subject] for backlog in backlogs}


class _Run:
    def __init__(self, policy: PolicyName, backlogs: Sequence[Backlog], limits: Limits, slack_tokens: float) -> None:
        config = CoreConfig(
            page_size=PAGE_SIZE,
            device_pages=4096,
            max_rows=24,
            max_step_tokens=512,
            max_context=8192,
            vocabulary_size=VOCABULARY,
            eos_token_ids=(),
            max_waiting=8192,
            waiting_timeout_s=1e9,
            running_timeout_s=1e9,
            target_plan_s=0.008,
            max_steps_per_plan=8,
        )
        allocator = PageAllocator(config.device_pages)
        counters = VirtualCounters(ShareConfig(OUTPUT_WEIGHT)) if policy == "fair" else None
        cache = make_cache("user_aware", allocator, PAGE_SIZE)
        self._core = SchedulerCore(config, allocator, cache, make_policy(policy, counters, slack_tokens), counters)
        self._core.adopt(limits)
        self._worker = TimedWorker()
        self._chance = random.Random(7)
        self._numbers = count()
        self._asked: dict[int, Backlog] = {}
        self._running: deque[tuple[float, StepResult]] = deque()
        self._busy_until = self._now = 0.0
        self.served: Counter[Subject] = Counter()
        for backlog in backlogs:
            for _ in range(backlog.open_requests):
                self._submit(backlog)

    def until(self, time_s: float) -> None:
        while self._now < time_s:
            while self._core.in_flight < 2 and (plan := self._core.plan(self._now, epoch=0)) is not None:
                for seconds, result in self._worker.run(plan):
                    self._busy_until = max(self._busy_until, self._now) + seconds
                    self._running.append((self._busy_until, result))
            self._now, result = self._running.popleft()
            self._core.apply(result)
            self._collect()
            self._core.memory.cache.advance(int(self._now / 10))

    def _submit(self, backlog: Backlog) -> None:
        number = next(self._numbers)
        request = ScheduleRequest(
            request_id=RequestId(f"{number}"),
            view=View(backlog.subject, f"request={number}" if backlog.salted else ""),
            reply_to=ReplyTo(SubscriberId("bench")),
            token_ids=np.array(self._chance.choices(range(VOCABULARY), k=PROMPT_TOKENS), np.int32),
            options=RequestOptions(SamplingParams(temperature=0.0), StopConditions(max_tokens=OUTPUT_TOKENS)),
        )
        admission = self._core.submit(request, self._now)
        assert admission.rejected is None, admission.rejected
        [sequence] = [each for each in self._core.queue if each.request is request]
        self._asked[sequence.handle] = backlog

    def _collect(self) -> None:
        output = self._core.take_output()
        if output is None:
            return
        for sequence in output.starts:
            subject = self._asked[sequence.handle].subject
            self.served[subject] += PROMPT_TOKENS - (sequence.cached_tokens or 0)
        for handle in output.handles.tolist():
            self.served[self._asked[handle].subject] += int(OUTPUT_WEIGHT)
        for handle, _ in output.finishes:
            self._submit(self._asked.pop(handle))
