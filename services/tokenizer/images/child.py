"""The process that decodes images and cuts them for the model, confined before it reads the first one.

Run as `python -m services.tokenizer.images.child PARENT_PID DIRECTORY MAX_PIXELS MAX_FRAMES MEMORY_BYTES CPU_SECONDS`.
Questions and answers are frames: an image's detail, and its file or a video's frames, after how many these are; then
either why it is refused, or the error of this process for which it failed, or its grid and its values, and of a video's
file how many frames it has at which rate.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from PIL import Image

from common.child_process import die_with_parent
from common.host import keep_freed_memory
from services.tokenizer.images.confinement import allow_time, confine
from services.tokenizer.images.containers import can_be_decoded
from services.tokenizer.images.decode import FORMATS, decode
from services.tokenizer.images.faults import described
from services.tokenizer.images.processor import MAX_PIXEL_BYTES, Detail, RefusedImageError
from services.tokenizer.images.registry import read_processor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from services.tokenizer.images.processor import ImageProcessor, JsonObject, Values
    from services.tokenizer.images.video_files import VideoFile

# Of a part of a frame.
LENGTH = struct.Struct("<Q")
TOO_MUCH_MEMORY = "takes too much memory to decode"
# A video's file is resized to so many bytes unless its detail is high: a request has room for a second one, or images.
FILE_PIXEL_BYTES = MAX_PIXEL_BYTES // 2
_WARM_SIDE = 64


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a process for one image, in addition to its use when idle."""

    max_pixels: int
    max_frames: int
    memory_bytes: int
    cpu_seconds: float


class OpenVideo(Protocol):
    """Opens files of videos, see `video_files.open_video`."""

    def __call__(self, data: bytes, max_pixels: int) -> AbstractContextManager[VideoFile]:
        """Open a file whose frames may have `max_pixels` each."""
        ...


@dataclass(frozen=True, slots=True)
class Cutting:
    """Decodes and cuts images and videos within limits."""

    processor: ImageProcessor
    limits: ChildLimits
    open_video: OpenVideo | None
    """None: no files of videos are decoded."""

    def cut(self, question: JsonObject, files: Sequence[bytes]) -> tuple[JsonObject, Values]:
        """Return the answer to a question, and the values of its image or video.

        Raises:
            RefusedImageError: it cannot be used.
            MemoryError: it takes more memory than there is.
            Exception: an error of this process, which is not due to the image.
        """
        detail, count = Detail(question["detail"]), question["frames"]
        if question["is_video_file"]:
            return self._cut_file(files[0], detail, question["rate"])
        if count:
            frames = (decode(each, self.limits.max_pixels) for each in files)
            grid, values = self.processor.cut_frames(frames, count, detail)
        else:
            grid, values = self.processor.cut(decode(files[0], self.limits.max_pixels), detail)
        return {"grid": grid}, values

    def _cut_file(self, file: bytes, detail: Detail, rate: float | None) -> tuple[JsonObject, Values]:
        if self.processor.video is None or self.open_video is None:
            raise RefusedImageError("is the file of a video, and none are decoded here")
        max_bytes = None if detail is Detail.HIGH else FILE_PIXEL_BYTES
        with self.open_video(file, self.limits.max_pixels) as video:
            places = self.processor.video.sampling.choose(video.footage, rate, self.limits.max_frames)
            grid, values = self.processor.cut_frames(video.pictures(places), len(places), detail, max_bytes)
            return {"grid": grid, "frames": video.footage.frames, "rate": video.footage.rate}, values


def main() -> None:
    """Serve standard input until it ends."""
    parent, directory, max_pixels, max_frames, memory_bytes, cpu_seconds = sys.argv[1:]
    die_with_parent(int(parent))
    keep_freed_memory()
    limits = ChildLimits(int(max_pixels), int(max_frames), int(memory_bytes), float(cpu_seconds))
    processor = read_processor(Path(directory))
    questions, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    # A library that prints must not forge an answer.
    os.dup2(2, 1)
    _warm(processor)
    opener = _opener(processor)
    is_filtered = confine(limits.memory_bytes)
    write_frame(answers, json.dumps({"is_filtered": is_filtered}).encode())
    serve(questions, answers, Cutting(processor, limits, opener))


def serve(questions: BinaryIO, answers: BinaryIO, cutting: Cutting) -> None:
    """Answer each image or video with a frame that says what follows, and its values."""
    while head := read_frame(questions):
        question = json.loads(head)
        files = [read_frame(questions) for _ in range(question["frames"] or 1)]
        allow_time(cutting.limits.cpu_seconds)
        try:
            answer, values = cutting.cut(question, files)
        except RefusedImageError as error:
            write_frame(answers, json.dumps({"refusal": str(error)}).encode(), b"")
        except MemoryError:
            write_frame(answers, json.dumps({"refusal": TOO_MUCH_MEMORY}).encode(), b"")
        except Exception as error:  # noqa: BLE001  (it is logged outside, where there are logs)
            write_frame(answers, json.dumps({"failure": described(error)}).encode(), b"")
        else:
            write_frame(answers, json.dumps(answer).encode(), values.data)
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


def _opener(processor: ImageProcessor) -> OpenVideo | None:
    """Return the function that opens files of videos, after it has opened one, for the reason of `_warm`."""
    if processor.video is None or not can_be_decoded():
        return None
    from services.tokenizer.images.video_files import open_video, sample

    with open_video(sample(), _WARM_SIDE**2) as video:
        processor.cut_frames(video.pictures(range(video.footage.frames)), video.footage.frames, Detail.AUTO)
    return open_video


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
