"""One process that decodes images: what crosses its pipes, and what is left of it when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from common.requests import ImageFile
from services.tokenizer.images.decoding_process import PIPE_BYTES, DecodingProcess
from services.tokenizer.images.processor import Detail
from services.tokenizer.images.registry import read_processor
from tests.services.tokenizer.images.pictures import file_of
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDE = 1008
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": SIDE**2}))
    return tmp_path


def open_pipes() -> set[str]:
    names = set()
    for each in DESCRIPTORS.iterdir():
        # The one of this iteration ends with it.
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(each))
    return {name for name in names if name.startswith("pipe:")}


def arguments(directory: Path) -> Sequence[str]:
    return str(directory), str(SIDE**2), "2", str(256 * 1024**2), "20"


async def test_files_and_values_that_are_larger_than_pipes_arrive_whole(directory: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    file = ImageFile(file_of(Image.fromarray(noise)))
    process = await DecodingProcess.start(arguments(directory))
    try:
        answers = [await process.decode(file, 4 * SIDE**2) for _ in range(2)]
    finally:
        await process.kill()
    grid, values = read_processor(directory, "<image>").cut(Image.fromarray(noise), Detail.AUTO)
    assert file.size > PIPE_BYTES
    assert values.nbytes > PIPE_BYTES
    assert [(tuple(answer["grid"]), content) for answer, content in answers] == [(grid, values.tobytes())] * 2


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs Linux's list of descriptors")
async def test_pipes_and_thread_of_an_ended_process_are_closed(directory: Path) -> None:
    before = open_pipes()
    process = await DecodingProcess.start(arguments(directory))
    own = open_pipes() - before
    [thread] = (each for each in threading.enumerate() if each.name.startswith("images"))
    await process.kill()
    await process.kill()
    await until(lambda: not thread.is_alive())
    assert process.has_ended
    assert len(own) == 2
    assert not own & open_pipes()
