"""Greedy and modest users, floods and weighted tenants under each policy.

Run as `python -m deploy.evaluation.experiments.fairness`.

The scheduler core runs as it is, with a user-aware cache; a worker that computes nothing takes the time that a GPU of
some size would: a constant per step, and something per token of prompt and per decoding row. Time is simulated, so the
figures are the same on every machine, and a run takes seconds.

The greedy user keeps 64 questions about a dozen long documents in the queue; each modest one holds a conversation,
whose next turn comes some seconds after the answer. Reported are times to first token; Jain's index of speed (a user's
speed is what its time to first token would be without other users, over what it is: 1 means that all are slowed down
alike); and how much of the prompts the cache held.

Beside that, two cases in which all always have requests waiting. A flood without a name keeps 256 requests in the
queue, each with a view of its own, and a named user 32: reported is what the user gets, over the half that is its fair
share. Three tenants of weights 3, 2 and 1, with 1, 4 and 12 subjects of different weights: reported is by how much the
share of any tenant, and of any subject within its tenant, differs from what the weights say.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from rich.table import Table

from common.limits import Limits, SubjectLimits, TenantLimits
from common.types import (
    ReplyTo,
    RequestId,
    RequestOptions,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from deploy.evaluation.bench.report import output_console
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results
from deploy.evaluation.experiments.shares_simulation import (
    PAGE_SIZE,
    VOCABULARY,
    SharesSimulation,
    TimedWorker,
    Workload,
    figures,
)
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.core.config import CoreConfig
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.queue import QueueOrder
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.policy.policies import PolicyName, make_policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.steps import StepResult
    from deploy.evaluation.bench.results import Result

K = TypeVar("K")
# Of backlogs, more changes nothing.
BACKLOG_S = 15.0
RESULTS = Path(__file__).parents[1] / "results" / "fairness.json"
UNITS = {
    "modest_ttft_p50": "ms",
    "modest_ttft_p95": "ms",
    "greedy_ttft_p50": "ms",
    "jain_index_of_speed": "",
    "hit_rate": "",
    "modest_turns": "",
    "output_tokens_per_s": "tok/s",
}
SHARE_UNITS = {"named_share_beside_flood": "of its fair share", "tenant_share_error": "%", "subject_share_error": "%"}
PROMPT_TOKENS, OUTPUT_TOKENS = 384, 48
OUTPUT_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """A policy as it is run."""

    label: str
    policy: PolicyName
    slack_tokens: float = 512.0


VARIANTS = (
    PolicyVariant("fcfs", "fcfs"),
    PolicyVariant("lpm", "lpm"),
    PolicyVariant("fair", "fair"),
    PolicyVariant("fair, no slack", "fair", 0.0),
    PolicyVariant("fair, slack 4096", "fair", 4096.0),
)


def measure(variant: PolicyVariant, workload: Workload) -> dict[str, float]:
    """Run one policy; return its figures by the names in `UNITS`."""
    simulation = SharesSimulation(variant.policy, workload, variant.slack_tokens)
    simulation.run()
    return figures(simulation)


def measure_shares(variant: PolicyVariant, duration_s: float) -> dict[str, float]:
    """Run the two cases with a constant backlog; return their figures by the names in `SHARE_UNITS`."""
    named, unnamed = Subject("default", "user/ann"), Subject("default", "anonymous")
    backlogs = [Backlog(unnamed, 256, salted=True), Backlog(named, 32)]
    got = _service(variant, backlogs, Limits(), duration_s)
    tenants = {
        "large": TenantLimits(weight=3),
        "middle": TenantLimits(weight=2, subjects={"user/0": SubjectLimits(weight=3)}),
        "small": TenantLimits(
            weight=1, subjects={"user/0": SubjectLimits(weight=2), "user/1": SubjectLimits(weight=2)}
        ),
    }
    limits = Limits(tenants=tenants)
    sizes = {"large": 1, "middle": 4, "small": 12}
    subjects = [Subject(tenant, f"user/{number}") for tenant, size in sizes.items() for number in range(size)]
    # The smallest tenant asks for most, so that neither numbers nor floods decide.
    asked = {"large": 48, "middle": 24, "small": 24}
    shared = _service(
        variant, [Backlog(subject, asked[subject.tenant]) for subject in subjects], limits, 4 * duration_s
    )
    by_tenant = {tenant: sum(shared[each] for each in subjects if each.tenant == tenant) for tenant in sizes}
    within = [
        _error({each: shared[each] for each in of}, {each: limits.of_subject(each).weight for each in of})
        for of in ([each for each in subjects if each.tenant == tenant] for tenant in sizes)
    ]
    return {
        "named_share_beside_flood": got[named] / (sum(got.values()) / 2),
        "tenant_share_error": _error(by_tenant, {tenant: limits.of(tenant).weight for tenant in sizes}),
        "subject_share_error": max(within),
    }


def _service(
    variant: PolicyVariant, backlogs: Sequence[Backlog], limits: Limits, duration_s: float
) -> Mapping[Subject, float]:
    return service(variant.policy, backlogs, limits, duration_s=duration_s, slack_tokens=variant.slack_tokens)


def _error(got: Mapping[K, float], weights: Mapping[K, float]) -> float:
    """Return by how many percent of it a share differs from its part by weight, at most."""
    total, weight = sum(got.values()), sum(weights.values())
    return max(abs(got[each] / total / (weights[each] / weight) - 1) for each in got) * 100


def main(argv: Sequence[str]) -> int:
    """Run all policies, print a table, and write the figures where wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=60.0, help="simulated seconds (%(default)s)")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, help=f"also write the figures to {RESULTS.name}")
    arguments = parser.parse_args(argv)
    workload = Workload(duration_s=arguments.duration)
    table = Table(title=f"1 greedy and {workload.modest_users} modest users", title_justify="left")
    table.add_column("")
    measured = {
        variant: measure(variant, workload) | measure_shares(variant, min(arguments.duration, BACKLOG_S))
        for variant in VARIANTS
    }
    units = UNITS | SHARE_UNITS
    results: list[Result] = []
    provenance = Provenance.collect(argv)
    provenance = Provenance(
        "python -m deploy.evaluation.experiments.fairness --json", provenance.commit, provenance.date
    )
    for variant in VARIANTS:
        table.add_column(variant.label, justify="right")
        sheet = ResultSheet("fairness", "simulated", 1, provenance, variant.label)
        for name, unit in units.items():
            sheet.add(name, measured[variant][name], unit)
        results += sheet.results
    for name, unit in units.items():
        title = f"{name}, {unit}" if unit else name
        table.add_row(title, *(f"{measured[variant][name]:,.4g}" for variant in VARIANTS))
    output_console().print(table)
    if arguments.json:
        write_results(arguments.json, results)
    return 0


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
        self._core = SchedulerCore(
            config, allocator, cache, QueueOrder(make_policy(policy, counters, slack_tokens), counters)
        )
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
