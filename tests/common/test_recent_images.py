"""Which prepared images are kept, for whom, and for how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.recent_images import (
    KEPT_S,
    LEAST_BYTES,
    MOST_IMAGES,
    MOST_KNOWN,
    PROTECTED_S,
    KeptElsewhere,
    RecentImages,
    bytes_to_keep,
    key_of,
    pixels_key,
)
from common.requests import ImageFile
from common.types import PackedPixels, RowImage, Subject, View
from services.tokenizer.images.processor import PreparedImage

ADA, BOB = View(Subject("acme", "user/ada")), View(Subject("acme", "user/bob"))


class Clock:
    """Seconds that only pass when asked."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def image(nbytes: int = LEAST_BYTES) -> PreparedImage:
    values = np.zeros((nbytes // 3, 3, 1), np.uint8)
    pixels = PackedPixels(values, np.zeros((3, 256), np.float32), 1, (values.size,))
    return PreparedImage(b"digest", (1, 1, 1), pixels, "text", 1)


def test_an_image_is_found_by_its_view_and_key_only() -> None:
    kept = image()
    recent: RecentImages[PreparedImage] = RecentImages(10 * LEAST_BYTES)
    recent.put(ADA, b"a", kept)
    assert recent.get(ADA, b"a") is kept
    assert recent.get(ADA, b"b") is None
    assert recent.get(BOB, b"a") is None
    assert recent.get(View(ADA.subject, "salt"), b"a") is None


def test_the_subject_that_holds_most_loses_what_it_has_not_used_for_longest() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(4 * LEAST_BYTES)
    recent.put(BOB, b"his", image())
    for key in (b"1", b"2", b"3"):
        recent.put(ADA, key, image())
    assert recent.get(ADA, b"1") is not None
    for key in (b"4", b"5"):
        recent.put(ADA, key, image())
    assert [key for key in (b"1", b"2", b"3", b"4", b"5") if recent.get(ADA, key)] == [b"1", b"4", b"5"]
    assert recent.get(BOB, b"his") is not None
    assert recent.nbytes == 4 * LEAST_BYTES


@pytest.mark.parametrize("names", ["salts", "users"])
def test_no_party_takes_the_place_of_others_under_many_names(names: str) -> None:
    recent: RecentImages[PreparedImage] = RecentImages(16 * LEAST_BYTES)
    for key in (b"1", b"2", b"3"):
        recent.put(ADA, key, image())
    for number in range(100):
        view = View(BOB.subject, f"{number}") if names == "salts" else View(Subject("other", f"user/{number}"))
        recent.put(view, b"a", image())
        assert recent.get(view, b"a") is not None
    assert all(recent.get(ADA, key) for key in (b"1", b"2", b"3"))
    assert recent.nbytes == 16 * LEAST_BYTES


def test_those_who_are_away_leave_their_room_to_the_next_turns_of_others() -> None:
    clock = Clock()
    recent: RecentImages[PreparedImage] = RecentImages(16 * LEAST_BYTES, clock)
    away = [View(Subject("acme", f"user/{number}")) for number in range(16)]
    for view in away:
        recent.put(view, b"a", image())
    clock.now = 1.0
    assert recent.get(away[0], b"a") is not None
    clock.now = PROTECTED_S
    keys = (b"1", b"2", b"3", b"4")
    for key in keys:
        recent.put(ADA, key, image())
    assert all(recent.get(ADA, key) for key in keys)
    # Those which were used last are left, and no more are dropped than have to be.
    assert [view for view in away if recent.has(view, b"a")] == [away[0], *away[5:]]
    assert recent.nbytes == 16 * LEAST_BYTES


def test_nothing_is_dropped_for_its_age_before_room_is_needed() -> None:
    clock = Clock()
    recent: RecentImages[PreparedImage] = RecentImages(4 * LEAST_BYTES, clock)
    for key in (b"1", b"2", b"3"):
        recent.put(ADA, key, image())
    clock.now = KEPT_S - 1
    recent.put(BOB, b"his", image())
    assert all(recent.get(ADA, key) for key in (b"1", b"2", b"3"))


def test_who_holds_less_than_a_share_keeps_it_for_a_while_whatever_others_send() -> None:
    clock = Clock()
    recent: RecentImages[PreparedImage] = RecentImages(4 * LEAST_BYTES, clock)
    recent.put(BOB, b"his", image())
    clock.now = PROTECTED_S - 1
    for number in range(100):
        recent.put(ADA, bytes([number]), image())
    assert recent.get(BOB, b"his") is not None
    # Its use has begun the time again.
    clock.now = 2 * PROTECTED_S - 2
    for number in range(100, 200):
        recent.put(ADA, bytes([number]), image())
    assert recent.has(BOB, b"his")
    # What it is asked for alone is no use.
    clock.now = 2 * PROTECTED_S - 1
    recent.put(ADA, b"1", image())
    assert not recent.has(BOB, b"his")


def test_there_are_at_most_so_many_images_whatever_room_there_is() -> None:
    least = 2 * LEAST_BYTES
    recent: RecentImages[PreparedImage] = RecentImages(MOST_IMAGES * least)
    recent.put(ADA, b"a", image(3))
    assert recent.nbytes == least


def test_the_room_for_images_follows_the_free_memory_unless_it_is_configured() -> None:
    gib = 1024**3
    assert [bytes_to_keep(None, free * gib) for free in (0, 1, 4, 16, 64, 1024)] == [
        gib // 4, gib // 4, gib // 4, gib, 4 * gib, 4 * gib,
    ]  # fmt: skip
    assert [bytes_to_keep(configured, 16 * gib) for configured in (0, 5)] == [0, 5]


def test_small_images_count_and_images_that_are_too_large_are_not_kept() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(2 * LEAST_BYTES)
    for number in range(100):
        recent.put(ADA, bytes([number]), image(3))
    assert recent.nbytes == 2 * LEAST_BYTES
    recent.put(ADA, b"large", image(2 * LEAST_BYTES + 3))
    assert recent.get(ADA, b"large") is None
    assert recent.get(ADA, bytes([99])) is not None
    none: RecentImages[PreparedImage] = RecentImages(0)
    none.put(ADA, b"a", image())
    assert (none.get(ADA, b"a"), none.nbytes) == (None, 0)


def test_an_image_is_dropped_some_time_after_its_last_use() -> None:
    clock = Clock()
    recent: RecentImages[PreparedImage] = RecentImages(10 * LEAST_BYTES, clock)
    recent.put(ADA, b"a", image())
    recent.put(BOB, b"b", image())
    clock.now = KEPT_S - 1
    assert recent.get(ADA, b"a") is not None
    clock.now = KEPT_S
    assert recent.get(BOB, b"b") is None
    recent.expire()
    assert recent.nbytes == LEAST_BYTES
    clock.now = 2 * KEPT_S
    recent.expire()
    assert recent.nbytes == 0
    assert recent.get(ADA, b"a") is None


def test_an_image_that_is_put_again_counts_once() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(10 * LEAST_BYTES)
    recent.put(ADA, b"a", image())
    recent.put(ADA, b"a", image())
    assert recent.nbytes == LEAST_BYTES


def test_keys_are_of_bytes_and_of_what_is_asked() -> None:
    files = [
        ImageFile(b"ab"), ImageFile(b"abc"), ImageFile(b"ab", "low"), ImageFile(b"ab", is_video_file=True),
        ImageFile(b"", frames=(b"ab",)), ImageFile(b"", frames=(b"a", b"b")), ImageFile(b"", frames=(b"", b"ab")),
        ImageFile(b"", frames=(b"ab",), frames_per_second=2.0),
    ]  # fmt: skip
    assert len({key_of(file) for file in files}) == len(files)
    assert key_of(ImageFile(b"ab")) == key_of(ImageFile(b"ab"))


def test_an_image_that_is_kept_already_stays_and_is_counted_once() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(4 * LEAST_BYTES)
    first = image()
    recent.put(ADA, b"a", first)
    recent.put(ADA, b"a", image(2 * LEAST_BYTES))
    assert recent.get(ADA, b"a") is first
    assert recent.nbytes == LEAST_BYTES
    recent.put(ADA, b"b", image(5 * LEAST_BYTES))
    assert recent.get(ADA, b"b") is None


def test_an_image_may_displace_itself() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(3 * LEAST_BYTES)
    recent.put(View(Subject("other", "user")), b"a", image())
    recent.put(ADA, b"a", image(3 * LEAST_BYTES))
    assert recent.get(ADA, b"a") is None
    assert recent.nbytes == LEAST_BYTES


def test_a_subject_is_forgotten_with_all_of_its_views() -> None:
    recent: RecentImages[PreparedImage] = RecentImages(10 * LEAST_BYTES)
    for view in (ADA, View(ADA.subject, "salt"), BOB):
        recent.put(view, b"a", image())
    recent.forget(ADA.subject)
    assert [recent.get(view, b"a") is None for view in (ADA, View(ADA.subject, "salt"), BOB)] == [True, True, False]
    assert recent.nbytes == LEAST_BYTES
    recent.clear()
    assert recent.get(BOB, b"a") is None
    assert recent.nbytes == 0


def test_another_service_is_known_to_keep_what_it_has_said_for_that_view() -> None:
    clock = Clock()
    kept = KeptElsewhere(clock)
    kept.note(ADA, [b"a", b"b"])
    assert kept.has(ADA, b"a")
    assert not kept.has(View(ADA.subject, "salt"), b"a")
    assert not kept.has(BOB, b"a")
    kept.forget(ADA, [b"a", b"unknown"])
    assert not kept.has(ADA, b"a")
    clock.now = KEPT_S - 1
    assert kept.has(ADA, b"b")
    clock.now = KEPT_S
    assert not kept.has(ADA, b"b")
    kept.note(ADA, [b"c"])
    assert len(kept) == 2
    kept.expire()
    assert len(kept) == 1, "names are dropped, too"
    kept.note(ADA, [b"b"])
    assert kept.has(ADA, b"b")
    kept.clear()
    assert not kept.has(ADA, b"b")


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    kept = KeptElsewhere(Clock())
    kept.note(ADA, [b"first", b"second"])
    kept.note(BOB, (b"%d" % number for number in range(MOST_KNOWN - 2)))
    kept.note(ADA, [b"first", b"new"])
    assert [kept.has(ADA, key) for key in (b"first", b"second", b"new")] == [True, False, True]


def test_pixels_are_named_by_digest_grid_and_length() -> None:
    first = RowImage(b"d" * 32, 5, 4, (1, 2, 2))
    others = [replace(first, digest=b"e" * 32), replace(first, grid=(1, 4, 1)), replace(first, length=3)]
    assert len({pixels_key(each) for each in (first, *others)}) == 4
    assert pixels_key(replace(first, offset=9)) == pixels_key(first)
