"""Files of videos for tests, written with PyAV."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING

import av
import numpy as np
from PIL import Image

from tests.services.tokenizer.images.pictures import picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MILLISECOND = Fraction(1, 1000)
# An encoder for each decoder, the container it is written to, and options that make it fast, or frames refer forwards.
ENCODERS = {
    "h264": ("libx264", "mp4", {"preset": "ultrafast", "x264-params": "bframes=3:open-gop=1"}),
    "hevc": ("libx265", "mp4", {"preset": "ultrafast", "x265-params": "pools=none:frame-threads=1:log-level=none"}),
    "mpeg4": ("mpeg4", "mp4", {"bf": "2"}),
    "vp8": ("libvpx", "webm", {"cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "vp9": ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", "webm", {"preset": "12", "svtav1-params": "lp=1"}),
}
KEY_DISTANCE = 12


def clip_pictures(count: int, width: int = 64, height: int = 48) -> list[Image.Image]:
    """Return pictures of which no two are equal, and that compress."""
    first = picture(width, height, seed=1).resize((8, 6)).resize((width, height))
    moved = []
    for number in range(count):
        pixels = np.roll(np.asarray(first), number, axis=1).copy()
        pixels[: 1 + number * height // (count + 1)] //= 2
        moved.append(Image.fromarray(pixels))
    return moved


def clip_file(
    pictures: Sequence[Image.Image],
    codec: str = "mpeg4",
    *,
    rate: int | Fraction = 10,
    milliseconds: Sequence[int] | None = None,
    container: str | None = None,
) -> bytes:
    """Return the file of a video whose pictures follow at `rate` a second, or are shown at the given times."""
    encoder, usual, options = ENCODERS[codec]
    written = BytesIO()
    with av.open(written, "w", container or usual) as output:
        stream = output.add_stream(encoder, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = KEY_DISTANCE
        stream.codec_context.thread_count = 1
        stream.options = dict(options)
        if milliseconds:
            stream.codec_context.time_base = MILLISECOND
        for number, each in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(np.asarray(each), "rgb24")
            frame.pts, frame.time_base = (
                (milliseconds[number], MILLISECOND) if milliseconds else (number, 1 / Fraction(rate))
            )
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return written.getvalue()


def decoded(file: bytes) -> list[NDArray[np.uint8]]:
    """Return all frames of a file as PyAV decodes them, [height, width, channels]."""
    with av.open(BytesIO(file), "r") as container:
        return [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in container.decode(video=0)]


def sound_file() -> bytes:
    """Return an MP4 file that has sound only."""
    written = BytesIO()
    with av.open(written, "w", "mp4") as output:
        stream = output.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        for number in range(4):
            frame.pts = number * 1024
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return written.getvalue()
