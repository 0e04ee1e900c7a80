"""The state of one scheduler's push stream, its open choices and pending responses; the registry of all streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from common.deltas import Delta, LogprobText, PromptLogprobsText, TokenText
from common.errors import InvalidRequestError, UnavailableError
from common.types import Finish, FinishReason
from services.detokenizer.choice import Choice
from services.detokenizer.mailbox import Mailbox
from services.detokenizer.messages import Answers, StopHit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from common.errors import PandoError
    from common.types import RequestId, SubscriberId, TokenLogprob
    from services.detokenizer.decoding import DecoderFactory
    from services.detokenizer.messages import ChoiceSpec, PromptLogprobsPart, Push


class PushSession:
    """Converts pushes into deltas in mailboxes. Handles are only valid within a session."""

    def __init__(
        self,
        find_mailbox: Callable[[SubscriberId], Mailbox | None],
        decoders: DecoderFactory,
    ) -> None:
        self._find_mailbox = find_mailbox
        self._decoders = decoders
        self._choices: dict[int, Choice] = {}
        self._stop_hits: list[StopHit] = []
        self._gone: list[int] = []
        self._owed = asyncio.Event()
        self.is_closed = False
        # Of the weights that compute the tokens; empty: the scheduler does not say.
        self._weight_version = ""

    @property
    def open_requests(self) -> Iterable[RequestId]:
        """The requests of the choices that have not ended."""
        return (choice.request_id for choice in self._choices.values())

    @property
    def open_choices(self) -> int:
        """Number of choices that have not ended."""
        return len(self._choices)

    def apply(self, push: Push) -> None:
        """Process the results of one step. Handles that are not open (any more) are ignored.

        Raises:
            InvalidRequestError: a handle is opened that is already open.
        """
        self._weight_version = push.weight_version or self._weight_version
        for spec in push.opens:
            self._open(spec)
        for handle, cached_tokens in push.starts.items():
            if (started := self._choices.get(handle)) is not None:
                started.start(cached_tokens, push.cached.get(handle, ()))
        posts: dict[Mailbox, list[Delta]] = {}
        for part in push.prompt_logprobs:
            self._post_prompt_logprobs(part, posts)
        touched = self._distribute(push)
        finishes = push.finishes
        for choice in touched:
            finish = finishes.get(choice.handle) if finishes else None
            delta = self._advance(choice, finish)
            mailbox = choice.mailbox
            if mailbox in posts:
                posts[mailbox].append(delta)
            else:
                posts[mailbox] = [delta]
        for mailbox, deltas in posts.items():
            mailbox.post(deltas)
            if mailbox.is_closed:
                # Its stream may be stuck in a write and end late; its rows must not run until then.
                self.drop_subscriber(mailbox)

    async def answers(self) -> Answers:
        """Wait until there are responses for the scheduler, and return all of them."""
        await self._owed.wait()
        self._owed.clear()
        answers = Answers(self._stop_hits, self._gone)
        self._stop_hits, self._gone = [], []
        return answers

    def confirm(self) -> None:
        """Send what is owed, or an empty message, which shows the scheduler that the stream is alive."""
        self._owed.set()

    def drop_subscriber(self, mailbox: Mailbox) -> None:
        """Drop the choices of a disconnected subscriber and report them as gone, so that their rows end."""
        for handle in [handle for handle, choice in self._choices.items() if choice.mailbox is mailbox]:
            del self._choices[handle]
            self._report_gone(handle)

    def break_off(self, error: PandoError) -> None:
        """End every choice with `error`, because the scheduler is disconnected."""
        self.is_closed = True
        finish = Finish(FinishReason.ERROR, error=error.to_failure())
        for choice in self._choices.values():
            choice.mailbox.post([choice.advance(finish)])
        self._choices.clear()

    def _advance(self, choice: Choice, finish: Finish | None) -> Delta:
        delta = choice.advance(finish)
        if delta.finish is not None:
            self._end(choice)
        elif delta.prompt_usage is None:
            return delta
        return delta._replace(weight_version=self._weight_version)

    def _open(self, spec: ChoiceSpec) -> None:
        mailbox = self._find_mailbox(spec.subscriber_id)
        if mailbox is None or mailbox.is_closed:
            self._report_gone(spec.handle)
            return
        if spec.handle in self._choices:
            raise InvalidRequestError(f"handle {spec.handle} is already open", param="opens")
        decoder = self._decoders.make(skip_special_tokens=spec.skip_special_tokens)
        try:
            self._choices[spec.handle] = Choice(spec, decoder, mailbox)
        except InvalidRequestError as error:  # an invalid stop pattern that no tokenizer has checked
            finish = Finish(FinishReason.ERROR, error=error.to_failure())
            mailbox.post([Delta(spec.request_id, spec.choice_index, 0, (), "", finish=finish)])
            self._report_gone(spec.handle)

    def _distribute(self, push: Push) -> list[Choice]:
        """Add each token to its choice's batch; return the choices to advance, in order."""
        choices = self._choices
        touched = []
        for handle, token_id in zip(push.handles, push.token_ids, strict=True):
            choice = choices.get(handle)
            if choice is not None:
                if not choice.batch:
                    touched.append(choice)
                choice.batch.append(token_id)
        if push.logprobs:
            self._distribute_logprobs(push)
        if push.origins:
            self._distribute_origins(push)
        for handle in push.finishes:
            choice = choices.get(handle)
            if choice is not None and not choice.batch:
                touched.append(choice)
        for spec in push.opens:
            # A stop string may already have ended a resumed choice.
            choice = choices.get(spec.handle)
            if choice is not None and choice.is_stopped and not choice.batch and spec.handle not in push.finishes:
                touched.append(choice)
        return touched

    def _post_prompt_logprobs(self, part: PromptLogprobsPart, posts: dict[Mailbox, list[Delta]]) -> None:
        choice = self._choices.get(part.handle)
        if choice is not None:
            posts.setdefault(choice.mailbox, []).append(choice.add_prompt_logprobs(self._spell_part(part)))

    def _distribute_logprobs(self, push: Push) -> None:
        for index, logprob in push.logprobs.items():
            choice = self._choices.get(push.handles[index])
            if choice is not None:
                choice.logprobs.append(self._spell(push.token_ids[index], logprob))

    def _distribute_origins(self, push: Push) -> None:
        for handle, origin in zip(push.handles, push.origins, strict=True):
            if (choice := self._choices.get(handle)) is not None:
                choice.origins.append(origin)

    def _spell(self, token_id: int, logprob: TokenLogprob) -> LogprobText:
        """Combine log probabilities with the bytes of their tokens."""
        spell = self._decoders.token_bytes
        tops = zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
        return LogprobText(
            TokenText(token_id, logprob.logprob, spell(token_id)),
            tuple(TokenText(top_id, value, spell(top_id)) for top_id, value in tops),
            logprob.asked,
        )

    def _spell_part(self, part: PromptLogprobsPart) -> PromptLogprobsText:
        span, spell = part.span, self._decoders.token_bytes
        columns = (span.token_ids, span.logprobs, span.ranks, span.top_ids, span.top_logprobs, span.asked)
        entries = [
            LogprobText(
                TokenText(token_id, logprob, spell(token_id)),
                tuple(TokenText(top_id, value, spell(top_id)) for top_id, value in zip(top_ids, tops, strict=True)),
                tuple(asked),
                rank,
            )
            for token_id, logprob, rank, top_ids, tops, asked in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
        lead = None if part.lead is None else TokenText(part.lead, 0.0, spell(part.lead))
        return PromptLogprobsText(span.first, entries, lead, part.is_last)

    def _end(self, choice: Choice) -> None:
        del self._choices[choice.handle]
        choice.record()
        if choice.is_stopped:
            # Even if the scheduler has ended the choice in the meantime: it ignores unknown handles.
            self._stop_hits.append(StopHit(choice.handle, choice.tokens))
            self._owed.set()

    def _report_gone(self, handle: int) -> None:
        self._gone.append(handle)
        self._owed.set()


class Hub:
    """Owns the subscribers' mailboxes and the schedulers' push sessions of this process."""

    def __init__(self, decoders: DecoderFactory) -> None:
        self._decoders = decoders
        self._mailboxes: dict[SubscriberId, Mailbox] = {}
        self._sessions: set[PushSession] = set()
        # The newest session of each scheduler that has named itself.
        self._by_scheduler: dict[str, PushSession] = {}

    @property
    def open_choices(self) -> int:
        """Number of choices that have not ended."""
        return sum(session.open_choices for session in self._sessions)

    @property
    def subscribers(self) -> int:
        """Number of subscribed gateways."""
        return len(self._mailboxes)

    def open_session(self) -> PushSession:
        """Open a session for a scheduler's stream."""
        session = PushSession(self._mailboxes.get, self._decoders)
        self._sessions.add(session)
        return session

    def identify(self, session: PushSession, scheduler_id: str) -> None:
        """Record whose session it is; the scheduler's previous session, which it has given up, is closed."""
        predecessor = self._by_scheduler.get(scheduler_id)
        if predecessor is not None and predecessor is not session:
            self.close_session(predecessor)
        self._by_scheduler[scheduler_id] = session

    def has_others(self, session: PushSession) -> bool:
        """Whether another scheduler has a stream, so that it may serve the requests of this one's."""
        return any(each is not session for each in self._by_scheduler.values())

    def open_requests(self) -> set[RequestId]:
        """Return the requests that have open choices."""
        return {request_id for session in self._sessions for request_id in session.open_requests}

    def close_session(self, session: PushSession) -> None:
        """Close the session of a scheduler's stream; its choices end with a retryable error."""
        self._sessions.discard(session)
        self._by_scheduler = {name: each for name, each in self._by_scheduler.items() if each is not session}
        session.break_off(UnavailableError("the scheduler has disconnected", retry_after_ms=1000))

    def subscribe(self, subscriber_id: SubscriberId) -> Mailbox:
        """Open a mailbox for a gateway's stream. An earlier one with the same id is closed; its choices are dropped."""
        self.end_subscription(subscriber_id)
        mailbox = Mailbox(subscriber_id)
        self._mailboxes[subscriber_id] = mailbox
        return mailbox

    def end_subscription(self, subscriber_id: SubscriberId) -> None:
        """Close a gateway's mailbox, which it has given up, and drop its choices; unknown ids are ignored."""
        mailbox = self._mailboxes.get(subscriber_id)
        if mailbox is not None:
            mailbox.close(UnavailableError(f"subscriber {subscriber_id} has subscribed again"))
            self.unsubscribe(mailbox)

    def unsubscribe(self, mailbox: Mailbox) -> None:
        """Remove a gateway's mailbox and report its choices as gone."""
        if self._mailboxes.get(mailbox.subscriber_id) is mailbox:
            del self._mailboxes[mailbox.subscriber_id]
        for session in self._sessions:
            session.drop_subscriber(mailbox)
