"""Runs the scheduler core against the simulated worker, with plans in flight as in the real loop."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from common.grammars import Grammar, GrammarKind
from common.prompt_logprobs import PromptLogprobs
from common.types import (
    CacheMode,
    Finish,
    Pooling,
    ReplyTo,
    RequestId,
    RequestOptions,
    Resume,
    SamplingParams,
    ScheduleRequest,
    StopConditions,
    Subject,
    SubscriberId,
    View,
)
from services.scheduler.acknowledgements import GroupAcks
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.window_pages import WindowPages
from services.scheduler.core.config import CoreConfig
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.drafts import DraftSources
from services.scheduler.core.queue import QueueOrder
from services.scheduler.core.session import SessionRules
from services.scheduler.core.shares import ShareConfig, VirtualCounters
from services.scheduler.core.step_limits import VisionLimits
from services.scheduler.policy.policies import PolicyName, make_policy
from tests.fakes.simulated_worker import VOCABULARY, SimulatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from common.limits import Limits
    from common.steps import StepPlan, StepResult
    from common.transfers import TransferId
    from common.types import Sharing, TokenLogprob
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.tiers.config import HostConfig
    from services.scheduler.cache.types import Accounting
    from services.scheduler.core.rows import RowSlots
    from services.scheduler.core.sequence import PromptPart, Sequence
    from services.scheduler.core.speculation import GuessesTokens

STOP_ID = 7
BOUND = Grammar(GrammarKind.REGEX, "x", "regex")


class Arrival:
    """First come, first served."""

    def order(self, waiting: Iterable[Sequence], match: Callable[[Sequence], int]) -> Iterable[Sequence]:
        return list(waiting)


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    user: str = "alice",
    tenant: str = "tenant",
    max_tokens: int | None = 8,
    n: int = 1,
    priority: int = 0,
    cache_mode: CacheMode = CacheMode.DEFAULT,
    resume: Resume | None = None,
    timeout_ms: int | None = None,
    pooling: Pooling | None = None,
    scored_from: int | None = None,
    grammar: Grammar | None = None,
    detokenizer: str | None = None,
    adapter: str = "",
) -> ScheduleRequest:
    return ScheduleRequest(
        request_id=RequestId(request_id),
        view=View(Subject(tenant, user)),
        reply_to=ReplyTo(SubscriberId("gateway"), detokenizer),
        token_ids=np.array(prompt, np.int32),
        options=RequestOptions(
            SamplingParams(temperature=0.0, grammar=grammar),
            StopConditions(max_tokens=max_tokens),
            n=n,
            priority=priority,
            cache_mode=cache_mode,
            resume=resume,
            timeout_ms=timeout_ms,
            pooling=pooling,
            prompt_logprobs=None if scored_from is None else PromptLogprobs(scored_from),
            adapter=adapter,
        ),
    )


def with_options(request: ScheduleRequest, **changes: Any) -> ScheduleRequest:
    """Return the request with these options changed."""
    return replace(request, options=replace(request.options, **changes))


class Harness:
    """Core and worker side by side; `step` sends plans and `result` brings back the oldest pass."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        max_rows: int = 4,
        max_step_tokens: int = 16,
        mixed_step_tokens: int | None = None,
        mixed_step_share: float = 0.5,
        max_context: int = 128,
        max_waiting: int = 100,
        depth: int = 2,
        target_plan_s: float = 0.0,
        cache: CacheName = "isolated",
        policy: PolicyName | None = None,
        limits: Limits | None = None,
        slack_tokens: float = 0.0,
        host: HostConfig | None = None,
        ranks: int = 1,
        rules: CacheConfig | None = None,
        max_preemptions: int = 0,
        sessions: SessionRules | None = None,
        prefill_tokens_per_s: float = 0.0,
        load_bytes_per_s: float = 0.0,
        is_encoder: bool = False,
        head: Pooling | None = None,
        window: int = 0,
        window_pool: int = 0,
        jump_tokens: int = 0,
        draft_tokens: int = 0,
        compute_us: int = 1000,
        snapshots: int = 0,
        interval: int = 1,
        batch_pause_s: float = 0.0,
        abandons_passes: bool = False,
        micro_batches: int = 1,
        vision: VisionLimits | None = None,
        sees_images: bool = True,
        adapters: Mapping[str, str] | None = None,
        sharing_of: Callable[[str], Sharing] | None = None,
        make_sources: Callable[[RowSlots, PrefixCache], GuessesTokens] = DraftSources,
    ) -> None:
        self.config = CoreConfig(
            page_size=page_size,
            device_pages=pages,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            mixed_step_tokens=mixed_step_tokens,
            mixed_step_share=mixed_step_share,
            batch_pause_s=batch_pause_s,
            abandons_passes=abandons_passes,
            max_context=max_context,
            vocabulary_size=VOCABULARY,
            eos_token_ids=(STOP_ID,),
            max_waiting=max_waiting,
            waiting_timeout_s=10.0,
            running_timeout_s=100.0,
            target_plan_s=target_plan_s,
            max_steps_per_plan=8,
            kv_bytes_per_token=1,
            prefill_tokens_per_s=prefill_tokens_per_s,
            load_bytes_per_s=load_bytes_per_s,
            is_encoder=is_encoder,
            head=head,
            only_pools=head is not None,
            strict_priority=policy == "priority",
            max_preemptions=max_preemptions,
            sessions=sessions or SessionRules(),
            jump_tokens=jump_tokens,
            draft_tokens=draft_tokens,
            micro_batches=micro_batches,
            vision=vision or VisionLimits(),
            sees_images=sees_images,
            adapter_slots=len(adapters or {}),
        )
        allocator = PageAllocator(pages)
        if window:
            allocator.windows = WindowPages(
                window_pool, pages, page_size=page_size, window_tokens=window, keeps=cache != "chunk"
            )
        self.counters = VirtualCounters(ShareConfig()) if policy == "fair" else None
        order = Arrival() if policy is None else make_policy(policy, self.counters, slack_tokens)
        rules = replace(rules or CacheConfig(), snapshots=snapshots, snapshot_interval=interval)
        self.cache = make_cache(cache, allocator, page_size, rules, host, SharingChoices(sharing_of))
        queue = QueueOrder(order, self.counters)
        self.core = SchedulerCore(
            self.config, allocator, self.cache, queue, find_adapter=(adapters or {}).get, make_sources=make_sources
        )
        if limits is not None:
            self.core.adopt(limits)
        self.worker = SimulatedWorker(
            pages,
            page_size,
            host.pages if host else 0,
            ranks,
            is_encoder,
            window=window,
            window_pool=window_pool,
            max_step_tokens=max_step_tokens,
            snapshots=[[] for _ in range(snapshots)] if snapshots else None,
            host_snapshot_slots=host.snapshots if host else 0,
            compute_us=compute_us,
            image_block=self.config.vision.block,
        )
        self.acks = GroupAcks(ranks)
        self.depth = depth
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.results: deque[StepResult] = deque()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        # Tokens by their origins, which `TokenOrigin` numbers.
        self.origins: Counter[int] = Counter()
        # Of the tokens that have them, in their order.
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.cached: dict[tuple[str, int], int] = {}
        # Log probabilities of prompts by position; None: of a token that has none.
        self.scores: dict[tuple[str, int], dict[int, float | None]] = {}
        self.scored: set[tuple[str, int]] = set()
        self._names: dict[int, tuple[str, int]] = {}

    def plan(self) -> None:
        """Send plans until enough are in flight; the worker runs them at once, the results wait."""
        while self.core.in_flight < self.depth:
            plan = self.core.plan(self.now, epoch=0)
            if plan is None:
                break
            self.plans.append(plan)
            self.results.extend(self.worker.run(plan))
        self.collect()

    def result(self) -> bool:
        """Bring back the oldest pass; return whether there was one."""
        if not self.results:
            return False
        self.core.apply(self.results.popleft())
        self.collect()
        return True

    def complete(self, transfer_id: TransferId, rank: int) -> None:
        """Let one rank be done with a transfer, and tell the core if it was the last."""
        ack = self.acks.add(rank, self.worker.complete(transfer_id, rank))
        if ack is not None:
            self.core.finish_transfer(ack, self.now)

    def encode(self, *, fails: bool = False) -> int:
        """Let the encoders be done with all images that they were asked for; return how many these are."""
        encodings = self.core.memory.images.encodings
        begun = encodings.take_begun()
        for encoding in begun:
            if not fails:
                self.worker.images.kept[encoding.output.output_id] = encoding.image.digest
            encodings.finish(encoding, is_kept=not fails)
        return len(begun)

    def complete_all(self) -> None:
        """Let all ranks be done with all transfers, in order."""
        for transfer_id, opened in list(self.worker.open.items()):
            for rank in sorted(opened.ranks):
                self.complete(transfer_id, rank)

    def collect(self) -> None:
        output = self.core.take_output()
        if output is None:
            return
        for sequence in output.opens:
            name: tuple[str, int] = (sequence.request.request_id, sequence.choice_index)
            assert sequence.handle not in self._names, "opened twice"
            self._names[sequence.handle] = name
            resume = sequence.request.options.resume
            self.outputs[name] = list(resume.token_ids) if resume else []
        for sequence in output.starts:
            self.cached[self._names[sequence.handle]] = sequence.cached_tokens or 0
        for part in output.prompt_logprobs:
            self._take_scores(part)
        self.origins.update(output.origins or bytes(len(output.token_ids)))
        for handle, token in zip(output.handles.tolist(), output.token_ids.tolist(), strict=True):
            name = self._names[handle]
            assert name not in self.finishes, "a token after the finish"
            self.outputs[name].append(token)
        for index, logprob in output.logprobs:
            self.logprobs.setdefault(self._names[int(output.handles[index])], []).append(logprob)
        for handle, finish in output.finishes:
            name = self._names[handle]
            assert name not in self.finishes, "finished twice"
            self.finishes[name] = finish

    def _take_scores(self, part: PromptPart) -> None:
        name = self._names[part.handle]
        assert name not in self.scored, "more of what was complete"
        assert not self.outputs[name], "tokens before the prompt's log probabilities"
        scores = self.scores.setdefault(name, {})
        if part.lead is not None:
            assert not scores, "a lead in the middle"
            scores[part.span.first - 1] = None
        for position, value in enumerate(part.span.logprobs.tolist(), part.span.first):
            assert position not in scores, "a position twice"
            scores[position] = value
        if part.is_last:
            self.scored.add(name)

    def run(self, limit: int = 10_000) -> None:
        """Go on until nothing is left to do."""
        for _ in range(limit):
            self.plan()
            self.check_accounts()
            if not (self.result() or self.encode()):
                return
            self.complete_all()
        raise AssertionError("the core does not come to rest")

    def check_accounts(self) -> None:
        accounts = self.core.memory.account(self.core.rows)
        assert accounts.is_exact, accounts
        total = accounts.free + accounts.soft_free + accounts.evictable + accounts.protected
        assert total == accounts.capacity
        if self.core.memory.loads is not None:
            assert self.core.memory.loads.host.account().is_exact
        for snapshots in (self.core.memory.account_snapshots(self.core.rows), self._host_snapshots()):
            if snapshots is not None:
                assert snapshots.is_exact, snapshots
        windows = self.core.memory.account_windows(self.core.rows)
        if windows is not None:
            assert windows.is_exact
            assert windows.free + windows.soft_free + windows.evictable + windows.protected == windows.capacity

    def _host_snapshots(self) -> Accounting | None:
        return None if self.cache.host is None else self.cache.host.account_snapshots()

    def audit(self) -> None:
        assert self.core.memory.audit(self.core.rows).is_clean
        assert self.core.memory.window_faults(self.core.rows) == []
        if self.core.memory.states is not None:
            assert self.core.memory.states.pool.faults() == []
        if self.cache.host is not None and self.cache.host.states is not None:
            assert self.cache.host.states.faults() == []
        if self.cache.host is not None and self.cache.host.storage is not None:
            assert self.cache.host.storage.faults() == []
        assert self.core.memory.images.outputs.faults() == []

    def lose_workers(self, *, engine_failed: bool = False) -> None:
        self.results.clear()
        self.core.requeue_all()
        self.core.judge_loss(self.now, engine_failed=engine_failed)
        self.collect()
        self.acks = GroupAcks(self.worker.ranks)
        old = self.worker
        self.worker = SimulatedWorker(
            old.pages,
            old.page_size,
            old.host_pages,
            old.ranks,
            old.is_encoder,
            last_step=old.last_step,
            last_transfer=old.last_transfer,
            window=old.window,
            window_pool=old.window_pool,
            max_step_tokens=old.max_step_tokens,
            snapshots=None if old.snapshots is None else [[-1] for _ in old.snapshots],
            host_snapshot_slots=old.host_snapshot_slots,
            compute_us=old.compute_us,
            image_block=old.image_block,
        )
