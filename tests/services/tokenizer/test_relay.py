from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import ContextLengthError, InvalidRequestError, UnavailableError
from common.prompt_logprobs import PromptLogprobs
from common.requests import ImageFile, ImageLimits, Prompt, TokenPrompt
from common.room import SharedRoom
from common.types import (
    Admission,
    CacheMode,
    ErrorCode,
    RequestId,
    RowImage,
    ScheduleRequest,
    SessionTurn,
    Subject,
    View,
)
from services.tokenizer.images.pool import MissingImageError
from services.tokenizer.images.prompts import PlacedPrompt
from services.tokenizer.relay import GatewaySession, Relay
from tests.services.tokenizer.generate_requests import LIMITS, submission

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from common.types import TokenIds
    from services.tokenizer.encoding import Encoded


SEEING = replace(LIMITS, images=ImageLimits(max_images=2, max_file_bytes=8, max_pixels=100))
PICTURE = ImageFile(b"picture")


class RecordingScheduler:
    """What the relay sends."""

    def __init__(self) -> None:
        self.is_away = False
        self.batches: list[list[ScheduleRequest]] = []
        self.aborted: list[RequestId] = []

    @property
    def names(self) -> list[str]:
        return [request.request_id for batch in self.batches for request in batch]

    def submit(self, requests: Sequence[ScheduleRequest]) -> None:
        if self.is_away:
            raise UnavailableError("away", retry_after_ms=1000)
        self.batches.append(list(requests))

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        self.aborted.extend(request_ids)


class Encoding:
    """Encodes when it is told to: one id per character."""

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.error: Exception | None = None
        self.calls = 0
        self.subjects: list[Subject] = []

    async def encode(
        self, subject: Subject, prompts: Sequence[Prompt], _add_special_tokens: Sequence[bool | None]
    ) -> Sequence[Encoded]:
        self.calls += 1
        self.subjects.append(subject)
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return [self._ids(prompt) for prompt in prompts]

    async def ban(self, _subject: Subject, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ord(character) % 50 for character in word) for word in words)

    def _ids(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, TokenPrompt):
            return np.array(prompt.ids, dtype=np.int32)
        assert isinstance(prompt, str)
        if prompt == "too long":
            return ContextLengthError("too long")
        return np.array([ord(character) % 50 for character in prompt], dtype=np.int32)


class Placing:
    """Puts three ids below 0 behind a prompt for each image, when it is told to."""

    are_taken = True
    videos_are_taken = False

    def __init__(self) -> None:
        self.may_finish = asyncio.Event()
        self.error: Exception | None = None
        self.calls = self.cancelled = 0
        self.views: list[View | None] = []
        self.are_kept = False

    async def place(
        self, _subject: Subject, token_ids: TokenIds, files: Sequence[ImageFile], param: str, view: View | None = None
    ) -> PlacedPrompt:
        self.calls += 1
        self.views.append(view)
        try:
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        assert param == "prompt"
        images = tuple(RowImage(file.data, len(token_ids) + 3 * i, 3, ()) for i, file in enumerate(files))
        with_images = np.concatenate([token_ids, np.full(3 * len(files), -7, np.int32)])
        return PlacedPrompt(with_images, images, self.are_kept)

    def shown(self, token_ids: TokenIds) -> TokenIds:
        return np.where(token_ids < 0, np.int32(49), token_ids)


class Bench:
    def __init__(self, places: int = 100) -> None:
        self.placing = Placing()
        self.scheduler = RecordingScheduler()
        self.encoding = Encoding()
        self.room = SharedRoom(places, "being submitted", 1000)
        self.relay = Relay(SEEING, self.scheduler, self.encoding.encode, self.room, self.encoding.ban, self.placing)
        self.session = GatewaySession()

    def submit(self, *names: str) -> None:
        self.relay.submit(self.session, [submission(name) for name in names])

    def admit(self, *names: str) -> None:
        self.relay.on_admissions(Admission(RequestId(name), 5) for name in names)

    async def answers(self) -> dict[str, ErrorCode | None]:
        taken = await asyncio.wait_for(self.session.take(), 30)
        return {answer.request_id: answer.rejected.code if answer.rejected else None for answer in taken}

    async def has_no_answer(self) -> bool:
        await settle()
        return not self.session.owes


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_batch_is_encoded_in_one_call_and_sent_in_one_message(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    await settle()
    assert bench.encoding.calls == 1
    assert [[sent.request_id for sent in batch] for batch in bench.scheduler.batches] == [["a", "b", "c"]]
    assert list(bench.scheduler.batches[0][0].token_ids) == [ord(character) % 50 for character in "hello"]


async def test_everything_but_the_prompt_is_passed_on_unchanged(bench: Bench) -> None:
    asked = submission(
        "a",
        temperature=0.5,
        stop_strings=("x",),
        n=3,
        priority=7,
        skip_special_tokens=False,
        timeout_ms=9,
        cache_mode=CacheMode.PRIVATE,
        session="monday",
        prompt_logprobs=PromptLogprobs(1, 2),
        routing_key="group",
    )
    bench.relay.submit(bench.session, [asked])
    await settle()
    (sent,) = bench.scheduler.batches[0]
    assert sent.reply_to == asked.reply_to
    for field in ("request_id", "view", "options", "routing_key"):
        assert getattr(sent, field) == getattr(asked.request, field)


async def test_texts_that_are_banned_reach_the_scheduler_as_ids(bench: Bench) -> None:
    bench.relay.submit(bench.session, [submission("a", bad_words=("no", "x")), submission("b")])
    await settle()
    first, second = bench.scheduler.batches[0]
    assert first.options.sampling.banned_sequences == ((10, 11), (20,))
    assert second.options.sampling.banned_sequences == ()


async def test_predicted_texts_reach_the_scheduler_as_ids(bench: Bench) -> None:
    asked = [submission("a", prediction="no"), submission("b"), submission("c", prediction="too long")]
    bench.relay.submit(bench.session, asked)
    await settle()
    assert [request.prediction_ids for request in bench.scheduler.batches[0]] == [(10, 11), (), ()]


async def test_truncation_keeps_the_end_of_a_prompt(bench: Bench) -> None:
    bench.relay.submit(bench.session, [submission("a", truncate_prompt_tokens=2)])
    await settle()
    (sent,) = bench.scheduler.batches[0]
    assert list(sent.token_ids) == [ord(character) % 50 for character in "lo"]


async def test_admissions_go_back_to_the_gateway_that_asked(bench: Bench) -> None:
    other = GatewaySession()
    bench.submit("a")
    bench.relay.submit(other, [submission("b")])
    await settle()
    bench.admit("b", "a")
    assert await bench.answers() == {"a": None}
    assert [answer.request_id for answer in await other.take()] == ["b"]


async def test_the_relay_forgets_a_request_after_its_admission(bench: Bench) -> None:
    bench.submit("a")
    await settle()
    assert bench.relay.pending == 1
    bench.admit("a")
    assert bench.relay.pending == 0
    bench.admit("a")
    assert await bench.answers() == {"a": None}
    assert await bench.has_no_answer()


async def test_bad_requests_are_rejected_and_the_others_go_on(bench: Bench) -> None:
    requests = [
        submission("a"),
        submission("b", model="other"),
        submission("c", ""),
        submission("d", "too long"),
    ]
    bench.relay.submit(bench.session, requests)
    await settle()
    assert bench.scheduler.names == ["a"]
    assert await bench.answers() == {
        "b": ErrorCode.MODEL_NOT_FOUND,
        "c": ErrorCode.INVALID_REQUEST,
        "d": ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    }


async def test_an_abort_during_encoding_keeps_the_request_from_the_scheduler(bench: Bench) -> None:
    bench.encoding.may_finish.clear()
    bench.submit("a", "b")
    await settle()
    bench.relay.abort([RequestId("a")])
    assert await bench.answers() == {"a": ErrorCode.INVALID_REQUEST}
    bench.encoding.may_finish.set()
    await settle()
    assert bench.scheduler.names == ["b"]
    assert bench.scheduler.aborted == []


async def test_aborts_of_sent_and_unknown_requests_pass_through(bench: Bench) -> None:
    bench.submit("a")
    await settle()
    bench.relay.abort([RequestId("a"), RequestId("admitted-long-ago")])
    assert bench.scheduler.aborted == ["a", "admitted-long-ago"]
    bench.admit("a")
    assert await bench.answers() == {"a": None}


async def test_an_aborted_request_may_come_again_under_its_id(bench: Bench) -> None:
    bench.encoding.may_finish.clear()
    bench.submit("a")
    await settle()
    bench.relay.abort([RequestId("a")])
    bench.submit("a")
    bench.encoding.may_finish.set()
    await settle()
    assert bench.scheduler.names == ["a"]


async def test_a_turn_whose_group_is_away_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = bench.scheduler.submit

    def submit_others(requests: Sequence[ScheduleRequest]) -> None:
        if any(request.options.turn is not None for request in requests):
            raise UnavailableError("the group of the session is away")
        submit(requests)

    monkeypatch.setattr(bench.scheduler, "submit", submit_others)
    turn = submission("turn", session="chat", turn=SessionTurn("turn"))
    bench.relay.submit(bench.session, [submission("a"), turn, submission("b")])
    await settle()
    assert bench.scheduler.names == ["a", "b"]
    assert await bench.answers() == {"turn": ErrorCode.UNAVAILABLE}


async def test_requests_are_rejected_while_the_scheduler_is_away(bench: Bench) -> None:
    bench.scheduler.is_away = True
    bench.submit("a", "b")
    (first, second) = await asyncio.wait_for(bench.session.take(), 30)
    for answer in (first, second):
        assert answer.rejected is not None
        assert (answer.rejected.code, answer.rejected.retryable) == (ErrorCode.UNAVAILABLE, True)
        assert answer.rejected.retry_after_ms
    assert bench.relay.pending == 0


async def test_unanswered_requests_of_a_lost_scheduler_are_rejected_and_aborted(bench: Bench) -> None:
    bench.submit("a", "b")
    await settle()
    bench.admit("a")
    bench.encoding.may_finish.clear()
    bench.submit("c")
    await settle()
    bench.relay.on_scheduler_lost()
    assert await bench.answers() == {"a": None, "b": ErrorCode.UNAVAILABLE}
    assert bench.scheduler.aborted == ["b"]
    bench.encoding.may_finish.set()
    await settle()
    assert bench.scheduler.names == ["a", "b", "c"]


async def test_requests_of_a_disconnected_gateway_end_and_those_of_others_continue(bench: Bench) -> None:
    other = GatewaySession()
    bench.submit("sent")
    bench.relay.submit(other, [submission("others")])
    await settle()
    bench.encoding.may_finish.clear()
    bench.submit("encoding")
    await settle()
    bench.relay.close(bench.session)
    assert bench.scheduler.aborted == ["sent"]
    assert bench.relay.pending == 1
    bench.encoding.may_finish.set()
    await settle()
    assert bench.scheduler.names == ["sent", "others"]
    bench.admit("sent", "others")
    assert await bench.has_no_answer()


async def test_too_many_pending_requests_are_refused_with_a_hint() -> None:
    bench = Bench(places=4)
    bench.submit("a", "b", "c")
    await settle()
    assert bench.scheduler.names == ["a", "b"]
    assert await bench.answers() == {"c": ErrorCode.QUEUE_FULL}
    bench.admit("a")
    bench.submit("d")
    await settle()
    assert bench.scheduler.names == ["a", "b", "d"]


async def test_a_tenant_that_fills_its_places_leaves_some_to_others() -> None:
    bench = Bench(places=100)
    views = [View(Subject("acme", f"user/{number}")) for number in range(200)]
    flood = [submission(str(number), view=view) for number, view in enumerate(views)]
    bench.relay.submit(bench.session, flood)
    await settle()
    assert len(bench.scheduler.names) == 75
    assert set((await bench.answers()).values()) == {ErrorCode.QUEUE_FULL}
    bench.relay.submit(bench.session, [submission("rivals", view=View(Subject("rival", "user/bob")))])
    await settle()
    assert bench.scheduler.names[-1] == "rivals"


async def test_a_request_that_is_aborted_while_it_is_encoded_keeps_its_place_until_then() -> None:
    bench = Bench(places=4)
    bench.encoding.may_finish.clear()
    bench.submit("a", "b")
    bench.relay.abort([RequestId("a"), RequestId("b")])
    assert len(await bench.answers()) == 2
    # Otherwise requests that are submitted and aborted at once would wait for the encoder without a bound.
    bench.submit("c")
    assert await bench.answers() == {"c": ErrorCode.QUEUE_FULL}
    bench.encoding.may_finish.set()
    await settle()
    bench.submit("d", "e")
    await settle()
    assert bench.scheduler.names == ["d", "e"]


@pytest.mark.parametrize("leave_while", ["encoding", "sent"])
async def test_a_gateway_that_leaves_gives_its_places_back(leave_while: str) -> None:
    bench = Bench(places=4)
    if leave_while == "encoding":
        bench.encoding.may_finish.clear()
    bench.submit("a", "b")
    await settle()
    bench.relay.close(bench.session)
    bench.encoding.may_finish.set()
    await settle()
    bench.submit("c", "d")
    await settle()
    assert bench.scheduler.names[-2:] == ["c", "d"]


async def test_requests_of_different_subjects_are_encoded_for_each_of_them(bench: Bench) -> None:
    ann, bob = Subject("acme", "user/ann"), Subject("rival", "user/bob")
    subjects = {"a": ann, "b": bob, "c": ann}
    bench.relay.submit(bench.session, [submission(name, view=View(subject)) for name, subject in subjects.items()])
    await settle()
    assert bench.encoding.subjects == [ann, bob]
    assert sorted(bench.scheduler.names) == ["a", "b", "c"]


async def test_a_second_request_under_a_pending_id_is_ignored(bench: Bench) -> None:
    bench.submit("a")
    bench.submit("a")
    await settle()
    assert bench.scheduler.names == ["a"]
    bench.admit("a")
    assert await bench.answers() == {"a": None}


async def test_a_defect_in_encoding_is_answered_too(bench: Bench) -> None:
    bench.encoding.error = RuntimeError("boom")
    bench.submit("a", "b")
    assert await bench.answers() == {"a": ErrorCode.INTERNAL, "b": ErrorCode.INTERNAL}
    assert bench.relay.pending == 0


async def test_the_ids_of_the_prompt_are_returned_with_an_acceptance_if_the_request_asks_for_them(bench: Bench) -> None:
    asked = submission("asked", TokenPrompt((3, 4, 5)), returns_prompt_ids=True, truncate_prompt_tokens=2)
    refused = submission("refused", TokenPrompt((3, 4)), returns_prompt_ids=True)
    bench.relay.submit(bench.session, [asked, refused, submission("not", TokenPrompt((3, 4)))])
    await settle()
    bench.admit("asked", "not")
    error = UnavailableError("full").to_failure()
    bench.relay.on_admissions([Admission(RequestId("refused"), 2, error)])
    answers = await asyncio.wait_for(bench.session.take(), 30)
    assert {answer.request_id: answer.prompt_ids for answer in answers} == {"asked": (4, 5), "refused": (), "not": ()}


async def test_texts_do_not_wait_for_the_images_of_the_same_user(bench: Bench) -> None:
    seeing = submission("seeing", images=(PICTURE,), returns_prompt_ids=True)
    bench.relay.submit(bench.session, [seeing, submission("plain")])
    await settle()
    assert bench.scheduler.names == ["plain"]
    bench.placing.may_finish.set()
    await settle()
    assert bench.scheduler.names == ["plain", "seeing"]
    (sent,) = bench.scheduler.batches[1]
    assert sent.token_ids[-3:].tolist() == [-7, -7, -7]
    assert [(image.digest, image.offset) for image in sent.images] == [(b"picture", 5)]
    bench.admit("seeing")
    (answer,) = await bench.session.take()
    assert answer.prompt_ids[-3:] == (49, 49, 49)


async def test_images_are_kept_for_the_view_unless_the_request_does_not_use_the_cache(bench: Bench) -> None:
    bench.placing.may_finish.set()
    own = View(Subject("acme", "user/ada"), "salt")
    modes = {"a": CacheMode.DEFAULT, "b": CacheMode.PRIVATE, "c": CacheMode.NONE}
    for name, mode in modes.items():
        bench.relay.submit(bench.session, [submission(name, images=(PICTURE,), view=own, cache_mode=mode)])
    await settle()
    assert bench.placing.views == [own, own, None]


async def test_the_gateway_learns_whether_images_of_an_accepted_request_are_kept(bench: Bench) -> None:
    bench.placing.may_finish.set()
    for name, are_kept in {"kept": True, "not": False, "refused": True}.items():
        bench.placing.are_kept = are_kept
        bench.relay.submit(bench.session, [submission(name, images=(PICTURE,))])
        await settle()
    bench.admit("kept", "not")
    bench.relay.on_admissions([Admission(RequestId("refused"), 2, UnavailableError("full").to_failure())])
    answers = await asyncio.wait_for(bench.session.take(), 30)
    assert {each.request_id: each.keeps_images for each in answers} == {"kept": True, "not": False, "refused": False}


async def test_the_gateway_is_asked_for_an_image_that_is_not_kept(bench: Bench) -> None:
    bench.placing.may_finish.set()
    bench.placing.error = MissingImageError("not kept")
    bare = replace(PICTURE, key=b"key").bare()
    bench.relay.submit(bench.session, [submission("a", images=(bare,))])
    (answer,) = await asyncio.wait_for(bench.session.take(), 30)
    assert answer.rejected is not None
    assert (answer.rejected.code, answer.lacks_images) == (ErrorCode.UNAVAILABLE, True)
    assert bench.scheduler.batches == []
    # The same request, with the image this time.
    bench.placing.error = None
    bench.relay.submit(bench.session, [submission("a", images=(PICTURE,))])
    await settle()
    assert bench.scheduler.names == ["a"]


async def test_a_refused_image_rejects_its_request(bench: Bench) -> None:
    bench.placing.may_finish.set()
    bench.placing.error = InvalidRequestError("The image is damaged.", param="prompt")
    bench.relay.submit(bench.session, [submission("a", images=(PICTURE,), prompt_name="text")])
    (answer,) = await asyncio.wait_for(bench.session.take(), 30)
    assert answer.rejected is not None
    assert (answer.rejected.message, answer.rejected.param) == ("The image is damaged.", "text")
    assert bench.scheduler.batches == []
    assert not bench.relay.pending


@pytest.mark.parametrize("way", ["abort", "leave"])
async def test_images_of_a_request_that_ends_meanwhile_are_not_decoded(way: str) -> None:
    bench = Bench(places=1)
    bench.relay.submit(bench.session, [submission("a", images=(PICTURE,))])
    await settle()
    assert (bench.placing.calls, bench.placing.cancelled) == (1, 0)
    if way == "abort":
        bench.relay.abort([RequestId("a")])
        assert await bench.answers() == {"a": ErrorCode.INVALID_REQUEST}
    else:
        bench.relay.close(bench.session)
    await settle()
    assert bench.placing.cancelled == 1
    assert bench.scheduler.batches == []
    # Its place is free again.
    bench.placing.may_finish.set()
    bench.relay.submit(GatewaySession(), [submission("a", images=(PICTURE,))])
    await settle()
    assert bench.scheduler.names == ["a"]


async def test_a_defect_while_images_are_placed_is_answered(bench: Bench) -> None:
    bench.placing.may_finish.set()
    bench.placing.error = RuntimeError("a defect")
    bench.relay.submit(bench.session, [submission("a", images=(PICTURE,))])
    assert await bench.answers() == {"a": ErrorCode.INTERNAL}


async def test_images_that_do_not_fit_into_the_context_are_refused(bench: Bench) -> None:
    bench.placing.may_finish.set()
    bench.relay.submit(bench.session, [submission("a", "x" * 96, images=(PICTURE, PICTURE))])
    assert await bench.answers() == {"a": ErrorCode.CONTEXT_LENGTH_EXCEEDED}
