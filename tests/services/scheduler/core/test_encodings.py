"""Images that encoders outside the group encode: which sequences wait for them, and what is left to the workers."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from common.types import CacheMode, RequestId, Subject
from services.scheduler.cache.encoder_outputs import LEAST_EMBEDDINGS
from services.scheduler.core.sequence import Wait
from services.scheduler.core.step_limits import VisionLimits
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_image_work import KEPT, QUESTIONS, submit
from tests.services.scheduler.core.test_images import CAT, DOG, ask

if TYPE_CHECKING:
    from common.types import ScheduleRequest

ROOM = 64


def harness_with(room: int = ROOM, **options: Any) -> Harness:
    harness = Harness(**{"vision": KEPT, "pages": 128, **options})
    harness.core.memory.images.encodings.room = room
    return harness


def check(harness: Harness, *requests: ScheduleRequest) -> None:
    """Go on to the end, and compare the answers."""
    harness.run()
    harness.audit()
    for request in requests:
        total = len(request.token_ids) + (request.options.stop.max_tokens or 0)
        expected = expected_output(request.token_ids.tolist(), total, (STOP_ID,))
        assert harness.outputs[request.request_id, 0] == expected
    encodings = harness.core.memory.images.encodings
    assert not encodings.open_embeddings
    assert not encodings._waiting
    assert not encodings._open
    outputs = harness.core.memory.images.outputs
    assert all(each.users == 0 for each in outputs._outputs.values())
    assert not outputs.has_dropped
    assert len(harness.worker.images.kept) == len(outputs)


def test_a_sequence_waits_for_its_images_while_others_go_on_and_no_plan_encodes() -> None:
    harness = harness_with(depth=1)
    one, text = ask("one", QUESTIONS[0], (CAT, 6), [3], (DOG, 5), [4]), make_request("text", [900, 901], max_tokens=4)
    submit(harness, one, text)
    for _ in range(6):
        harness.plan()
        harness.result()
    assert ("one", 0) not in harness.cached, "it has no row"
    leader = harness.core.leader_of(RequestId("one"))
    assert leader is not None
    assert leader.waits_for is Wait.IMAGE
    assert len(harness.outputs["text", 0]) == 4
    assert harness.encode() == 2
    check(harness, one, text)
    assert harness.worker.images.encoded == []
    opened = next(opened for plan in harness.plans for opened in plan.opens if opened.images)
    assert [image.pixels for image in opened.images] == [None, None]
    images = harness.core.memory.images
    assert (images.encodings.encoded_images, images.encoded_images, images.reused_images) == (2, 0, 0)


def test_what_is_encoded_is_found_by_its_view_only() -> None:
    harness = harness_with()
    requests = [
        ask("one", QUESTIONS[0], (CAT, 6), [3]), ask("again", QUESTIONS[1], (CAT, 6), [3]),
        ask("other", QUESTIONS[2], (CAT, 6), [3], user="bob"),
    ]  # fmt: skip
    begun = []
    for request in requests:
        submit(harness, request)
        harness.plan()
        begun.append(harness.encode())
        check(harness, request)
    assert begun == [1, 0, 1]
    assert harness.worker.images.encoded == []


def test_an_image_that_two_requests_of_a_view_wait_for_is_encoded_once() -> None:
    harness = harness_with()
    requests = [ask(f"r{n}", QUESTIONS[n], (CAT, 6), [n], (CAT, 6), [7 + n]) for n in range(2)]
    submit(harness, *requests)
    harness.plan()
    assert harness.encode() == 1
    check(harness, *requests)
    assert harness.worker.images.encoded == []


def test_images_of_cached_prefixes_are_not_encoded() -> None:
    harness = harness_with()
    first = ask("one", QUESTIONS[0], (CAT, 6), [3] * 8)
    submit(harness, first)
    check(harness, first)
    harness.core.memory.images.outputs.flush()
    harness.run()
    second = ask("two", QUESTIONS[0], (CAT, 6), [3] * 8, (DOG, 5), [4])
    submit(harness, second)
    harness.plan()
    begun = harness.core.memory.images.encodings.open_embeddings
    check(harness, second)
    assert begun == 5
    assert harness.cached["two", 0] >= len(QUESTIONS[0]) + 6


@pytest.mark.parametrize("why", ["it fails", "no encoder serves", "no cache is used", "no output fits"])
def test_the_workers_encode_what_the_encoders_do_not(why: str) -> None:
    harness = harness_with(
        room=0 if why == "no encoder serves" else ROOM,
        vision=VisionLimits(kept_embeddings=LEAST_EMBEDDINGS) if why == "no output fits" else KEPT,
    )
    mode = CacheMode.NONE if why == "no cache is used" else CacheMode.DEFAULT
    request = ask("one", QUESTIONS[0], (CAT, 20), [3], cache_mode=mode)
    submit(harness, request)
    harness.plan()
    assert harness.encode(fails=True) == (1 if why == "it fails" else 0)
    check(harness, request)
    assert harness.worker.images.encoded == [[20]]


def test_sequences_wait_for_room_at_the_encoders_in_their_order() -> None:
    harness = harness_with(room=10)
    requests = [
        ask(f"r{n}", QUESTIONS[n], (sha256(bytes([n])).digest(), length), [3]) for n, length in enumerate((30, 6, 5))
    ]
    submit(harness, *requests)
    begun = []
    for _ in range(3):
        harness.plan()
        begun.append([each.image.length for each in harness.core.memory.images.encodings._begun])
        harness.encode()
        while harness.result():
            pass
    check(harness, *requests)
    # The first is larger than the room, and is encoded alone.
    assert begun == [[30], [6], [5]]
    assert harness.worker.images.encoded == []


def test_when_the_encoders_go_away_nothing_waits_for_room_there() -> None:
    harness = harness_with(room=10)
    requests = [ask(f"r{n}", QUESTIONS[n], (digest, 8), [3]) for n, digest in enumerate((CAT, DOG))]
    submit(harness, *requests)
    harness.plan()
    harness.core.memory.images.encodings.room = 0
    assert harness.encode(fails=True) == 1
    check(harness, *requests)
    assert sorted(length for lengths in harness.worker.images.encoded for length in lengths) == [8, 8]


def test_an_image_of_an_aborted_request_is_kept_for_the_next() -> None:
    harness = harness_with()
    submit(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    harness.plan()
    assert harness.core.abort(RequestId("one"))
    assert harness.encode() == 1
    second = ask("two", QUESTIONS[1], (CAT, 6), [3])
    submit(harness, second)
    harness.plan()
    assert harness.encode() == 0
    check(harness, second)
    assert harness.worker.images.encoded == []
    assert harness.core.memory.images.reused_images == 1


def test_what_is_forgotten_while_it_is_encoded_is_not_kept() -> None:
    harness = harness_with()
    request = ask("one", QUESTIONS[0], (CAT, 6), [3])
    submit(harness, request)
    harness.plan()
    harness.core.forget(Subject("tenant", "alice"))
    assert harness.encode() == 1
    assert set(harness.worker.images.kept.values()) == {CAT}
    check(harness, request)
    assert harness.worker.images.encoded == [[6]]


def test_encoding_apart_is_charged_as_on_the_workers() -> None:
    def charged(room: int) -> float:
        harness = harness_with(room, policy="fair")
        assert harness.counters is not None
        harness.counters.enter(Subject("tenant", "floor"))
        request = ask("one", QUESTIONS[0], (CAT, 12), [3], max_tokens=1)
        submit(harness, request)
        check(harness, request)
        return harness.counters.of_subject(Subject("tenant", "alice"))

    assert charged(ROOM) == charged(0) > 0


def test_encodings_that_end_after_the_workers_were_lost_are_void() -> None:
    harness = harness_with()
    request = ask("one", QUESTIONS[0], (CAT, 6), [3])
    submit(harness, request)
    harness.plan()
    encodings = harness.core.memory.images.encodings
    (late,) = encodings.take_begun()
    harness.lose_workers()
    harness.plan()
    assert harness.encode() == 1, "it is encoded again, for workers that have nothing"
    encodings.finish(late, is_kept=True)
    check(harness, request)
    assert harness.worker.images.encoded == []


@pytest.mark.parametrize("seed", range(20))
def test_random_lives_leave_workers_with_what_the_scheduler_knows(seed: int) -> None:
    draw = random.Random(seed)
    harness = harness_with(
        room=draw.choice([1, 8, 64]),
        vision=VisionLimits(draw.choice([1, 8, 64]), draw.choice([2, 3, 6]) * LEAST_EMBEDDINGS),
        pages=draw.choice([20, 40]), max_step_tokens=draw.choice([8, 24]), depth=draw.choice([1, 2, 3]),
        cache=draw.choice(["isolated", "user_aware", "shared"]), policy=draw.choice([None, "fair"]),
    )  # fmt: skip
    pictures = [(sha256(bytes([number])).digest(), draw.randint(1, 14)) for number in range(4)]
    encodings = harness.core.memory.images.encodings
    submitted: dict[str, ScheduleRequest] = {}
    aborted: set[str] = set()
    for number in range(80):
        action = draw.random()
        if action < 0.35:
            parts: list[Any] = [draw.choice(QUESTIONS)]
            for _ in range(draw.randint(1, 2)):
                parts += [draw.choice(pictures), [draw.randint(100, 103)]]
            request = ask(f"r{number}", *parts, user=draw.choice(["alice", "bob"]), max_tokens=draw.randint(1, 9))
            submit(harness, request)
            submitted[request.request_id] = request
        elif action < 0.42 and submitted:
            name = draw.choice(list(submitted))
            if harness.core.abort(RequestId(name)):
                aborted.add(name)
        elif action < 0.47:
            harness.core.forget(Subject("tenant", draw.choice(["alice", "bob"])))
        elif action < 0.50:
            harness.lose_workers()
        elif action < 0.55:
            encodings.room = draw.choice([0, 8, 64])
        elif action < 0.7:
            harness.encode(fails=draw.random() < 0.3)
        else:
            harness.plan()
            harness.result()
        assert harness.core.memory.images.outputs.faults() == []
    check(harness, *(request for name, request in submitted.items() if name not in aborted))
    assert len(submitted) > 10
