"""Requests with a grammar wait for it, and nobody waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.grammars import Grammar, GrammarKind, GrammarScope
from common.types import (
    Admission,
    ReplyTo,
    RequestId,
    RequestOptions,
    RoleWish,
    RowImage,
    SamplingParams,
    ScheduleRequest,
    Subject,
    SubscriberId,
    View,
)
from services.scheduler import submissions
from services.scheduler.submissions import Batch, Submissions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SLOW = Grammar(GrammarKind.REGEX, "slow", "regex")
BAD = Grammar(GrammarKind.REGEX, "(", "guided_regex")


class Loop:
    """Takes everything, and compiles `SLOW` when told so."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.aborted: list[str] = []
        self.wishes: list[RoleWish] = []
        self.prepared: list[Grammar] = []
        self.is_compiled = asyncio.Event()
        self.has_defect = False

    def submit(self, request: ScheduleRequest) -> Admission:
        self.taken.append(request.request_id)
        return Admission(request.request_id, len(request.token_ids))

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    def note_others(self, tokenizer: object, *, serve: bool) -> None:
        """Hand nothing back."""

    def wish_role(self, wish: RoleWish) -> None:
        self.wishes.append(wish)

    async def prepare(self, grammar: Grammar) -> None:
        self.prepared.append(grammar)
        if self.has_defect:
            raise RuntimeError("a defect")
        if grammar.text == BAD.text:
            raise InvalidRequestError("'guided_regex' cannot be followed.", param=grammar.param)
        await self.is_compiled.wait()


def request(name: str, grammar: Grammar | None = None) -> ScheduleRequest:
    return ScheduleRequest(
        RequestId(name),
        View(Subject("t", "u")),
        ReplyTo(SubscriberId("s")),
        np.array([1, 2], np.int32),
        RequestOptions(SamplingParams(grammar=grammar)),
    )


class Stream:
    """One Submit stream, message by message."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.submissions = Submissions(self.loop)
        self.messages: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.reading = asyncio.create_task(self.submissions.read(self._sent()))
        self.answers = self.submissions.answers()

    async def _sent(self) -> AsyncIterator[Batch]:
        while (message := await self.messages.get()) is not None:
            yield message

    def send(self, *requests: ScheduleRequest | Admission, abort: str | None = None) -> None:
        self.messages.put_nowait(Batch(requests, (RequestId(abort),) if abort else ()))

    async def next(self) -> list[tuple[str, str | None]]:
        async with asyncio.timeout(30):
            answer = await anext(self.answers)
        return [(one.request_id, one.rejected.message if one.rejected else None) for one in answer]


async def test_others_are_admitted_while_a_grammar_is_compiled() -> None:
    stream = Stream()
    stream.send(request("bound", SLOW), request("free"))
    assert await stream.next() == [("free", None)]
    stream.send(request("later"))
    assert await stream.next() == [("later", None)]
    stream.loop.is_compiled.set()
    assert await stream.next() == [("bound", None)]
    assert stream.loop.taken == ["free", "later", "bound"]


async def test_a_request_that_could_not_be_decoded_is_answered_with_its_refusal() -> None:
    stream = Stream()
    refusal = Admission(RequestId("bad"), 1, InvalidRequestError("the prompt is empty").to_failure())
    stream.send(refusal, request("good"))
    assert await stream.next() == [("bad", "the prompt is empty"), ("good", None)]
    assert stream.loop.taken == ["good"]


async def test_a_refused_grammar_is_the_requests_answer() -> None:
    stream = Stream()
    stream.send(request("bad", BAD))
    [(name, message)] = await stream.next()
    assert (name, message) == ("bad", "'guided_regex' cannot be followed.")
    assert stream.loop.taken == []


async def test_a_grammar_is_compiled_for_the_requests_view_whatever_the_sender_says() -> None:
    stream = Stream()
    forged = Grammar(GrammarKind.REGEX, "(", "regex", GrammarScope("other", "user/victim"))
    stream.send(request("bad", forged))
    await stream.next()
    assert [grammar.scope for grammar in stream.loop.prepared] == [GrammarScope("t", "u")]


async def test_a_request_that_is_aborted_meanwhile_never_starts() -> None:
    stream = Stream()
    stream.send(request("bound", SLOW))
    stream.send(abort="bound")
    [(name, message)] = await stream.next()
    assert (name, message) == ("bound", "the request was aborted")
    stream.loop.is_compiled.set()
    await asyncio.sleep(0)
    assert stream.loop.taken == []


async def test_the_stream_ends_after_the_last_answer() -> None:
    stream = Stream()
    stream.send(request("bound", SLOW))
    stream.messages.put_nowait(None)
    await stream.reading
    stream.loop.is_compiled.set()
    assert [one async for one in stream.answers] != []


async def test_a_defect_while_a_request_waits_for_its_grammar_ends_the_stream_and_frees_its_place() -> None:
    stream = Stream()

    stream.loop.has_defect = True
    stream.send(request("bound", SLOW))
    with pytest.raises(RuntimeError, match="a defect"):
        await stream.next()
    assert not stream.submissions._waiting
    assert not stream.submissions._held


async def test_images_that_wait_for_grammars_are_bounded_and_leave_room_for_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submissions, "MAX_WAITING_PIXELS", 100)
    stream = Stream()

    def seen(name: str) -> ScheduleRequest:
        image = RowImage(bytes(32), 0, 1, (1, 1), np.zeros((4, 2), np.float32))
        return replace(request(name, SLOW), images=(image,))

    stream.send(seen("one"), seen("two"), request("text", SLOW))
    [(name, message)] = await stream.next()
    assert name == "two"
    assert message is not None
    assert "waiting for grammars with images" in message
    stream.loop.is_compiled.set()
    assert sorted(await stream.next() + await stream.next()) == [("one", None), ("text", None)]
    stream.send(seen("three"))
    assert await stream.next() == [("three", None)]


async def test_an_error_of_the_peer_s_stream_is_raised_by_the_answers() -> None:
    class GoneError(Exception):
        pass

    class Broken:
        def __aiter__(self) -> Broken:
            return self

        async def __anext__(self) -> Batch:
            raise GoneError

    broken = Submissions(Loop())
    await broken.read(Broken())
    with pytest.raises(GoneError):
        await anext(broken.answers())
