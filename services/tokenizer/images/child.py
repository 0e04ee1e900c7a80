"""The process that decodes images and cuts them for the model, confined before it reads the first one.

Run as `python -m services.tokenizer.images.child PARENT_PID DIRECTORY MAX_PIXELS MEMORY_BYTES CPU_SECONDS`.
Questions and answers are frames: an image's detail, and its file or a video's frames, after how many these are; then
either why it is refused, or its grid and its values.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image

from common.child_process import die_with_parent
from services.tokenizer.images.confinement import allow_time, confine
from services.tokenizer.images.decode import FORMATS, decode
from services.tokenizer.images.processor import Detail, RefusedImageError
from services.tokenizer.images.registry import read_processor

if TYPE_CHECKING:
    from services.tokenizer.images.processor import ImageProcessor

# Of a part of a frame.
LENGTH = struct.Struct("<Q")
TOO_MUCH_MEMORY = "takes too much memory to decode"
_WARM_SIDE = 64


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a process for one image, in addition to its use when idle."""

    max_pixels: int
    memory_bytes: int
    cpu_seconds: float


def main() -> None:
    """Serve standard input until it ends."""
    parent, directory, max_pixels, memory_bytes, cpu_seconds = sys.argv[1:]
    die_with_parent(int(parent))
    limits = ChildLimits(int(max_pixels), int(memory_bytes), float(cpu_seconds))
    processor = read_processor(Path(directory))
    questions, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    # A library that prints must not forge an answer.
    os.dup2(2, 1)
    _warm(processor)
    is_filtered = confine(limits.memory_bytes)
    write_frame(answers, json.dumps({"is_filtered": is_filtered}).encode())
    serve(questions, answers, processor, limits)


def serve(questions: BinaryIO, answers: BinaryIO, processor: ImageProcessor, limits: ChildLimits) -> None:
    """Answer each image or video with a frame that says what follows, and its values."""
    while head := read_frame(questions):
        question = json.loads(head)
        detail, count = Detail(question["detail"]), question["frames"]
        files = [read_frame(questions) for _ in range(count or 1)]
        allow_time(limits.cpu_seconds)
        try:
            if count:
                grid, values = processor.cut_frames((decode(each, limits.max_pixels) for each in files), count, detail)
            else:
                grid, values = processor.cut(decode(files[0], limits.max_pixels), detail)
        except RefusedImageError as error:
            write_frame(answers, json.dumps({"refusal": str(error)}).encode(), b"")
        except MemoryError:
            write_frame(answers, json.dumps({"refusal": TOO_MUCH_MEMORY}).encode(), b"")
        else:
            write_frame(answers, json.dumps({"grid": grid}).encode(), values.data)
            del values


def read_frame(stream: BinaryIO) -> bytes:
    """Return the next part; nothing at the end of the stream."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def write_frame(stream: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write parts, each after its length."""
    for part in parts:
        stream.write(LENGTH.pack(memoryview(part).nbytes))
        stream.write(part)
    stream.flush()


def _warm(processor: ImageProcessor) -> None:
    """Use every format once: libraries load files when they are first used, and a confined process cannot."""
    image = Image.linear_gradient("L").resize((_WARM_SIDE, _WARM_SIDE)).convert("RGB")
    image.getexif()[0x0112] = 6
    for name in FORMATS:
        written = BytesIO()
        image.save(written, name, exif=image.getexif())
        processor.cut(decode(written.getvalue(), _WARM_SIDE**2), Detail.AUTO)
        try:
            decode(written.getvalue()[:-20], _WARM_SIDE**2)
        except RefusedImageError:
            continue


if __name__ == "__main__":
    main()
