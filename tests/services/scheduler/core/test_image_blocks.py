"""Images whose tokens attend to each other: no chunk cuts them, and no cached prefix ends within."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import ConfigurationError
from common.images import image_ids, image_spans, runs_of
from common.settings import SchedulerSettings
from common.steps import EngineCapacity
from common.types import RequestId, RowImage
from services.scheduler.core.config import resolve_core
from services.scheduler.core.planner import LEAST_SAMPLES
from services.scheduler.core.step_limits import VisionLimits
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request

if TYPE_CHECKING:
    from common.types import ScheduleRequest

BLOCK = 6
RULES = VisionLimits(block=BLOCK)
CAT, DOG = (sha256(name).digest() for name in (b"cat", b"dog"))
CAPACITY = EngineCapacity(1024, 16, 2048, 1000, (0,), 512, "fingerprint", "cpu", 2, sees_images=True, image_block=256)


def ask(name: str, *parts: list[int] | tuple[bytes, int], user: str = "alice", max_tokens: int = 3) -> ScheduleRequest:
    """Return a request whose prompt has texts and images of so many blocks, with a token between these."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        digest, blocks = part
        images.append(RowImage(digest, len(ids), blocks * BLOCK, (1, blocks), np.zeros((2, 3), np.float32)))
        own = image_ids(digest, blocks * BLOCK).reshape(blocks, BLOCK).tolist()
        for number, block in enumerate(own):
            ids += ([5] if number else []) + block
    return replace(make_request(name, ids, user=user, max_tokens=max_tokens), images=tuple(images))


def serve(harness: Harness, *requests: ScheduleRequest) -> None:
    """Serve requests to their ends. The worker checks that each block is computed in one pass."""
    for request in requests:
        assert harness.core.submit(request, harness.now).rejected is None
    harness.run()
    harness.audit()
    for request in requests:
        total = len(request.token_ids) + (request.options.stop.max_tokens or 0)
        expected = expected_output(request.token_ids.tolist(), total, (STOP_ID,))
        assert harness.outputs[request.request_id, 0] == expected


def chunks_of(harness: Harness) -> list[list[int]]:
    return [[chunk.length for chunk in plan.prefills] for plan in harness.plans if plan.prefills]


def test_chunks_end_before_an_image_or_after_it() -> None:
    harness = Harness(vision=RULES, max_step_tokens=10, depth=1)
    serve(harness, ask("one", [1, 2, 3, 4, 5], (CAT, 1), [6] * 3))
    # The image does not fit beside the text; the step that encodes it has no tokens left beside its own.
    assert chunks_of(harness) == [[5], [6], [3]]


def test_a_picture_in_several_blocks_is_cut_between_them() -> None:
    harness = Harness(vision=RULES, max_step_tokens=10, depth=1)
    serve(harness, ask("one", [1, 2], (CAT, 3), [6]))
    assert chunks_of(harness) == [[8], [8], [7]]
    assert harness.worker.images.encoded == [[3 * BLOCK]]


def test_pages_that_end_within_an_image_are_not_taken_for_it() -> None:
    harness = Harness(vision=RULES, max_step_tokens=64, pages=8, max_rows=4)
    requests = [ask(f"r{n}", [n + 1] * 5, (CAT, 1), [6], user=f"user-{n}", max_tokens=9) for n in range(4)]
    serve(harness, *requests)
    assert sum(len(plan.opens) for plan in harness.plans) >= 4


@pytest.mark.parametrize("pages", [7, 8, 9, 10])
def test_rows_that_share_few_pages_all_end(pages: int) -> None:
    harness = Harness(vision=RULES, max_step_tokens=10, pages=pages, max_rows=4, depth=2)
    requests = [ask(f"r{n}", [n + 1] * 3, (CAT, 2), [6], user=f"user-{n}", max_tokens=5) for n in range(5)]
    serve(harness, *requests)


def test_a_row_is_retracted_if_few_free_pages_are_too_few_for_an_image() -> None:
    vision = replace(RULES, step_embeddings=BLOCK, kept_embeddings=2048)
    harness = Harness(vision=vision, pages=14, max_step_tokens=20, max_rows=2, depth=1)
    serve(
        harness,
        ask("a", [1] * 17, (DOG, 3), [6] * 3, (CAT, 2), [6, 6], user="u0", max_tokens=1),
        ask("b", [2] * 3, (CAT, 1), [6] * 3, user="u1", max_tokens=3),
        ask("c", [3] * 3, (CAT, 2), [6], (DOG, 1), [8] * 6, user="u2", max_tokens=1),
        ask("d", [4] * 14, (DOG, 2), [9], (DOG, 3), [6] * 4, user="u3", max_tokens=4),
    )
    assert harness.core.memory.retractions > 0


def test_a_match_ends_before_an_image_or_after_all_of_its_blocks() -> None:
    harness = Harness(vision=RULES, max_step_tokens=64)
    first = ask("one", [1, 2, 3, 4, 5], (CAT, 2), [6] * 6)
    serve(harness, first, replace(first, request_id=RequestId("again")))
    serve(harness, ask("other", [1, 2, 3, 4, 5], (CAT, 2), [7] * 6), ask("dog", [1, 2, 3, 4, 5], (DOG, 2), [6] * 6))
    opened = {row.request_id: row for plan in harness.plans for row in plan.opens}
    assert [opened[RequestId(name)].computed_tokens for name in ("one", "again", "other", "dog")] == [0, 20, 4, 4]
    ((_, end),) = image_spans(first.token_ids, first.images)
    assert end == 18


@pytest.mark.parametrize("drafts", [0, 4])
def test_images_are_computed_beside_rows_that_decode(drafts: int) -> None:
    """However few prompt tokens a step is to compute beside these."""
    rows = 3
    harness = Harness(
        vision=RULES, max_step_tokens=rows + BLOCK + drafts, max_rows=rows, mixed_step_tokens=1, pages=256, depth=1,
        draft_tokens=drafts,
    )  # fmt: skip
    for name in ("a", "b"):
        request = make_request(name, [7, 8, 9], user=name, max_tokens=100)
        # Drafts that are all accepted.
        coming = expected_output([7, 8, 9], 103, (STOP_ID,)) if drafts else ()
        request = replace(request, prediction_ids=tuple(coming))
        assert harness.core.submit(request, harness.now).rejected is None
    while not all(harness.outputs.get((name, 0)) for name in ("a", "b")) or (drafts and not harness.plans[-1].drafts):
        harness.plan()
        harness.result()
    assert harness.core.submit(ask("one", [1], (CAT, 2), [6]), harness.now).rejected is None
    for _ in range(8):
        harness.plan()
        harness.result()
    assert harness.outputs[RequestId("one"), 0], "the image waits for rows that decode"
    assert rows + BLOCK < LEAST_SAMPLES, "drafts could take all of a step"
    harness.run()


def test_other_runs_than_blocks_are_refused() -> None:
    harness = Harness(vision=RULES)
    for parts in (((CAT, 1), (DOG, 1)), ((CAT, 1), [6])):
        request = ask("one", *parts)
        if len(request.images) == 1:
            ids = image_ids(CAT, 4)
            image = replace(request.images[0], length=4)
            request = replace(request, token_ids=np.append(ids, np.int32(6)), images=(image,))
        rejected = harness.core.submit(request, harness.now).rejected
        assert rejected is not None
        assert "runs of 6 tokens" in rejected.message


def test_a_step_has_room_for_an_image_beside_all_rows() -> None:
    with pytest.raises(ConfigurationError, match=r"max_step_tokens \(300\).* 256: .*model.images = off"):
        resolve_core(SchedulerSettings(max_step_tokens=300, max_rows=64), CAPACITY)
    assert resolve_core(SchedulerSettings(max_step_tokens=320, max_rows=64), CAPACITY).least_step_tokens == 320


def test_steps_do_not_shrink_below_an_image() -> None:
    harness = Harness(vision=RULES, max_step_tokens=256, max_rows=12, pages=256)
    limits = harness.core.limits
    while limits.tokens > harness.config.least_step_tokens:
        assert limits.try_shrink()
    assert limits.tokens == 12 + BLOCK
    serve(harness, ask("one", [1] * 20, (CAT, 2), [6]))


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_never_cut_an_image(seed: int) -> None:
    draw = random.Random(seed)
    harness = Harness(
        vision=replace(RULES, step_embeddings=draw.choice([1, 8, 64]), kept_embeddings=draw.choice([0, 2048])),
        pages=draw.choice([20, 40]), max_step_tokens=draw.choice([10, 24]), depth=draw.choice([1, 2, 3]),
        cache=draw.choice(["isolated", "user_aware", "shared"]), policy=draw.choice([None, "fair"]),
        mixed_step_tokens=draw.choice([None, 2]), draft_tokens=draw.choice([0, 4]),
    )  # fmt: skip
    submitted: dict[str, ScheduleRequest] = {}
    aborted: set[str] = set()
    for number in range(60):
        action = draw.random()
        if action < 0.4:
            parts: list[list[int] | tuple[bytes, int]] = [[draw.randint(50, 53)] * draw.randint(1, 5)]
            for _ in range(draw.randint(1, 2)):
                parts += [(draw.choice([CAT, DOG]), draw.randint(1, 2)), [draw.randint(100, 103)]]
            request = ask(f"r{number}", *parts, user=draw.choice(["alice", "bob"]), max_tokens=draw.randint(1, 9))
            assert harness.core.submit(request, harness.now).rejected is None
            submitted[request.request_id] = request
        elif action < 0.45 and submitted:
            name = draw.choice(list(submitted))
            if harness.core.abort(RequestId(name)):
                aborted.add(name)
        elif action < 0.48:
            harness.lose_workers()
        else:
            harness.plan()
            harness.result()
    harness.run()
    harness.audit()
    for name, request in submitted.items():
        if name not in aborted:
            total = len(request.token_ids) + (request.options.stop.max_tokens or 0)
            assert harness.outputs[name, 0] == expected_output(request.token_ids.tolist(), total, (STOP_ID,))
    assert len(submitted) > 10


def test_runs_are_neighbours() -> None:
    assert runs_of(np.array([1, 2, 3, 7, 9, 10])) == ((1, 4), (7, 8), (9, 11))
    assert runs_of(np.array([], np.int64)) == ()
