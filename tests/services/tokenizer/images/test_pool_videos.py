"""Files of videos in confined processes: as this process would cut them, what is refused, and fuzzed files."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.errors import InvalidRequestError
from common.requests import ImageFile
from services.tokenizer.images import decoding_process
from services.tokenizer.images.child import LENGTH, Cutting
from services.tokenizer.images.processor import Detail, RefusedImageError, prepared_video
from services.tokenizer.images.registry import read_processor
from services.tokenizer.images.sampling import FrameTimes
from services.tokenizer.images.video_files import open_video
from tests.services.tokenizer.images.clips import ENCODERS, clip_file, clip_pictures, sound_file
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.services.tokenizer.images.test_fuzzed_files import SEED, mutated
from tests.services.tokenizer.images.test_pool import (
    ADA,
    FAKE_CHILD,
    LIMITS,
    MEMORY,
    MOST_BYTES,
    Bench,
    directory,
    running,
)
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.tokenizer.images.processor import PreparedImage

__all__ = ["directory"]


@pytest.fixture
async def bench(directory: Path) -> AsyncIterator[Bench]:
    made = Bench(directory)
    async with running(made):
        yield made


async def prepare(bench: Bench, *videos: ImageFile) -> list[PreparedImage]:
    return (await bench.pool.prepare(ADA, videos, "messages", MOST_BYTES)).images


async def refusal(bench: Bench, data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await prepare(bench, ImageFile(data, is_video_file=True))
    return str(caught.value)


@pytest.mark.parametrize("codec", ENCODERS)
async def test_files_are_those_that_this_process_would_cut(codec: str, bench: Bench) -> None:
    file = clip_file(clip_pictures(40, 120, 90), codec)
    assert bench.processor.video is not None
    video = ImageFile(file, is_video_file=True, frames_per_second=3)
    (own,) = await prepare(bench, video)
    with open_video(file, LIMITS.max_pixels) as opened:
        places = bench.processor.video.sampling.choose(opened.footage, 3, 768)
        grid, values = bench.processor.cut_frames(opened.pictures(places), len(places), Detail.AUTO)
        times = FrameTimes.chosen(opened.footage, places)
    expected = prepared_video(bench.processor, grid, values.tobytes(), times)
    assert len(places) == 12
    assert (own.digest, own.grid, own.text) == (expected.digest, expected.grid, expected.text)
    assert np.array_equal(own.pixels.unpacked(), expected.pixels.unpacked())


async def test_files_of_all_kinds_follow_each_other_in_one_process(bench: Bench) -> None:
    pictures = [picture(56, 56, seed=number) for number in range(4)]
    frames = tuple(map(file_of, pictures))
    mixed = [
        ImageFile(clip_file(pictures), is_video_file=True),
        ImageFile(frames[0]),
        ImageFile(b"", frames=frames),
        ImageFile(clip_file(pictures, "vp9"), "low", is_video_file=True),
    ]
    first = await prepare(bench, *mixed)
    (process,) = bench.children
    assert process.num_threads() == 1
    again = await prepare(bench, *mixed)
    assert [one.digest for one in first] == [one.digest for one in again]
    assert len({one.digest for one in first}) == 4
    assert bench.children == [process]


async def test_no_more_frames_are_taken_than_the_limit_allows(directory: Path) -> None:
    bench = Bench(directory, limits=replace(LIMITS, max_frames=10))
    async with running(bench):
        (video,) = await prepare(bench, ImageFile(clip_file(clip_pictures(60, 224, 224), rate=2), is_video_file=True))
    assert video.grid[0] == 5


async def test_files_that_cannot_be_used_are_refused_by_name_and_end_no_process(bench: Bench) -> None:
    good = clip_file(clip_pictures(40))
    for words, file in {
        "The video is damaged, or not a video": b"RIFF0000AVI LIST",
        "The video is cut off: it has": good[:-100],
        "The video is damaged": good[: len(good) // 2] + bytes(len(good) - len(good) // 2),
        "The video has no video, only sound": sound_file(),
        "The video has fewer than 2 frames": clip_file(clip_pictures(1)),
        "its tokens; send a shorter part": clip_file(clip_pictures(4, 28, 28), milliseconds=[0, 9**5, 9**6, 9**7]),
    }.items():
        assert words in await refusal(bench, file)
    assert len(bench.children) == 1
    (process,) = bench.children
    with pytest.raises(InvalidRequestError, match="Video 2 of 2 is cut off"):
        await prepare(bench, *(ImageFile(each, is_video_file=True) for each in (good, good[:-1])))
    assert bench.children == [process]


def test_without_a_decoder_files_are_refused(directory: Path) -> None:
    cutting = Cutting(read_processor(directory), LIMITS, None)
    question = {"detail": "auto", "frames": 0, "is_video_file": True, "rate": None}
    with pytest.raises(RefusedImageError, match="none are decoded here"):
        cutting.cut(question, [clip_file(clip_pictures(4))])


async def test_a_video_that_needs_more_memory_is_refused(bench: Bench) -> None:
    # Each frame has 24 million pixels, and a decoder keeps some.
    large = clip_file([picture(8, 8).resize((6000, 4000))] * 4, "mpeg4")
    assert "too much memory" in await refusal(bench, large)
    await prepare(bench, ImageFile(clip_file(clip_pictures(4)), is_video_file=True))


async def test_a_video_of_more_pixels_than_allowed_is_refused_before_it_is_decoded(bench: Bench) -> None:
    assert "8000 x 6000 pixels; at most 40000000" in await refusal(
        bench, clip_file([picture(8, 8).resize((8000, 6000))] * 2, "mpeg4")
    )


async def test_a_video_that_takes_too_long_is_refused(directory: Path) -> None:
    bench = Bench(directory, timeout_s=0.001)
    slow = clip_file([picture(8, 8).resize((2560, 1440))] * 4, "h264")
    async with running(bench):
        await until(lambda: len(bench.children) == 1)
        (first,) = bench.children
        # On a busy machine its second of a processor may be over before this process looks at the time.
        assert re.search("takes longer than 0.001 s|takes more than .* s of a processor", await refusal(bench, slow))
        await until(lambda: len(bench.children) == 1 and bench.children != [first])


@pytest.mark.parametrize(
    "stated",
    ['"frames": 1000000, "rate": 5e-324', '"frames": 8, "rate": 1e-300', '"frames": 1e999, "rate": 1', '"frames": 8'],
    ids=["vanishing", "slow", "infinite", "missing"],
)
async def test_a_process_that_states_impossible_footage_fails_its_video_only(
    stated: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 384 if "1000000" in stated else 4
    answer = f"""write(b'{{"grid": [{steps}, 2, 2], {stated}}}'); write(bytes({steps * 4 * 3 * 2 * 14 * 14}))"""
    program = FAKE_CHILD.replace("ANSWER", answer).replace("MARK", repr(str(tmp_path / "mark")))
    monkeypatch.setattr(
        decoding_process, "COMMAND", (sys.executable, "-c", program.replace("LENGTH", repr(LENGTH.format)))
    )
    bench = Bench(directory, timeout_s=10.0)
    async with running(bench):
        assert "crashed" in await refusal(bench, b"")
        assert "is of the second process" in await refusal(bench, b"")


def overwritten(data: bytes, random_: random.Random) -> bytes:
    """Return a file with other bytes at some places: of equal size, so that it is decoded."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 2, 4, 16, 64))):
        at = random_.randrange(len(changed) - 8)
        value = random_.choice((random_.randbytes(1), random_.randbytes(8), b"\0", b"\xff", b"\x7f\xff\xff\xff"))
        changed[at : at + len(value)] = value
    return bytes(changed)


async def fuzz(bench: Bench, count: int) -> tuple[int, int]:
    """Send so many mutated files; return how many were prepared and how many refused."""
    random_ = random.Random(SEED)
    sources = [clip_file(clip_pictures(10), codec) for codec in ENCODERS]
    sources += [clip_file(clip_pictures(10), "h264", container=name) for name in ("mov", "matroska")]
    outcomes = {True: 0, False: 0}

    async def send(data: bytes) -> None:
        try:
            (video,) = await prepare(bench, ImageFile(data, is_video_file=True))
        except InvalidRequestError:  # the client's error; any other one fails the test
            outcomes[False] += 1
        else:
            assert video.pixels.unpacked().size
            outcomes[True] += 1

    for start in range(0, count, 50):
        changes = [random_.choice((mutated, overwritten, overwritten)) for _ in range(min(50, count - start))]
        await asyncio.gather(*(send(change(random_.choice(sources), random_)) for change in changes))
        for process in bench.children:
            with_memory = process.memory_info().rss if process.is_running() else 0
            assert with_memory < 4 * MEMORY
    return outcomes[True], outcomes[False]


async def test_mutated_files_are_prepared_or_refused(bench: Bench) -> None:
    good, bad = await fuzz(bench, 400)
    assert good + bad == 400
    assert min(good, bad) > 30


@pytest.mark.extended
@pytest.mark.timeout(1800)
async def test_thousands_of_mutated_files_are_prepared_or_refused(directory: Path) -> None:
    bench = Bench(directory, processes=2)
    async with running(bench):
        good, bad = await fuzz(bench, 3000)
    assert good + bad == 3000
    assert min(good, bad) > 300


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_twenty_thousand_mutated_files_are_prepared_or_refused(directory: Path) -> None:
    bench = Bench(directory, processes=2)
    async with running(bench):
        good, bad = await fuzz(bench, 20_000)
    assert good + bad == 20_000
    assert min(good, bad) > 2000
