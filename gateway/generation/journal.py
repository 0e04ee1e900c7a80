"""The journal: the tokens and text that each client has received, and when an interrupted choice is resumed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from common.sampling import choice_seed
from common.types import ErrorCode, Finish, FinishReason, RequestId, Resume

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from common.deltas import Delta, LogprobText, PromptLogprobsText, PromptUsage
    from common.requests import GenerateRequest
    from common.types import RequestFailure


class ChoiceUpdate(NamedTuple):
    """New output of one choice; `index` is its place in the response. A named tuple for its cost, as deltas are."""

    index: int  # type: ignore[assignment]  # takes the place of the tuple's method
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[LogprobText] = ()
    finish: Finish | None = None
    # Only in the first update of a choice.
    prompt_usage: PromptUsage | None = None
    # Only in updates before the first token of a prompt's first choice.
    prompt_logprobs: PromptLogprobsText | None = None
    # Once for each choice, if the request asks for them.
    prompt_ids: Sequence[int] = ()
    # Of the weights that computed the newest token, in the first and the last update; empty: not known.
    weight_version: str = ""
    # Of `token_ids`, those that a grammar determined, and those of accepted drafts.
    forced_tokens: int = 0
    drafted_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return len(self.token_ids)


class DeltaRelation(Enum):
    """Relation of a delta to the tokens received before."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    # Tokens are missing, or only some of the delta's tokens are new, so its new text cannot be separated.
    MISFIT = "misfit"


class ChoiceRecord:
    """One choice of a request: the tokens received, the characters passed on, and its interruptions."""

    __slots__ = (
        "conversation_ids",
        "delivered_characters",
        "drafted_tokens",
        "engine_failures",
        "failures",
        "finish",
        "forced_tokens",
        "index",
        "interrupted_at",
        "number",
        "request",
        "score",
        "token_ids",
        "tries",
        "was_admitted",
        "weight_version",
    )

    def __init__(self, request: GenerateRequest, number: int, index: int) -> None:
        """Start the record of choice `number` of `request`, which is choice `index` of the response."""
        self.request = request
        self.number = number
        self.index = index
        self.token_ids = array("I")
        # The tokens that a session has prepended to the prompt.
        self.conversation_ids = array("I")
        self.forced_tokens = 0
        self.drafted_tokens = 0
        self.delivered_characters = 0
        self.finish: Finish | None = None
        # Of the weights that computed the newest token; empty: not known.
        self.weight_version = ""
        self.was_admitted = False
        # How often the choice failed after it had been admitted, since its last token.
        self.failures = 0
        # Failures of the engine that schedulers suspect it of, since its last token.
        self.engine_failures = 0
        # When the choice was interrupted (None: it was not), and how often it has been submitted again since then.
        self.interrupted_at: float | None = None
        self.tries = 0
        # The part of the prompt's log probabilities that is still to come, with a prompt's first choice only.
        self.score = request.options.prompt_logprobs if number == 0 else None

    @property
    def is_finished(self) -> bool:
        """Whether the final update has been passed on."""
        return self.finish is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether max_tokens tokens have been received, so that only the end itself can be missing."""
        limit = self.request.options.stop.max_tokens
        return limit is not None and 0 < limit <= len(self.token_ids)

    def judge(self, delta: Delta) -> DeltaRelation:
        """Classify `delta`; only a FRESH one may be applied."""
        received = len(self.token_ids)
        if self.finish is not None:
            return DeltaRelation.DUPLICATE
        if delta.first_token_index == received:
            return DeltaRelation.FRESH
        if delta.first_token_index + len(delta.token_ids) <= received and delta.finish is None:
            return DeltaRelation.DUPLICATE
        return DeltaRelation.MISFIT

    def apply(self, delta: Delta) -> ChoiceUpdate:
        """Record a FRESH delta and return the update for the client."""
        # A resumed choice reports on a different prompt: the original one with the tokens generated before.
        usage = delta.prompt_usage if not self.token_ids else None
        self.token_ids.extend(delta.token_ids)
        self.forced_tokens += delta.forced_tokens
        self.drafted_tokens += delta.drafted_tokens
        self.delivered_characters += len(delta.text)
        self.finish = delta.finish
        self.was_admitted = True
        self.interrupted_at = None
        self.tries = 0
        if delta.token_ids:
            self.failures = self.engine_failures = 0
        self.weight_version = delta.weight_version or self.weight_version
        part = None if delta.prompt_logprobs is None else self._news(delta.prompt_logprobs)
        return ChoiceUpdate(
            self.index, delta.text, delta.token_ids, delta.logprobs, delta.finish, usage, part,
            weight_version=delta.weight_version,
            forced_tokens=delta.forced_tokens,
            drafted_tokens=delta.drafted_tokens,
        )  # fmt: skip

    def restore(self, update: ChoiceUpdate) -> None:
        """Record an update that was recorded before, by this gateway or another one."""
        self.token_ids.extend(update.token_ids)
        self.forced_tokens += update.forced_tokens
        self.drafted_tokens += update.drafted_tokens
        self.delivered_characters += len(update.text)
        self.finish = update.finish
        self.weight_version = update.weight_version or self.weight_version
        self.was_admitted = True
        part = update.prompt_logprobs
        if part is not None and self.score is not None:
            self.score = None if part.is_last else replace(self.score, start=part.first - 1 + len(part.entries))

    def _news(self, part: PromptLogprobsText) -> PromptLogprobsText | None:
        """Return the part without the entries that were received before."""
        if self.score is None:
            return None
        expected = self.score.start + 1
        is_first = self.request.options.prompt_logprobs == self.score
        entries = part.entries[expected - part.first :] if part.first < expected else part.entries
        self.score = None if part.is_last else replace(self.score, start=expected - 1 + len(entries))
        return part._replace(first=expected, entries=entries, lead=part.lead if is_first else None)

    def end_at_limit(self) -> ChoiceUpdate:
        """Finish an exhausted choice whose final delta was lost."""
        self.finish = Finish(FinishReason.LENGTH)
        return ChoiceUpdate(self.index, "", (), (), self.finish)

    def continuation(self, request_id: RequestId, elapsed_ms: int = 0) -> GenerateRequest:
        """Return the request that continues this choice alone, after the last token received.

        Its `stop` is unchanged: limits count from the first generated token, including those in `resume`. `elapsed_ms`
        of its time limit have passed.
        """
        options = self.request.options
        sampling = replace(options.sampling, seed=choice_seed(options.sampling.seed, self.number))
        resume = Resume(tuple(self.token_ids), self.delivered_characters) if self.token_ids else None
        turn = options.turn and replace(options.turn, conversation_ids=tuple(self.conversation_ids))
        # If the time is over, the scheduler reports the timeout, as for any other request.
        timeout_ms = None if options.timeout_ms is None else max(1, options.timeout_ms - elapsed_ms)
        options = replace(
            options,
            n=1,
            sampling=sampling,
            resume=resume,
            timeout_ms=timeout_ms,
            prompt_logprobs=self.score,
            engine_failures=self.engine_failures,
            turn=turn,
        )
        return replace(self.request, request_id=request_id, options=options)


class JournalEntry:
    """One open request with its choices and the pipeline's report about its prompt."""

    __slots__ = ("_told", "choices", "prompt_ids", "prompt_tokens", "prompt_usage", "request")

    def __init__(self, request: GenerateRequest, first_index: int = 0) -> None:
        """Start the entry of `request`, whose choice 0 is choice `first_index` of the response."""
        self.request = request
        self.choices = [ChoiceRecord(request, number, first_index + number) for number in range(request.options.n)]
        self.prompt_tokens = 0
        # As reported for choice 0, which has just put the whole prompt into the cache, where the other choices find it.
        self.prompt_usage: PromptUsage | None = None
        self.prompt_ids: tuple[int, ...] = ()
        # The choices whose updates have had the prompt's ids.
        self._told: set[int] = set()

    def throttle(self, *, tenant: bool, subject: bool) -> None:
        """Have the request, also when it is resumed, say that a budget of its tenant or subject is nearly used up."""
        options = replace(self.request.options, tenant_is_throttled=tenant, subject_is_throttled=subject)
        self.request = replace(self.request, options=options)
        for choice in self.choices:
            choice.request = self.request

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    @property
    def has_output(self) -> bool:
        """Whether any choice has been admitted."""
        return any(choice.was_admitted for choice in self.choices)

    def restore(self, update: ChoiceUpdate) -> None:
        """Record an update of one of the choices, as it was recorded before."""
        choice = self.choices[update.index - self.choices[0].index]
        if update.prompt_usage is not None:
            self.note_usage(choice, update.prompt_usage)
        if update.prompt_ids:
            self.prompt_ids = tuple(update.prompt_ids)
            self._told.add(update.index)
        choice.restore(update)

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens, summed over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def weight_version(self) -> str:
        """The weights that computed the newest token of the last choice that has any; empty: not known."""
        versions = [choice.weight_version for choice in self.choices if choice.weight_version]
        return versions[-1] if versions else ""

    @property
    def prompt_values(self) -> int:
        """Number of the prompt's log probabilities that all choices together contain, once `prompt_tokens` is known."""
        options = self.request.options
        wanted = options.prompt_logprobs
        if wanted is None:
            return 0
        return wanted.reported(self.prompt_tokens) * wanted.values_per_token * options.n

    def with_prompt_ids(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Add the prompt's ids to the first update of each choice after they are known."""
        if not self.prompt_ids or update.index in self._told:
            return update
        self._told.add(update.index)
        return update._replace(prompt_ids=self.prompt_ids)

    def note_usage(self, choice: ChoiceRecord, usage: PromptUsage) -> None:
        """Keep the first report about the prompt; the report of choice 0 has precedence over the others.

        Reports for resumed choices are ignored, because they count tokens generated before as prompt.
        """
        if choice.token_ids:
            return
        if self.prompt_usage is None or choice.number == 0:
            self.prompt_usage = usage


def number_choices(requests: Sequence[GenerateRequest]) -> list[JournalEntry]:
    """Return an entry for each request; choices are numbered over all of them."""
    entries, first = [], 0
    for request in requests:
        entries.append(JournalEntry(request, first))
        first += request.options.n
    return entries


def restore(entries: Sequence[JournalEntry], updates: Iterable[ChoiceUpdate]) -> None:
    """Record updates of all entries, in the order in which they were recorded."""
    by_index = {choice.index: entry for entry in entries for choice in entry.choices}
    for update in updates:
        by_index[update.index].restore(update)


class Journal:
    """The entries of all open requests of this process."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, JournalEntry] = {}

    def open(self, entry: JournalEntry) -> None:
        """Keep `entry` until its request is closed."""
        assert entry.request.request_id not in self._entries, "request ids are unique"
        self._entries[entry.request.request_id] = entry

    def close(self, request_id: RequestId) -> None:
        """Remove the entry of a request that has ended; unknown ids are ignored."""
        self._entries.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Limits on resubmission while parts of the pipeline are unavailable.

    A request may wait `deadline_s` for its admission or its next token, as long as OpenAI's clients wait for an answer
    by default; it ends earlier if its client disconnects. An admitted one may fail `attempts` times without a new
    token, so that a request that crashes its service does not do so forever. Failures within `burst_s` are not enough:
    a link may break that often while a request waits for a row, or while its long prompt is computed.
    """

    attempts: int = 5
    burst_s: float = 30.0
    deadline_s: float = 600.0
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0

    def delay(self, choice: ChoiceRecord, failure: RequestFailure, now: float) -> float | None:
        """Return the seconds until `choice` is submitted again after `failure`; None to give up.

        `now` and `choice.interrupted_at` are readings of the same monotonic clock, in seconds.
        """
        since = now if choice.interrupted_at is None else choice.interrupted_at
        if not _passes_by_waiting(choice, failure):
            return None
        if choice.failures > self.attempts and now - since >= self.burst_s:
            return None
        delay = min(self.first_delay_s * 2.0 ** min(choice.tries, 16), self.max_delay_s)
        return delay if now + delay <= since + self.deadline_s else None


def _passes_by_waiting(choice: ChoiceRecord, failure: RequestFailure) -> bool:
    if not failure.retryable:
        return False
    if failure.code is ErrorCode.QUEUE_FULL:
        # A new request is refused with a retry hint; an admitted one keeps trying.
        return choice.was_admitted
    return failure.code is ErrorCode.UNAVAILABLE
