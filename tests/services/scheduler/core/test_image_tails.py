"""Prompts with images that another group computes: its last page comes, too, if an image ends there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.types import RequestId
from services.scheduler.core.step_limits import VisionLimits
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.core.test_device_place import LOAD, PAGE, TO_DEVICE, TO_HOST, make_harness
from tests.services.scheduler.core.test_images import CAT, DOG, TEXT, ask

if TYPE_CHECKING:
    from common.steps import PageIds, RowOpen
    from common.transfers import PeerPages, TransferDirection
    from common.types import Finish, ScheduleRequest, TokenIds
    from services.scheduler.cache.tiers.peer_reads import PeerFetch
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.sequence import Sequence
    from tests.fakes.simulated_worker import Content
    from tests.services.scheduler.core.harness import Harness

# Of five pages: the image ends on the last, which has two of its tokens and two of text.
PARTS = (TEXT, (CAT, 15), [14, 15])
WHOLE = 4
# Much longer than a prompt that is worth asking for.
MANY = 1000


def lend(ids: TokenIds, peer: PeerPages) -> list[Content]:
    """Return pages of the other group: number n is page n of the prompt, of which the last may be filled in part."""
    slots = [range(page * PAGE, (page + 1) * PAGE) for page in peer.device_pages.tolist()]
    return [[(int(ids[at]), at) if at < len(ids) else None for at in page] for page in slots]


def submit(harness: Harness, request: ScheduleRequest) -> PeerFetch | None:
    """Submit a request; return its pages at the other group, if it waits for them."""
    core = harness.core
    harness.worker.read_peer = lambda peer: lend(request.token_ids, peer)
    assert core.submit(request, harness.now).rejected is None
    sequence, loads = core.leader_of(request.request_id), core.memory.loads
    assert sequence is not None
    assert loads is not None
    return loads.await_peer(sequence, MANY)


def offer(fetch: PeerFetch | None, pages: int) -> None:
    """Offer so many pages, the last ones of the prompt."""
    assert fetch is not None
    fetch.offer(("worker",), b"lease", range(len(fetch.offered), pages))
    fetch.complete(0.0)


def finish(harness: Harness, name: str) -> RowOpen:
    """Let all requests end without anything that is held; return the row that was opened for one."""
    harness.run()
    harness.audit()
    assert harness.core.memory.cache.protected_pages == 0
    (opened,) = (each for plan in harness.plans for each in plan.opens if each.request_id == name)
    return opened


def has_pixels(opened: RowOpen) -> list[bool]:
    return [image.pixels is not None for image in opened.images]


def directions(harness: Harness) -> set[TransferDirection]:
    return {transfer.direction for plan in harness.plans for transfer in plan.transfers}


def test_an_image_that_ends_on_the_last_page_comes_whole_and_is_encoded_no_more() -> None:
    harness = make_harness()
    offer(submit(harness, ask("one", *PARTS)), WHOLE + 1)
    opened = finish(harness, "one")
    assert (opened.computed_tokens, len(opened.pages), has_pixels(opened)) == (19, WHOLE + 1, [False])
    assert directions(harness) & {TO_DEVICE, TO_HOST, LOAD} == {TO_DEVICE}
    assert harness.cached["one", 0] == 0, "another group's work is no hit"
    assert harness.core.memory.images.encoded_images == 0


def test_the_end_alone_comes_where_the_view_has_the_rest_of_the_image() -> None:
    harness = make_harness()
    offer(submit(harness, ask("one", *PARTS)), WHOLE + 1)
    finish(harness, "one")
    # Another question: its last page is another one, and a match would end inside of the image.
    fetch = submit(harness, ask("two", *PARTS[:2], [16, 17]))
    assert fetch is not None
    assert (fetch.first, fetch.end) == (WHOLE, WHOLE + 1)
    offer(fetch, WHOLE + 1)
    opened = finish(harness, "two")
    assert (opened.computed_tokens, has_pixels(opened)) == (19, [False])
    assert harness.cached["two", 0] == WHOLE * PAGE
    # Another view, and another image, have nothing of it.
    for name, parts, user in (("three", PARTS, "bob"), ("four", (TEXT, (DOG, 15), [14, 15]), "alice")):
        fetch = submit(harness, ask(name, *parts, user=user))
        assert fetch is not None
        assert fetch.first == 0
        offer(fetch, WHOLE + 1)
        finish(harness, name)
        assert harness.cached[name, 0] == 0


def test_only_prompts_that_lack_an_image_are_asked_for_whatever_their_length() -> None:
    harness = make_harness()
    assert submit(harness, ask("text", TEXT * 6)) is None
    fetch = submit(harness, ask("image", TEXT, (CAT, 6), [14, 15, 16, 17, 18, 19]))
    assert fetch is not None
    assert fetch.whole == fetch.end, "no image ends on the last page"
    offer(fetch, fetch.whole)
    assert has_pixels(finish(harness, "image")) == [False]
    assert submit(harness, ask("later", TEXT, (CAT, 6), [14, 15, 16, 17, 18, 19, 20, 21])) is None
    assert has_pixels(finish(harness, "later")) == [False]


def test_a_group_that_does_not_offer_the_end_costs_one_encoding() -> None:
    harness = make_harness()
    offer(submit(harness, ask("one", *PARTS)), WHOLE)
    opened = finish(harness, "one")
    assert (opened.computed_tokens, has_pixels(opened)) == (0, [True])


def test_without_room_on_the_device_the_image_is_encoded_here() -> None:
    harness = make_harness(pages=8)
    harness.core.submit(make_request("runs", list(range(100, 116)), max_tokens=6), harness.now)
    harness.plan()
    offer(submit(harness, ask("one", *PARTS)), WHOLE + 1)
    opened = finish(harness, "one")
    assert TO_DEVICE not in directions(harness)
    assert TO_HOST in directions(harness)
    assert has_pixels(opened) == [True]


@pytest.mark.parametrize("ends", ["aborted", "lost", "asleep", "taken"])
def test_an_end_whose_request_cannot_start_is_released(ends: str) -> None:
    harness = make_harness()
    core = harness.core
    fetch = submit(harness, ask("one", *PARTS))
    offer(fetch, WHOLE + 1)
    harness.plan()
    core.hold_all(held=True)
    harness.run()
    assert core.memory.loads is not None
    peers = core.memory.loads.host.peers
    assert fetch is not None
    assert (fetch.has_arrived, peers.has_tail(fetch)) == (True, True)
    harness.audit()
    if ends == "aborted":
        core.abort(RequestId("one"))
    elif ends == "lost":
        harness.lose_workers()
    elif ends == "asleep":
        core.give_back_memory(keeps_host=True)
    else:
        assert peers.drop_tails()
    assert not peers.has_tail(fetch)
    assert not peers.drop_tails()
    harness.audit()
    core.hold_all(held=False)
    if ends == "taken":
        assert has_pixels(finish(harness, "one")) == [True]


def test_an_end_that_arrives_after_its_request_has_ended_is_not_kept() -> None:
    harness = make_harness()
    fetch = submit(harness, ask("one", *PARTS))
    offer(fetch, WHOLE + 1)
    harness.plan()
    assert harness.worker.open
    harness.core.abort(RequestId("one"))
    harness.run()
    harness.audit()
    assert harness.core.memory.loads is not None
    assert not harness.core.memory.loads.host.peers.drop_tails()


def test_a_row_that_starts_again_computes_the_image() -> None:
    harness = make_harness()
    offer(submit(harness, ask("one", *PARTS)), WHOLE + 1)
    harness.plan()
    harness.result()
    harness.complete_all()
    harness.plan()
    assert harness.core.rows.running == 1
    harness.lose_workers()
    harness.run()
    harness.audit()
    opened = [(each.computed_tokens, has_pixels(each)) for plan in harness.plans for each in plan.opens]
    assert opened == [(19, [False]), (0, [True])]


def test_choices_after_the_first_encode_the_image_once_for_all() -> None:
    harness = make_harness(vision=VisionLimits(kept_embeddings=64))
    offer(submit(harness, ask("one", *PARTS, n=3)), WHOLE + 1)
    harness.run()
    harness.audit()
    opened = [each for plan in harness.plans for each in plan.opens]
    assert [has_pixels(each) for each in opened] == [[False], [True], [False]]
    assert len({tuple(harness.outputs["one", choice]) for choice in range(3)}) == 1


def test_a_lease_holds_the_page_that_the_cache_has_not() -> None:
    harness = make_harness()
    core, request = harness.core, ask("one", *PARTS, max_tokens=0)
    follower = _Follower()
    assert core.submit(request, harness.now, follower).rejected is None
    follower.core = core
    harness.run()
    (page,) = follower.tail
    assert len(core.exports) == 1
    harness.audit()
    core.memory.flush()
    assert core.memory.allocator.counts[page] == 1, "it may be read until the lease ends"
    core.exports.release(b"lease")
    assert (len(core.exports), core.memory.allocator.counts[page]) == (0, 0)
    harness.audit()


class _Follower:
    """Keeps the last page of a prompt as a lease does."""

    core: SchedulerCore
    tail: tuple[int, ...] = ()

    def on_computed(self) -> None:
        pass

    def on_prefilled(self, sequence: Sequence, pages: PageIds) -> None:
        assert sequence.has_image_tail(PAGE)
        assert len(pages) == WHOLE + 1
        self.core.exports.keep(b"lease", pages[WHOLE:])
        self.tail = tuple(pages[WHOLE:].tolist())

    def on_ended(self, finish: Finish | None) -> None:
        pass
