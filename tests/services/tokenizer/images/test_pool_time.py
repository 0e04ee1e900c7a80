"""The time of a processor that an image may take: the kernel ends its process after that, and others' images go on."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from common.errors import InvalidRequestError
from common.requests import ImageFile
from common.types import ErrorCode, Subject
from services.tokenizer.images import decoding_process
from tests.services.tokenizer.images.pictures import file_of, picture
from tests.services.tokenizer.images.test_pool import ADA, LIMITS, MOST_BYTES, Bench, directory, running

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["directory"]

RIVAL = Subject("rival", "r")
CPU_SECONDS = 0.5
ENDLESS_SIDE = 31
# A decoding process as it is, but for a decoder that never ends with pictures of one width.
PROGRAM = f"""
from services.tokenizer.images import child
decode = child.decode
def endless(data, max_pixels):
    image = decode(data, max_pixels)
    while image.width == {ENDLESS_SIDE}:
        pass
    return image
child.decode = endless
child.main()
"""


async def test_an_image_that_takes_more_time_of_a_processor_is_refused_and_others_go_on(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding_process, "COMMAND", (sys.executable, "-c", PROGRAM))
    good, endless = (ImageFile(file_of(picture(side, 30))) for side in (30, ENDLESS_SIDE))
    bench = Bench(directory, processes=2, limits=replace(LIMITS, cpu_seconds=CPU_SECONDS))
    async with running(bench):
        with capture_logs() as logged:
            refused = asyncio.create_task(bench.pool.prepare(ADA, [good, endless], "messages", MOST_BYTES))
            others = [(await bench.pool.prepare(RIVAL, [good], "messages", MOST_BYTES)).images for _ in range(3)]
            with pytest.raises(InvalidRequestError) as caught:
                await refused
        assert str(caught.value) == f"Image 2 of 2 takes more than {CPU_SECONDS:g} s of a processor to decode."
        assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "messages")
        assert len(others) == 3
        # Not by the limit of elapsed time, which is far away.
        replaced = [entry for entry in logged if entry["event"] == "images.process_replaced"]
        assert [entry["outcome"] for entry in replaced] == ["timeout"]
        # In the process that has taken the place of the one that ended, too.
        again = await asyncio.gather(
            *(bench.pool.prepare(subject, [good], "messages", MOST_BYTES) for subject in (ADA, RIVAL))
        )
        assert [image.digest for prepared in again for image in prepared.images] == [others[0][0].digest] * 2
