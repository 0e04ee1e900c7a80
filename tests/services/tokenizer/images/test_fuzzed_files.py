"""Mutated files of images are prepared or refused; no process of the pool crashes or grows."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from common.errors import InvalidRequestError
from common.requests import ImageFile
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.services.tokenizer.images.test_pool import ADA, MEMORY, MOST_BYTES, Bench, bench, directory, running

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["bench", "directory"]  # fixtures

SEED = 20_261_124


def mutated(data: bytes, random_: random.Random) -> bytes:
    """Return a file with bytes changed, removed, repeated or exchanged between places."""
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        at = random_.randrange(len(changed))
        match random_.randrange(4):
            case 0:
                changed[at] = random_.randrange(256)
            case 1:
                del changed[at : at + random_.randrange(1, 32)]
            case 2:
                changed[at:at] = changed[at : at + random_.randrange(1, 64)]
            case _:
                changed[at : at + 4] = random_.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
        if not changed:
            return b"\0"
    return bytes(changed)


async def fuzz(bench: Bench, count: int) -> tuple[int, int]:
    """Send so many mutated files; return how many were prepared and how many refused."""
    random_ = random.Random(SEED)
    exif = Image.Exif()
    exif[0x0112] = 6
    sources = [
        file_of(picture(48, 40), name, **options)
        for name, options in (
            ("JPEG", {}), ("JPEG", {"progressive": True, "exif": exif}), ("PNG", {}), ("WEBP", {}),
            ("WEBP", {"lossless": True}), ("GIF", {}),
        )
    ]  # fmt: skip
    sources += [file_of(picture(48, 40).quantize(8)), file_of(picture(48, 40).convert("RGBA"), "WEBP")]
    outcomes = {True: 0, False: 0}
    crashes: list[str] = []

    async def send(data: bytes) -> None:
        try:
            (image,) = (await bench.pool.prepare(ADA, [ImageFile(data)], "messages", MOST_BYTES)).images
        except InvalidRequestError as error:  # the client's error; any other one fails the test
            outcomes[False] += 1
            crashes.extend([str(error)] if "crashed" in str(error) else [])
        else:
            assert image.pixels.unpacked().size
            outcomes[True] += 1

    for start in range(0, count, 50):
        await asyncio.gather(*(send(mutated(random_.choice(sources), random_)) for _ in range(min(50, count - start))))
        assert all(child.memory_info().rss < 4 * MEMORY for child in bench.children if child.is_running())
    assert not crashes
    return outcomes[True], outcomes[False]


async def test_mutated_files_are_prepared_or_refused(bench: Bench) -> None:
    good, bad = await fuzz(bench, 300)
    assert good + bad == 300
    assert min(good, bad) > 30


@pytest.mark.extended
@pytest.mark.timeout(1200)
async def test_fifty_thousand_mutated_files_are_prepared_or_refused(directory: Path) -> None:
    bench = Bench(directory, processes=2)
    async with running(bench):
        good, bad = await fuzz(bench, 50_000)
    assert good + bad == 50_000
    assert min(good, bad) > 5_000
