"""Passes promotion candidates from the cache to the process that runs the content check, and the verdicts back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from common.child_process import ChildProcess
from common.errors import ConfigurationError
from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.defects import begin_again, changing_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.child_process import JsonMessage
    from common.types import TokenIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.types import PromotionCandidate

POLL_S = 0.25
# Maximum delay before a change of the rules is noticed.
LOOK_S = 1.0
# When more candidates wait, the newest of the tenant with the most is dropped; the cache resubmits it some epochs
# later.
MAX_WAITING = 1024

# Loading a model's vocabulary takes seconds on a slow machine.
START_TIMEOUT_S = 120.0
# A check that takes longer is aborted and counts as a rejection.
DEADLINE_S = 5.0
COMMAND = (sys.executable, "-m", "services.scheduler.content.child")


class ContentDesk:
    """Checks one prompt at a time, tenants in turn; runs on the event loop while a child process does the work.

    A failure is no verdict: the candidate stays private, and the cache resubmits it after `verdict_epochs`.
    """

    def __init__(self, checker: ContentChecker, cache: Callable[[], PrefixCache | None]) -> None:
        """Serve the cache that `cache` returns: it is replaced when the workers' capacity changes."""
        self.verdicts: dict[str, int] = {}
        self._checker = checker
        self._cache = cache
        self._waiting = _Waiting()
        self._rules: str | None = None
        self._complaint: str | None = None
        self._log = get_logger("content")

    async def run(self) -> None:
        """Check candidates until cancelled.

        Raises:
            ConfigurationError: the detectors cannot start with their rules.
        """
        try:
            first = await self._checker.look()
            problem = first.failure or first.complaint
            if problem is not None:
                raise ConfigurationError(f"scheduler.content_check.enabled: {problem}")
            self._note_rules(first)
            await begin_again("content check", self._check)
        finally:
            await self._checker.close()

    async def _check(self) -> NoReturn:
        looked_at = time.monotonic()
        while True:
            self._take()
            if len(self._waiting):
                await self._examine(*self._waiting.take())
            elif time.monotonic() - looked_at >= LOOK_S:
                self._note_rules(await self._checker.look())
                looked_at = time.monotonic()
            else:
                await asyncio.sleep(POLL_S)

    def _take(self) -> None:
        cache = self._cache()
        if cache is None:
            return
        with changing_state():
            candidates = cache.take_candidates()
        for candidate in candidates:
            if not self._waiting.add(cache, candidate):
                self._count("failed")

    async def _examine(self, cache: PrefixCache, candidate: PromotionCandidate) -> None:
        started = time.monotonic()
        answer = await self._checker.examine(candidate.token_ids)
        metrics.CONTENT_CHECK_SECONDS.observe(time.monotonic() - started)
        self._note_rules(answer)
        tokens = len(candidate.token_ids)
        if answer.failure is not None or answer.allowed_tokens is None:
            self._count("failed")
            self._log.error("content.check_failed", reason=answer.failure, tokens=tokens)
            return
        outcome = "allowed" if answer.allowed_tokens >= tokens else "cut" if answer.allowed_tokens else "refused"
        self._count(outcome)
        if answer.rule is not None:
            metrics.CONTENT_FINDINGS_TOTAL.labels(answer.rule).inc()
            self._log.info("content.vetoed", rule=answer.rule, tokens=tokens, allowed_tokens=answer.allowed_tokens)
        with changing_state():
            cache.resolve(candidate.candidate_id, answer.allowed_tokens)

    def _count(self, outcome: str) -> None:
        self.verdicts[outcome] = self.verdicts.get(outcome, 0) + 1
        metrics.VERDICTS_TOTAL.labels(outcome).inc()

    def _note_rules(self, answer: CheckAnswer) -> None:
        """Handle changed rules, which invalidate earlier verdicts, and rules that were refused."""
        if answer.complaint != self._complaint:
            self._complaint = answer.complaint
            if answer.complaint is not None:
                self._log.error("content.rules_refused", reason=answer.complaint)
        metrics.CONTENT_RULES_REFUSED.set(self._complaint is not None)
        if answer.rules is None or answer.rules == self._rules:
            return
        if self._rules is not None:
            cache = self._cache()
            if cache is not None:
                cache.forget_verdicts()
        self._rules = answer.rules
        self._log.info("content.rules_in_effect", rules=answer.rules)


class _Waiting:
    """Candidates of each tenant by arrival; tenants take turns and share the places dynamically."""

    def __init__(self) -> None:
        # By tenant, the next one first.
        self._by_tenant: OrderedDict[str, deque[tuple[PrefixCache, PromotionCandidate]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, cache: PrefixCache, candidate: PromotionCandidate) -> bool:
        """Add a candidate; return whether there was room for one more."""
        self._by_tenant.setdefault(candidate.tenant, deque()).append((cache, candidate))
        self._count += 1
        if self._count <= MAX_WAITING:
            return True
        largest = max(self._by_tenant, key=lambda tenant: len(self._by_tenant[tenant]))
        self._by_tenant[largest].pop()
        self._left(largest)
        return False

    def take(self) -> tuple[PrefixCache, PromotionCandidate]:
        """Remove and return the oldest candidate of the next tenant."""
        tenant, queue = next(iter(self._by_tenant.items()))
        taken = queue.popleft()
        self._by_tenant.move_to_end(tenant)
        self._left(tenant)
        return taken

    def _left(self, tenant: str) -> None:
        self._count -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """Answer of the child process.

    `allowed_tokens` is None if there is no verdict, for the reason in `failure`. `rules` identifies the rules in
    effect; `complaint` is the reason why newer ones are not in effect.
    """

    allowed_tokens: int | None = None
    rule: str | None = None
    rules: str | None = None
    complaint: str | None = None
    failure: str | None = None


class ContentChecker:
    """Owns the child process. One query at a time; after a failure the next query starts a new process."""

    def __init__(
        self, configuration: JsonMessage, deadline_s: float = DEADLINE_S, command: Sequence[str] = COMMAND
    ) -> None:
        """Run `command`, whose first message is `configuration`; each prompt may take `deadline_s`."""
        self._configuration = configuration
        self._deadline_s = deadline_s
        self._command = command
        self._process: ChildProcess | None = None

    async def examine(self, token_ids: TokenIds) -> CheckAnswer:
        """Return the verdict on a prompt, or the reason why there is none."""
        return await self._ask({"ids": token_ids.tolist()})

    async def look(self) -> CheckAnswer:
        """Let the detectors check their rules for changes."""
        return await self._ask({})

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _ask(self, question: JsonMessage) -> CheckAnswer:
        try:
            if self._process is None:
                self._process = await ChildProcess.start(self._command)
                started = _answer(await self._process.ask(self._configuration, START_TIMEOUT_S))
                if started.failure is not None:
                    await self.close()
                    return started
            return _answer(await self._process.ask(question, self._deadline_s))
        except TimeoutError:
            failure = f"no answer within {self._deadline_s:g} s"
        except (OSError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        await self.close()
        return CheckAnswer(failure=failure)


def _answer(message: JsonMessage) -> CheckAnswer:
    allowed = message.get("allowed")
    if allowed is not None and (not isinstance(allowed, int) or allowed < 0):
        raise ValueError(f"no number of tokens: {allowed!r}")
    return CheckAnswer(
        allowed_tokens=allowed,
        rule=message.get("rule"),
        rules=message.get("rules"),
        complaint=message.get("complaint"),
        failure=message.get("failure"),
    )
