"""A scheduler and a gateway around a hub, without a network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import Finish, FinishReason, RequestId, Resume, SubscriberId, TokenLogprob
from services.detokenizer.messages import Answers, ChoiceSpec, Push
from services.detokenizer.session import Hub

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.deltas import Delta
    from services.detokenizer.decoding import DecoderFactory

GATEWAY = SubscriberId("gateway-1")
LENGTH = Finish(FinishReason.LENGTH)
STOP = Finish(FinishReason.STOP)


def spec(
    handle: int = 1,
    stops: Sequence[str] = (),
    *,
    subscriber: SubscriberId = GATEWAY,
    resume: Resume | None = None,
    include_stop_text: bool = False,
    skip_special_tokens: bool = True,
    min_tokens: int = 0,
) -> ChoiceSpec:
    return ChoiceSpec(
        handle=handle,
        request_id=RequestId(f"request-{handle}"),
        choice_index=0,
        subscriber_id=subscriber,
        stop_strings=tuple(stops),
        include_stop_text=include_stop_text,
        skip_special_tokens=skip_special_tokens,
        min_tokens=min_tokens,
        prompt_tokens=10,
        resume=resume,
    )


@dataclass
class Received:
    """All that came out for one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        assert self.finish is None, "nothing may follow a finish"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish = delta.finish
        self.deltas.append(delta)


class Pushing:
    """One push session and one subscriber."""

    def __init__(self, decoders: DecoderFactory) -> None:
        self.hub = Hub(decoders)
        self.mailbox = self.hub.subscribe(GATEWAY)
        self.session = self.hub.open_session()

    async def push(
        self,
        opens: Sequence[ChoiceSpec] = (),
        tokens: Sequence[tuple[int, int]] = (),
        logprobs: dict[int, TokenLogprob] | None = None,
        finishes: dict[int, Finish] | None = None,
        starts: dict[int, int] | None = None,
    ) -> Sequence[Delta]:
        """Apply one push of (handle, token id) pairs; return the deltas it made."""
        handles, ids = [handle for handle, _ in tokens], [token_id for _, token_id in tokens]
        before = self.mailbox.waiting
        self.session.apply(Push(opens, handles, ids, logprobs or {}, finishes or {}, starts or {}))
        return await self.mailbox.take() if self.mailbox.waiting > before else ()

    async def run(
        self, choice: ChoiceSpec, ids: Sequence[int], finish: Finish | None = LENGTH, per_push: int = 1
    ) -> Received:
        """Push a choice from its open to its end, `per_push` tokens at a time; return what came out."""
        received = Received()
        for delta in await self.push(opens=[choice], starts={choice.handle: 4}):
            received.add(delta)
        runs = [ids[start : start + per_push] for start in range(0, len(ids), per_push)] or [[]]
        for index, part in enumerate(runs):
            last = index == len(runs) - 1
            finishes = {choice.handle: finish} if last and finish is not None else {}
            for delta in await self.push(tokens=[(choice.handle, i) for i in part], finishes=finishes):
                received.add(delta)
        return received

    async def answers(self) -> Answers:
        """Return what the scheduler is owed now; there must be something."""
        return await self.session.answers()
