"""Applies the limits of tenants and users to requests, and estimates the tokens of a request in advance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from common.errors import QueueFullError, UnavailableError
from common.requests import ChatPrompt, PooledText, TokenPrompt
from common.types import Sharing
from gateway.ledger.ledger import this_month, today
from gateway.quotas.meters import ChargeKind, MeteredAccount, Taking, rate_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.limits import Limits
    from common.requests import GenerateRequest, ImageFile, Prompt
    from common.types import Subject
    from gateway.ledger.ledger import Ledger
    from gateway.quotas.meters import MeterReading, Meters

CHARACTERS_PER_TOKEN = 4
# About as many as a photo of 900 × 900 pixels has in the models that read images at their own resolution.
TOKENS_PER_IMAGE = 1024
# How many frames are taken of a file is known only once it is decoded; the tokenizer resizes long videos.
FRAMES_OF_VIDEO_FILE = 16


class LimitsSource(Protocol):
    """A source of limits, which may change at any time."""

    @property
    def value(self) -> Limits:
        """The limits in force."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The share of the quotas that one HTTP request has taken; `settle` must be called once."""

    taking: Taking
    shown: Sequence[MeterReading]
    # A budget of the tenant, or of the subject, is nearly used up.
    throttles_tenant: bool = False
    throttles_subject: bool = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with the remaining quotas."""
        return rate_headers(self.shown)

    def settle(self, used_tokens: int) -> None:
        """Close the request and replace its announced tokens by the number used; returns immediately."""
        self.taking.settle(used_tokens)


@dataclass(frozen=True, slots=True)
class Charge:
    """The amounts that an HTTP request is about to take.

    `may_exceed_concurrent`: the limit of open requests does not apply, because this request ends some of them.
    `uses_model`: budgets apply, because the ledger will have its tokens.
    """

    subject: Subject
    requests: int
    tokens: int
    may_exceed_concurrent: bool = False
    kind: ChargeKind = ChargeKind.NEW
    uses_model: bool = False


class Quotas:
    """Applies limits to requests. A changed limit applies immediately, and to earlier use as well."""

    def __init__(self, rules: LimitsSource | None, meters: Meters, ledger: Ledger) -> None:
        """Apply `rules` (None: no limits); `meters` counts the use, and `ledger` that of budgets."""
        self._rules = rules
        self._ledger = ledger
        self._meters = meters

    def max_context(self, subject: Subject) -> int | None:
        """Return the longest context in tokens, prompt and output together, that `subject` may use; None: no limit."""
        accounts = self._accounts(subject)
        limits = [account.quota.max_context for account in accounts if account.quota.max_context is not None]
        return min(limits, default=None)

    def weight(self, tenant: str) -> float:
        """Return the tenant's share of service, relative to other tenants' weights."""
        return 1.0 if self._rules is None else self._rules.value.of(tenant).weight

    def adapters(self, tenant: str) -> Sequence[str]:
        """Return names or patterns of the adapters that a tenant's requests may use."""
        return () if self._rules is None else self._rules.value.of(tenant).adapters

    async def take(self, charge: Charge) -> Lease:
        """Take the amounts of `charge` from the tenant and from the user, or from neither.

        Raises:
            LimitedError: they exceed the rest of a limit, or a budget is used up.
            UnavailableError: the use cannot be counted now.
        """
        accounts = self._accounts(charge.subject)
        throttled: list[bool] = []
        if charge.uses_model:
            throttled = [await self._nears_budget(account) for account in accounts]
            pairs = zip(accounts, throttled, strict=True)
            accounts = [_throttled(account) if is_throttled else account for account, is_throttled in pairs]
        elif charge.kind is not ChargeKind.NEW:
            throttled = [await self._is_throttled(account) for account in accounts]
        if charge.may_exceed_concurrent:
            accounts = list(map(_without_concurrent, accounts))
        accounts = [account for account in accounts if account.is_limited]
        taking = await self._meters.take(accounts, charge.requests, charge.tokens, charge.kind)
        shown = [
            reading for account, reading in zip(accounts, taking.readings, strict=True) if not self._is_secret(account)
        ]
        obstacle = taking.obstacle
        if obstacle is not None:
            if self._is_secret(obstacle.account):
                obstacle = replace(obstacle, wait_s=math.ceil(obstacle.wait_s))
            raise LimitedError(obstacle.message, math.ceil(obstacle.wait_s * 1000), rate_headers(shown))
        return Lease(taking, shown, *throttled)

    async def _nears_budget(self, account: MeteredAccount) -> bool:
        """Check that no budget of `account` is used up; return whether one nearly is, so that lower limits apply.

        Requests that are open at the same time may together exceed it, as their output is not known in advance.

        Raises:
            BudgetError: one is; retrying before the next day or month is of no use.
            UnavailableError: the ledger is unavailable.
        """
        quota, now = account.quota, self._ledger.now()
        is_throttled = False
        for budget, period, name in (
            (quota.tokens_per_day, today(now), "day"),
            (quota.tokens_per_month, this_month(now), "month"),
        ):
            if budget is None:
                continue
            start, end = period
            spent = await self._ledger.spent(account.tenant, account.subject, int(start.timestamp()))
            if spent >= budget:
                whose = "organization" if account.subject is None else "user"
                message = (
                    f"The budget of this {whose} is used up: {budget} tokens per {name}. "
                    f"It is renewed at {end.isoformat().replace('+00:00', 'Z')}."
                )
                raise BudgetError(message)
            is_throttled |= quota.throttle_at is not None and spent >= quota.throttle_at * budget
        return is_throttled

    async def _is_throttled(self, account: MeteredAccount) -> bool:
        """Return whether a budget nearly is used up, for an answer that has begun, which none ends."""
        try:
            return await self._nears_budget(account)
        except BudgetError:
            return account.quota.throttle_at is not None
        except UnavailableError:
            return False

    def _is_secret(self, account: MeteredAccount) -> bool:
        """Whether the account's use would show subjects of a tenant that shares nothing what others of it do."""
        return (
            account.subject is None
            and self._rules is not None
            and self._rules.value.sharing_of(account.tenant) is Sharing.NONE
        )

    def _accounts(self, subject: Subject) -> list[MeteredAccount]:
        if self._rules is None:
            return []
        limits, tenant = self._rules.value, subject.tenant
        return [
            MeteredAccount(tenant, None, limits.of(tenant)),
            MeteredAccount(tenant, subject.name, limits.of_subject(subject)),
        ]


def _throttled(account: MeteredAccount) -> MeteredAccount:
    quota = account.quota
    requests = _least(quota.requests_per_minute, quota.throttled_requests_per_minute)
    tokens = _least(quota.tokens_per_minute, quota.throttled_tokens_per_minute)
    lower = quota.model_copy(update={"requests_per_minute": requests, "tokens_per_minute": tokens})
    return replace(account, quota=lower)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _without_concurrent(account: MeteredAccount) -> MeteredAccount:
    return replace(account, quota=account.quota.model_copy(update={"concurrent": None}))


class LimitedError(QueueFullError):
    """A limit is reached; `headers` contain the remaining quotas."""

    def __init__(
        self, message: str, retry_after_ms: int | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms)
        self.headers = headers


class BudgetError(LimitedError):
    """A budget is used up; the message says when it is renewed."""

    retryable = False
    reason = "insufficient_quota"


def announced_tokens(request: GenerateRequest) -> int:
    """Return the estimated number of prompt and output tokens of `request`; an output without a limit counts as 0."""
    images = _image_tokens(request.images)
    return prompt_tokens(request.prompt) + images + (request.options.stop.max_tokens or 0) * request.options.n


def prompt_tokens(prompt: Prompt) -> int:
    """Return the estimated number of tokens of `prompt`."""
    match prompt:
        case TokenPrompt(ids):
            return len(ids)
        case ChatPrompt(messages, tools_json):
            contents = sum(len(message.content or "") for message in messages)
            texts = sum(len(part) for message in messages for part in message.parts if isinstance(part, str))
            characters = contents + texts + sum(map(len, tools_json))
            return characters // CHARACTERS_PER_TOKEN + _image_tokens(prompt.images)
        case PooledText():
            characters = len(prompt.text) + len(prompt.second or "") + len(prompt.instruction or "")
            return _within(characters // CHARACTERS_PER_TOKEN, prompt)
        case _:
            return len(prompt) // CHARACTERS_PER_TOKEN


def _image_tokens(images: Iterable[ImageFile]) -> int:
    # Two frames of a video become as many tokens as a picture.
    frames = (FRAMES_OF_VIDEO_FILE if image.is_video_file else len(image.frames) for image in images)
    return sum(TOKENS_PER_IMAGE * max(1, count // 2) for count in frames)


def _within(tokens: int, pooled: PooledText) -> int:
    """Return the estimate, at most what truncation leaves."""
    return tokens if pooled.truncation is None else min(tokens, pooled.truncation.max_tokens)
