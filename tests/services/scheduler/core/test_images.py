from __future__ import annotations

import functools
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from common.images import image_ids, image_spans
from common.prompt_logprobs import PromptLogprobs
from common.types import ErrorCode, RequestId, Resume, RowImage
from services.scheduler.cache.keys import TAGGED_TOKENS, adapter_tags, image_tags, plain_ids, tagged, text_ids
from services.scheduler.core import planner
from services.scheduler.core.drafts import repetition
from services.scheduler.core.sequence import Sequence, SequenceAdapter
from services.scheduler.core.step_limits import VisionLimits
from tests.services.scheduler.core.harness import Harness, make_request, with_options

if TYPE_CHECKING:
    from common.steps import RowOpen
    from common.types import ScheduleRequest

CAT, DOG = (sha256(name).digest() for name in (b"cat", b"dog"))
TEXT = [11, 12, 13]


def ask(name: str, *parts: list[int] | tuple[bytes, int], user: str = "alice", **changes: Any) -> ScheduleRequest:
    """Return a request whose prompt consists of texts and of images with so many embeddings."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, tuple):
            digest, length = part
            images.append(RowImage(digest, len(ids), length, (1, 2), np.full((2, 3), 0.5, np.float32)))
            ids += image_ids(digest, length).tolist()
        else:
            ids += part
    return replace(make_request(name, ids, user=user, **changes), images=tuple(images))


def serve(harness: Harness, request: ScheduleRequest) -> RowOpen:
    """Serve a request to its end; return the row that was opened for it."""
    assert harness.core.submit(request, harness.now).rejected is None
    before = len(harness.plans)
    harness.run()
    harness.audit()
    (opened,) = (opened for plan in harness.plans[before:] for opened in plan.opens)
    return opened


def test_ids_of_images_are_below_zero_and_determined_by_the_digest() -> None:
    ids = image_ids(CAT, 64)
    assert ids.dtype == np.int32
    assert (ids < 0).all()
    assert ids[:5].tolist() == image_ids(CAT, 5).tolist()
    assert not np.intersect1d(ids, image_ids(DOG, 64)).size


def test_the_same_picture_is_found_in_its_user_s_cache_and_needs_no_pixels() -> None:
    harness = Harness()
    first = serve(harness, ask("one", TEXT, (CAT, 6), [14, 15, 16, 17]))
    assert first.computed_tokens == 0
    assert first.images[0].pixels is not None
    second = serve(harness, ask("two", TEXT, (CAT, 6), [14, 15, 16, 17]))
    assert second.computed_tokens == 12
    assert [(image.offset, image.length, image.grid, image.pixels) for image in second.images] == [(3, 6, (1, 2), None)]
    assert serve(harness, ask("other", TEXT, (CAT, 6), [14, 15, 16, 17], user="bob")).computed_tokens == 0
    # Another picture in the same place.
    assert serve(harness, ask("dog", TEXT, (DOG, 6), [14, 15, 16, 17])).computed_tokens == 0


def test_a_match_ends_before_an_image_or_after_it() -> None:
    harness = Harness()
    serve(harness, ask("one", [1, 2, 3, 4, 5], (CAT, 8), [14, 15]))
    # The prompt ends inside of the cached image's last page.
    second = serve(harness, ask("two", [1, 2, 3, 4, 5], (CAT, 8)))
    assert second.computed_tokens == 4
    assert second.images[0].pixels is not None


def test_a_cut_match_does_not_end_inside_of_the_image_before() -> None:
    harness = Harness()
    parts: tuple[Any, ...] = ([1, 2, 3, 4, 5], (CAT, 4), [6], (DOG, 6))
    serve(harness, ask("one", *parts, [7, 8]))
    # The first page boundary before the dog is inside of the cat.
    assert serve(harness, ask("two", *parts)).computed_tokens == 4


def test_images_survive_retraction_of_their_row() -> None:
    expected = Harness(pages=64)
    requests = [ask(f"r{i}", TEXT, (CAT, 6), [20 + i] * 7, user=f"user-{i}", max_tokens=24) for i in range(3)]
    tight = Harness(pages=18)
    for harness in (expected, tight):
        for request in requests:
            assert harness.core.submit(request, harness.now).rejected is None
        harness.run()
        harness.audit()
    assert tight.core.memory.retractions > 0
    assert tight.outputs == expected.outputs
    again = [opened for plan in tight.plans for opened in plan.opens][len(requests) :]
    assert all(image_spans(opened.token_ids, opened.images) == ((3, 9),) for opened in again)


def test_a_resumed_request_keeps_its_images() -> None:
    harness = Harness()
    opened = serve(harness, ask("one", TEXT, (CAT, 6), [14], resume=Resume((21, 22), 2)))
    assert opened.token_ids[-2:].tolist() == [21, 22]
    assert image_spans(opened.token_ids, opened.images) == ((3, 9),)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda request: replace(request, images=()),
        lambda request: replace(request, images=(*request.images, request.images[0])),
        lambda request: replace(request, images=(replace(request.images[0], offset=4),)),
        lambda request: replace(request, images=(replace(request.images[0], length=5),)),
        lambda request: replace(request, images=(replace(request.images[0], digest=DOG),)),
        lambda request: replace(request, images=(replace(request.images[0], digest=b""),)),
        lambda request: with_options(request, prompt_logprobs=PromptLogprobs(0)),
    ],
)
def test_ids_that_do_not_fit_the_images_are_refused(spoil: Any) -> None:
    harness = Harness()
    rejected = harness.core.submit(spoil(ask("one", TEXT, (CAT, 6), [14])), harness.now).rejected
    assert rejected is not None
    assert rejected.code.name == "INVALID_REQUEST"


def test_keys_with_adapters_differ_in_every_page_and_keep_images_apart() -> None:
    ids = np.concatenate([np.arange(TAGGED_TOKENS, dtype=np.int32), image_ids(CAT, TAGGED_TOKENS)])
    keys = {tagged(ids, adapter_tags(sha256(name).hexdigest())).tobytes() for name in (b"one", b"two")}
    assert len({key[part] for key in keys for part in (slice(4 * TAGGED_TOKENS), slice(4 * TAGGED_TOKENS, None))}) == 4
    for key in keys:
        assert plain_ids(key)[:TAGGED_TOKENS].tolist() == list(range(TAGGED_TOKENS))
        assert text_ids(key).tolist() == list(range(TAGGED_TOKENS))


@functools.cache
def alike() -> tuple[bytes, bytes]:
    """Return digests of images whose first ids are equal, which have 31 bits."""
    found: dict[int, bytes] = {}
    for number in range(1 << 20):
        digest = sha256(number.to_bytes(4, "big")).digest()
        first = int(image_ids(digest, 1)[0])
        if first in found:
            return found[first], digest
        found[first] = digest
    raise AssertionError("among so many, two are alike")


@pytest.mark.parametrize("before", [3, 7])
@pytest.mark.parametrize("adapter", [None, "f" * 64])
def test_all_ids_of_an_images_pages_depend_on_it(before: int, adapter: str | None) -> None:
    text = list(range(1, before + 1))
    keys = []
    for digest in (*alike(), alike()[0]):
        request = ask("name", text, (digest, 8), TEXT)
        sequence = Sequence(request, 0, 1, request.options.sampling, request.token_ids, 100, 0.0)
        sequence.image_tags = image_tags(request.token_ids, request.images, 4)
        if adapter:
            sequence.adapter = SequenceAdapter(adapter, adapter_tags(adapter))
        keys.append(sequence.key_of(np.append(request.token_ids, [5, 6]).astype(np.int32)))
        assert text_ids(keys[-1].tobytes()).tolist() == [*text, *TEXT, 5, 6]
    one, other, again = keys
    assert (one == again).all()
    # The page before the image, its first id, in which the two are alike, and the page after it.
    assert np.flatnonzero(one == other).tolist() == [*range(before - 3), before, *range(before + 9, before + 13)]


def test_a_page_on_which_an_image_begins_serves_no_other_image() -> None:
    harness = Harness()
    one, other = alike()
    serve(harness, ask("one", TEXT, (one, 9), [14, 15]))
    before = len(harness.plans)
    serve(harness, ask("other", TEXT, (other, 9), [14, 15]))
    assert not [change for plan in harness.plans[before:] for change in plan.replacements]
    assert serve(harness, ask("again", TEXT, (other, 9), [14, 15])).computed_tokens == 12


def test_an_image_is_not_drafted() -> None:
    harness = Harness(draft_tokens=4, pages=64)
    run = [31, 32, 33, 34, 35, 36]
    request = ask("one", run, (CAT, 6), run, max_tokens=12)
    guess = repetition(request.token_ids, 4)
    assert guess is not None
    assert (guess.token_ids < 0).all(), "what came after the run is an image"
    serve(harness, request)
    drafts = [draft.token_ids for plan in harness.plans for draft in plan.drafts]
    assert all((draft >= 0).all() for draft in drafts)


def test_images_of_a_plan_fit_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pixels of two requests; each image has 24 bytes.
    monkeypatch.setattr(planner, "MAX_PIXEL_BYTES", 50)
    harness = Harness(pages=64, max_step_tokens=64)
    for i in range(5):
        request = ask(f"r{i}", TEXT, (CAT, 6), [20 + i], user=f"user-{i}")
        assert harness.core.submit(request, harness.now).rejected is None
    harness.run()
    harness.audit()
    opened = [sum(bool(row.images) for row in plan.opens) for plan in harness.plans if plan.opens]
    assert sum(opened) == 5
    assert max(opened) == 2


def test_workers_without_an_encoder_get_no_images() -> None:
    harness = Harness(sees_images=False)
    rejected = harness.core.submit(ask("one", TEXT, (CAT, 6), [14]), harness.now).rejected
    assert rejected is not None
    assert "no encoder of images" in rejected.message
    assert harness.core.submit(ask("two", TEXT), harness.now).rejected is None


def test_pixels_of_open_requests_are_bounded_by_subject_and_in_all() -> None:
    # Each image has 24 bytes.
    harness = Harness(vision=VisionLimits(open_bytes=240), pages=256)

    def accepted(name: str, user: str, tenant: str = "tenant", n: int = 1) -> str | None:
        request = ask(name, TEXT, (CAT, 6), [14], user=user, tenant=tenant, n=n, max_tokens=2)
        rejected = harness.core.submit(request, harness.now).rejected
        if rejected is None:
            return None
        assert (rejected.code, rejected.retryable) == (ErrorCode.QUEUE_FULL, True)
        assert rejected.retry_after_ms
        return rejected.message

    taken = 0
    while accepted(f"alice-{taken}", "alice", n=2) is None:
        taken += 1
    assert 5 <= taken <= 7
    assert "of this user are open with images" in str(accepted("one more", "alice"))
    assert harness.core.submit(ask("text", TEXT), harness.now).rejected is None
    assert accepted("bob", "bob") is None
    while accepted(f"eve-{taken}", f"eve-{taken}", tenant=f"t-{taken}") is None:
        taken += 1
    assert taken == 9
    assert "at this server" in str(accepted("carol", "carol", tenant="other"))
    harness.core.abort(RequestId("bob"))
    assert accepted("carol", "carol", tenant="other") is None
    harness.run()
    harness.audit()
    assert accepted("afterwards", "alice") is None
