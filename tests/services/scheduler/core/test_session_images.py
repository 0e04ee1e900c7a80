"""Turns of sessions with images: later turns see them, none is cut, and their pixels are charged."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from common.images import image_ids
from common.types import (
    ErrorCode,
    RequestFailure,
    RowImage,
    SessionTurn,
)
from services.scheduler.core import sessions
from services.scheduler.core.step_limits import VisionLimits
from tests.services.scheduler.core.harness import Harness, make_request, with_options
from tests.services.scheduler.core.session_requests import ALICE, FIRST, harness_with, open_session, whole

if TYPE_CHECKING:
    import pytest

    from common.steps import RowOpen

# A picture of six embeddings, whose pixels take 24 bytes.
CAT = sha256(b"cat").digest()
SEEN = [*FIRST[:6], *image_ids(CAT, 6).tolist(), 120, 121]


def see(harness: Harness, name: str, prompt: list[int], turn: SessionTurn) -> RequestFailure | None:
    """Submit a turn; its prompt has the picture as often as six ids below 0."""
    request = with_options(make_request(name, prompt, max_tokens=4), session="chat", turn=turn)
    below = [index for index, token in enumerate(prompt) if token < 0]
    pixels = np.full((2, 3), 0.5, np.float32)
    images = tuple(RowImage(CAT, below[first], 6, (1, 2), pixels) for first in range(0, len(below), 6))
    return harness.core.submit(replace(request, images=images), harness.now).rejected


def opened_for(harness: Harness, before: int) -> RowOpen:
    (row,) = (row for plan in harness.plans[before:] for row in plan.opens)
    return row


def test_a_turn_has_the_images_of_those_that_it_continues() -> None:
    harness = harness_with(pages=64)
    open_session(harness)
    assert see(harness, "one", SEEN, SessionTurn("one")) is None
    harness.run()
    first = whole(harness, "one", SEEN)
    before = len(harness.plans)
    assert see(harness, "two", [7, 8, 9], SessionTurn("two", after="one")) is None
    harness.run()
    row = opened_for(harness, before)
    assert row.token_ids.tolist() == [*first, 7, 8, 9]
    assert row.computed_tokens >= 12
    assert [(image.offset, image.length, image.pixels) for image in row.images] == [(6, 6, None)]
    # Another picture in a later turn, and a cache that has lost the first one.
    harness.core.sessions.lose_pins()
    harness.core.memory.cache.flush()
    second = [*first, 7, 8, 9, *harness.outputs["two", 0]]
    before = len(harness.plans)
    assert see(harness, "three", SEEN, SessionTurn("three", after="two")) is None
    harness.run()
    harness.audit()
    row = opened_for(harness, before)
    assert row.token_ids.tolist() == [*second, *SEEN]
    assert [image.offset for image in row.images] == [6, len(second) + 6]
    assert all(image.pixels is not None for image in row.images)
    # As for the whole conversation without a session.
    prompt = [*second, *SEEN]
    assert see(harness, "all", prompt, SessionTurn("all")) is None
    harness.run()
    assert harness.outputs["three", 0] == harness.outputs["all", 0]
    assert len(harness.outputs["three", 0]) == 4


def test_a_turn_without_what_followed_an_image_keeps_it_and_none_is_cut() -> None:
    harness = harness_with(pages=64)
    open_session(harness)
    assert see(harness, "one", SEEN, SessionTurn("one")) is None
    harness.run()
    cut = see(harness, "cut", [7], SessionTurn("cut", after="one", offset=9))
    assert cut is not None
    assert "cut an image" in cut.message
    for name, offset, images in (("without", 6, 0), ("with", 12, 1)):
        before = len(harness.plans)
        assert see(harness, name, [7, 8], SessionTurn(name, after="one", offset=offset)) is None
        harness.run()
        row = opened_for(harness, before)
        assert row.token_ids.tolist() == [*SEEN[:offset], 7, 8]
        assert len(row.images) == images
    harness.audit()


def test_a_conversation_with_images_is_not_reported() -> None:
    harness = harness_with(pages=64)
    open_session(harness)
    assert see(harness, "one", SEEN, SessionTurn("one")) is None
    harness.run()
    for name, offset, reported in (("with", 12, ()), ("without", 6, tuple(SEEN[:6]))):
        turn = SessionTurn(name, after="one", offset=offset)
        request = with_options(make_request(name, [7, 8], max_tokens=4), session="chat", turn=turn)
        admission = harness.core.submit(request, harness.now)
        assert (admission.rejected, admission.conversation_ids) == (None, reported)


def test_pixels_of_a_session_s_turns_are_charged_until_it_ends() -> None:
    harness = harness_with(pages=64, vision=VisionLimits(open_bytes=100))
    open_session(harness)
    assert see(harness, "one", SEEN, SessionTurn("one")) is None
    harness.run()
    (session,) = harness.core.sessions
    assert (session.pixel_bytes, session.charged_bytes) == (24, 24)
    # Turns share the pixels of what they continue.
    assert see(harness, "two", [7], SessionTurn("two", after="one")) is None
    harness.run()
    assert (len(session.history), session.charged_bytes) == (2, 24)
    # A request counts by itself, with what it shares: two pictures find no room beside those of the session.
    refused = see(harness, "three", SEEN, SessionTurn("three", after="two"))
    assert refused is not None
    assert refused.code is ErrorCode.QUEUE_FULL
    harness.core.sessions.close(ALICE, "chat")
    open_session(harness)
    assert see(harness, "four", SEEN, SessionTurn("four")) is None
    harness.run()
    harness.audit()


def test_the_images_of_a_conversation_fit_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_PIXEL_BYTES", 40)
    harness = harness_with(pages=64)
    open_session(harness)
    assert see(harness, "one", SEEN, SessionTurn("one")) is None
    harness.run()
    refused = see(harness, "two", SEEN, SessionTurn("two", after="one"))
    assert refused is not None
    assert "images of the conversation take 48 bytes" in refused.message
    assert see(harness, "three", [7], SessionTurn("three", after="one")) is None
