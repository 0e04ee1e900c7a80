"""Requests with a grammar wait for it, and nobody waits for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.grammars import Grammar, GrammarKind, GrammarScope
from common.recent_images import LEAST_BYTES, RecentImages
from common.types import (
    Admission,
    CacheMode,
    ErrorCode,
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

    from common.types import Pixels

KEPT_BYTES = 1024 * 1024
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
        self.has_defect = self.refuses = False
        self.requests: list[ScheduleRequest] = []

    def submit(self, request: ScheduleRequest) -> Admission:
        if self.refuses:
            return Admission(request.request_id, 1, InvalidRequestError("refused").to_failure())
        self.taken.append(request.request_id)
        self.requests.append(request)
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

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.loop = Loop()
        self.submissions = Submissions(self.loop, RecentImages(kept_bytes))
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


PIXELS, OTHERS = np.zeros((4, 2), np.float32), np.ones((4, 2), np.float32)
ANN = View(Subject("t", "u"))


def seen(
    name: str, *images: tuple[bytes, Pixels | None], view: View = ANN, mode: CacheMode = CacheMode.DEFAULT
) -> ScheduleRequest:
    rows = tuple(RowImage(digest, i, 1, (1, 1), pixels) for i, (digest, pixels) in enumerate(images))
    own = request(name)
    return replace(own, view=view, images=rows, options=replace(own.options, cache_mode=mode))


async def admitted(stream: Stream, asked: ScheduleRequest) -> Admission:
    stream.send(asked)
    async with asyncio.timeout(30):
        (answer,) = await anext(stream.answers)
    return answer


async def test_images_without_pixels_get_those_that_an_earlier_request_of_the_view_has_left() -> None:
    stream = Stream()
    first = await admitted(stream, seen("first", (b"a", PIXELS)))
    assert (first.rejected, first.keeps_images, first.lacks_images) == (None, True, False)
    again = await admitted(stream, seen("again", (b"b", OTHERS), (b"a", None)))
    assert (again.rejected, again.keeps_images) == (None, True)
    first_image, second_image = stream.loop.requests[-1].images
    assert first_image.pixels is OTHERS
    assert second_image.pixels is PIXELS
    plain = await admitted(stream, request("plain"))
    assert (plain.rejected, plain.keeps_images) == (None, False)


async def test_images_that_are_not_kept_for_the_view_are_asked_for_whoever_has_sent_them() -> None:
    stream = Stream()
    await admitted(stream, seen("first", (b"a", PIXELS)))
    lacking = [
        seen("unknown", (b"b", None)),
        seen("beside", (b"b", OTHERS), (b"c", None)),
        seen("salt", (b"a", None), view=View(Subject("t", "u"), "salt")),
        seen("other", (b"a", None), view=View(Subject("t", "v"))),
        seen("none", (b"a", None), mode=CacheMode.NONE),
        replace(seen("grid"), images=(RowImage(b"a", 0, 1, (2, 2)),)),
    ]
    for asked in lacking:
        answer = await admitted(stream, asked)
        assert answer.rejected is not None
        assert (answer.rejected.code, answer.lacks_images, answer.keeps_images) == (ErrorCode.UNAVAILABLE, True, False)
    assert stream.loop.taken == ["first"]
    # Nothing of them was kept, not even pixels that a refused request had.
    assert (await admitted(stream, seen("later", (b"b", None)))).lacks_images


@pytest.mark.parametrize("way", ["none", "refused"])
async def test_nothing_is_kept_of_requests_that_are_refused_or_use_no_cache(way: str) -> None:
    stream = Stream()
    stream.loop.refuses = way == "refused"
    mode = CacheMode.NONE if way == "none" else CacheMode.DEFAULT
    assert not (await admitted(stream, seen("first", (b"a", PIXELS), mode=mode))).keeps_images
    stream.loop.refuses = False
    assert (await admitted(stream, seen("again", (b"a", None)))).lacks_images


async def test_images_too_large_to_keep_are_not_said_to_be_kept() -> None:
    stream = Stream(kept_bytes=0)
    answer = await admitted(stream, seen("first", (b"a", PIXELS)))
    assert (answer.rejected, answer.keeps_images) == (None, False)


async def test_images_of_which_only_some_can_be_kept_are_not_said_to_be_kept() -> None:
    stream = Stream(kept_bytes=LEAST_BYTES)
    answer = await admitted(stream, seen("first", (b"a", PIXELS), (b"b", OTHERS)))
    assert (answer.rejected, answer.keeps_images) == (None, False)
    assert (await admitted(stream, seen("twice", (b"a", PIXELS), (b"a", PIXELS)))).keeps_images


async def test_a_request_with_a_grammar_gets_and_leaves_pixels_too() -> None:
    stream = Stream()
    stream.loop.is_compiled.set()
    bound = replace(request("bound", SLOW), images=(RowImage(b"a", 0, 1, (1, 1), PIXELS),))
    assert (await admitted(stream, bound)).keeps_images
    bare = replace(request("bare", SLOW), images=(RowImage(b"a", 0, 1, (1, 1)),))
    assert (await admitted(stream, bare)).rejected is None
    assert stream.loop.requests[-1].images[0].pixels is PIXELS


async def test_an_error_of_the_peer_s_stream_is_raised_by_the_answers() -> None:
    class GoneError(Exception):
        pass

    class Broken:
        def __aiter__(self) -> Broken:
            return self

        async def __anext__(self) -> Batch:
            raise GoneError

    broken = Submissions(Loop(), RecentImages(KEPT_BYTES))
    await broken.read(Broken())
    with pytest.raises(GoneError):
        await anext(broken.answers())
