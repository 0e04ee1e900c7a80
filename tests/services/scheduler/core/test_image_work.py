"""When images are encoded, what that counts for, and which outputs of the encoder are used again."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from common.types import CacheMode, RequestId, Subject
from services.scheduler.cache.encoder_outputs import LEAST_EMBEDDINGS
from services.scheduler.cache.tiers.config import HostConfig
from services.scheduler.core.step_limits import VisionLimits
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.services.scheduler.core.test_images import CAT, DOG, ask

if TYPE_CHECKING:
    from common.types import ScheduleRequest

KEPT = VisionLimits(kept_embeddings=8 * LEAST_EMBEDDINGS)
# Texts whose first token differs, so that no prefix is found.
QUESTIONS = [[50 + number, 11, 12] for number in range(8)]


def submit(harness: Harness, *requests: ScheduleRequest) -> None:
    for request in requests:
        assert harness.core.submit(request, harness.now).rejected is None


def serve(harness: Harness, *requests: ScheduleRequest) -> list[list[int]]:
    """Serve requests to their ends; return the lengths of the images that each plan encoded."""
    before = len(harness.worker.images.encoded)
    submit(harness, *requests)
    harness.run()
    harness.audit()
    for request in requests:
        options = request.options
        total = len(request.token_ids) + (options.stop.max_tokens or 0)
        expected = expected_output(request.token_ids.tolist(), total, (STOP_ID,))
        assert harness.outputs[request.request_id, 0] == expected
    return harness.worker.images.encoded[before:]


def chunks_of(harness: Harness) -> list[list[int]]:
    return [[chunk.length for chunk in plan.prefills] for plan in harness.plans if plan.prefills]


def test_an_image_longer_than_a_step_is_encoded_once_and_alone() -> None:
    harness = Harness(max_step_tokens=16, depth=1)
    assert serve(harness, ask("one", [1, 2], (CAT, 40), [3, 4])) == [[40]]
    # The step that encodes it computes the text before it and one token of it.
    assert chunks_of(harness) == [[3], [16], [16], [9]]


def test_embeddings_count_as_tokens_of_the_step_that_encodes_them() -> None:
    harness = Harness(max_step_tokens=32, depth=1)
    assert serve(harness, ask("one", [1, 2], (CAT, 10), [3, 4])) == [[10]]
    assert chunks_of(harness) == [[14]]
    harness = Harness(max_step_tokens=16, depth=1)
    assert serve(harness, ask("one", [1, 2], (CAT, 10), [3, 4])) == [[10]]
    # 10 embeddings, and 6 of 14 tokens.
    assert chunks_of(harness) == [[6], [8]]


def test_images_beyond_the_limit_of_a_step_with_decoding_rows_wait_for_the_next() -> None:
    harness = Harness(max_step_tokens=64, depth=1, pages=128, vision=VisionLimits(step_embeddings=12))
    submit(harness, make_request("text", [900, 901], max_tokens=8))
    harness.plan()
    harness.result()
    requests = [ask(f"r{number}", QUESTIONS[number], (CAT, 6), [3], user=f"user-{number}") for number in range(3)]
    assert serve(harness, *requests) == [[6, 6], [6]]
    # The third one's text is computed at once.
    assert chunks_of(harness) == [[2], [10, 10, 3], [7]]


def test_images_that_delay_no_decoding_row_are_encoded_together() -> None:
    vision = VisionLimits(step_embeddings=12)
    requests = [ask(f"r{number}", QUESTIONS[number], (CAT, 6), [3], user=f"user-{number}") for number in range(3)]
    harness = Harness(max_step_tokens=64, depth=1, pages=128, vision=vision)
    assert serve(harness, *requests) == [[6, 6, 6]]
    # With their embeddings, the three prompts of 10 tokens do not fit into one step.
    harness = Harness(max_step_tokens=40, depth=1, pages=128, vision=vision)
    assert serve(harness, *requests) == [[6, 6], [6]]


def test_images_of_one_prompt_are_encoded_together() -> None:
    harness = Harness(max_step_tokens=64, depth=1, pages=128, vision=VisionLimits(step_embeddings=6))
    assert serve(harness, ask("one", [1, 2], (CAT, 6), (DOG, 6), [3, 4])) == [[6, 6]]
    assert chunks_of(harness) == [[16]]


def test_text_decodes_in_every_step_while_many_images_are_encoded() -> None:
    harness = Harness(max_step_tokens=32, max_rows=8, pages=256, depth=1, vision=VisionLimits(step_embeddings=8))
    submit(harness, make_request("text", [900, 901], max_tokens=40))
    harness.plan()
    harness.result()
    before = len(harness.plans)
    submit(harness, *(ask(f"r{n}", QUESTIONS[n], (CAT, 20), [3], user=f"user-{n}", max_tokens=2) for n in range(6)))
    while len(harness.worker.images.encoded) < 6:
        harness.plan()
        known = len(harness.outputs["text", 0])
        harness.result()
        assert len(harness.outputs["text", 0]) == known + 1
    assert harness.worker.images.encoded == [[20]] * 6
    lengths = [sum(chunk.length for chunk in plan.prefills) for plan in harness.plans[before:]]
    assert max(lengths) <= 31
    harness.run()


def test_a_cut_image_is_not_encoded_again_by_later_chunks_or_choices() -> None:
    harness = Harness(max_step_tokens=8, pages=128)
    assert serve(harness, ask("one", [1], (CAT, 20), (DOG, 20), [3] * 8, n=2)) == [[20], [20]]


def test_the_encoding_of_images_is_charged_to_the_subject_once() -> None:
    def charged(vision: VisionLimits, *requests: ScheduleRequest) -> float:
        harness = Harness(policy="fair", pages=64, vision=vision)
        assert harness.counters is not None
        harness.counters.enter(Subject("tenant", "floor"))
        for request in requests:
            serve(harness, request)
        return harness.counters.of_subject(Subject("tenant", "alice"))

    first, second = (ask(name, QUESTIONS[n], (CAT, 12), [3], max_tokens=1) for n, name in enumerate(("one", "two")))
    text = [make_request(name, [7] * 16, max_tokens=1) for name in ("text", "more")]
    plain = charged(VisionLimits(), replace(text[0], token_ids=text[0].token_ids + 10))
    assert charged(VisionLimits(), first) == plain + 12
    assert charged(VisionLimits(), first, second) == 2 * (plain + 12)
    assert charged(KEPT, first, second) == 2 * plain + 12


def test_another_question_about_the_same_image_finds_its_output_and_sends_no_pixels() -> None:
    harness = Harness(vision=KEPT)
    assert serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3])) == [[6]]
    assert serve(harness, ask("two", QUESTIONS[1], (CAT, 6), [4])) == []
    (opened,) = (opened for plan in harness.plans for opened in plan.opens if opened.request_id == "two")
    assert opened.computed_tokens == 0
    assert opened.images[0].pixels is None
    assert harness.core.memory.images.reused_images == 1
    without = Harness(vision=VisionLimits(kept_embeddings=0))
    assert serve(without, ask("one", QUESTIONS[0], (CAT, 6), [3])) == [[6]]
    assert serve(without, ask("two", QUESTIONS[1], (CAT, 6), [4])) == [[6]]
    assert without.outputs == harness.outputs


@pytest.mark.parametrize("cache", ["isolated", "user_aware", "shared", "chunk"])
def test_outputs_are_found_by_others_only_in_a_shared_cache(cache: Any) -> None:
    harness = Harness(vision=KEPT, cache=cache, pages=128)
    serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    assert serve(harness, ask("other", QUESTIONS[1], (CAT, 6), [3], user="bob")) == ([] if cache == "shared" else [[6]])
    assert serve(harness, ask("rival", QUESTIONS[2], (CAT, 6), [3], tenant="rival")) == (
        [] if cache == "shared" else [[6]]
    )
    assert serve(harness, ask("again", QUESTIONS[3], (CAT, 6), [3])) == ([[6]] if cache == "chunk" else [])


def test_the_public_prefix_of_an_image_makes_no_output_public() -> None:
    """Several users' evidence shares the KV of an image in its context, not the output for other contexts."""
    harness = Harness(vision=KEPT, cache="user_aware", pages=128)
    prompt = QUESTIONS[0], (CAT, 6), [3] * 8
    for number in range(4):
        serve(harness, ask(f"r{number}", *prompt, user=f"user-{number}"))
    harness.cache.advance(1)
    assert serve(harness, ask("same", *prompt, user="new")) == []
    assert harness.cached["same", 0] > 0, "enough users sent the same context"
    assert serve(harness, ask("new", QUESTIONS[1], (CAT, 6), [3], user="new")) == [[6]]


def test_a_request_that_uses_no_cache_uses_and_keeps_no_output() -> None:
    harness = Harness(vision=KEPT)
    for name in ("one", "two"):
        assert serve(harness, ask(name, QUESTIONS[0], (CAT, 6), [3], cache_mode=CacheMode.NONE)) == [[6]]
    assert not harness.worker.images.kept
    assert serve(harness, ask("three", QUESTIONS[0], (CAT, 6), [3])) == [[6]]


def test_an_image_that_a_prompt_has_twice_is_encoded_once_if_it_is_kept() -> None:
    harness = Harness(vision=KEPT)
    assert serve(harness, ask("one", [1], (CAT, 6), [2], (CAT, 6), [3])) == [[6]]


def test_an_output_outlives_the_kv_of_its_image() -> None:
    harness = Harness(vision=KEPT, pages=24)
    serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    for number in range(4):
        serve(harness, make_request(f"text-{number}", [100 + number] * 60, max_tokens=4))
    assert serve(harness, ask("again", QUESTIONS[0], (CAT, 6), [3])) == []
    assert harness.cached["again", 0] == 0, "the KV was evicted"


@pytest.mark.parametrize("keeps_host", [False, True])
def test_a_model_that_sleeps_keeps_no_output(keeps_host: bool) -> None:
    harness = Harness(vision=KEPT, host=HostConfig(pages=64) if keeps_host else None)
    serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    assert len(harness.core.memory.images.outputs) == 1
    while harness.core.memory.loads is not None and harness.core.memory.loads.is_copying:
        harness.plan()
        harness.result()
        harness.complete_all()
    harness.core.hold_all(held=True)
    assert harness.core.is_at_rest
    harness.core.give_back_memory(keeps_host=keeps_host)
    assert not len(harness.core.memory.images.outputs)
    harness.worker.images.kept.clear()
    harness.core.hold_all(held=False)
    assert serve(harness, ask("two", QUESTIONS[1], (CAT, 6), [3])) == [[6]]


@pytest.mark.parametrize("how", ["forget", "forget a session", "flush"])
def test_what_is_forgotten_is_deleted_on_the_workers_and_encoded_again(how: str) -> None:
    harness = Harness(vision=KEPT)
    serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    assert harness.worker.images.kept
    if how == "flush":
        harness.core.memory.flush()
    else:
        harness.core.forget(Subject("tenant", "alice"), None if how == "forget" else "chat")
    # A plan that has nothing else to say.
    harness.run()
    assert not harness.worker.images.kept
    assert serve(harness, ask("two", QUESTIONS[1], (CAT, 6), [3])) == [[6]]


def test_after_a_restart_of_the_workers_images_are_encoded_again() -> None:
    harness = Harness(vision=KEPT, max_step_tokens=8)
    serve(harness, ask("one", QUESTIONS[0], (CAT, 6), [3]))
    request = ask("two", QUESTIONS[1], (CAT, 6), [3], (DOG, 6), [4])
    submit(harness, request)
    harness.plan()
    harness.lose_workers()
    harness.run()
    harness.audit()
    assert harness.outputs["two", 0] == expected_output(request.token_ids.tolist(), 25, (STOP_ID,))
    assert harness.worker.images.encoded == [[6], [6]]
    assert set(harness.worker.images.kept.values()) == {CAT, DOG}


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_leave_workers_with_what_the_scheduler_knows(seed: int) -> None:
    draw = random.Random(seed)
    harness = Harness(
        vision=VisionLimits(draw.choice([1, 8, 64]), draw.choice([0, 2, 3]) * LEAST_EMBEDDINGS),
        pages=draw.choice([20, 40]), max_step_tokens=draw.choice([8, 24]), depth=draw.choice([1, 2, 3]),
        cache=draw.choice(["isolated", "user_aware", "shared"]), policy=draw.choice([None, "fair"]),
    )  # fmt: skip
    pictures = [(sha256(bytes([number])).digest(), draw.randint(1, 14)) for number in range(3)]
    submitted: dict[str, ScheduleRequest] = {}
    aborted: set[str] = set()
    for number in range(60):
        action = draw.random()
        if action < 0.4:
            parts: list[Any] = [draw.choice(QUESTIONS)]
            for _ in range(draw.randint(1, 2)):
                parts += [draw.choice(pictures), [draw.randint(100, 103)]]
            user = draw.choice(["alice", "bob"])
            request = ask(f"r{number}", *parts, user=user, max_tokens=draw.randint(1, 9))
            submit(harness, request)
            submitted[request.request_id] = request
        elif action < 0.45 and submitted:
            name = draw.choice(list(submitted))
            if harness.core.abort(RequestId(name)):
                aborted.add(name)
        elif action < 0.5:
            harness.core.forget(Subject("tenant", draw.choice(["alice", "bob"])))
        elif action < 0.53:
            harness.lose_workers()
        else:
            harness.plan()
            harness.result()
        assert harness.core.memory.images.outputs.faults() == []
    harness.run()
    harness.audit()
    for name, request in submitted.items():
        if name not in aborted:
            total = len(request.token_ids) + (request.options.stop.max_tokens or 0)
            assert harness.outputs[name, 0] == expected_output(request.token_ids.tolist(), total, (STOP_ID,))
    assert len(submitted) > 10
    # Once all rows have ended, and the workers know.
    outputs = harness.core.memory.images.outputs
    assert not outputs.has_dropped
    assert len(harness.worker.images.kept) == len(outputs)
    assert all(each.users == 0 for each in outputs._outputs.values())


@pytest.mark.parametrize("host", [None, HostConfig(pages=256)])
def test_a_prefix_with_a_picture_that_left_the_device_comes_back_from_the_host(host: HostConfig | None) -> None:
    harness = Harness(vision=KEPT, pages=24, host=host)

    def cached(name: str) -> int:
        serve(harness, ask(name, [1, 2], (CAT, 12), [3, 4, 5], max_tokens=2))
        return harness.cached[RequestId(name), 0]

    assert cached("cold") == 0
    for number in range(4):
        serve(harness, make_request(f"text {number}", [200 * number + place for place in range(10, 70)], max_tokens=2))
    assert cached("warm") == (0 if host is None else 16)


@pytest.mark.parametrize(("pictures", "shared"), [([CAT, CAT, CAT], 16), ([CAT, DOG, sha256(b"cow").digest()], 0)])
def test_text_with_a_picture_is_shared_once_enough_users_have_sent_both(pictures: list[bytes], shared: int) -> None:
    harness = Harness(vision=KEPT, cache="user_aware", pages=128)
    for number, picture in enumerate(pictures):
        serve(harness, ask(f"{number}", [1, 2], (picture, 12), [3, 4, 5], user=f"user-{number}", max_tokens=2))
    harness.cache.share()
    serve(harness, ask("another", [1, 2], (CAT, 12), [3, 4, 5], user="dan", max_tokens=2))
    assert harness.cached[RequestId("another"), 0] == shared
