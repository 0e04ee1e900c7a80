"""Decodes files of videos with FFmpeg, frame by frame, as RGB. For confined processes only.

FFmpeg reads the file from memory by one of two demuxers, and decodes it by one of six decoders, in one thread; all
others, protocols and references to other files are turned off.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import av
import numpy as np
from av.sidedata.sidedata import SideDataContainer, Type
from av.stream import Disposition
from PIL import Image

from services.tokenizer.images.containers import MATROSKA, MP4, container_of
from services.tokenizer.images.faults import is_own
from services.tokenizer.images.processor import RefusedImageError
from services.tokenizer.images.sampling import MAX_FRAMES, MAX_SECONDS, Footage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# By FFmpeg's names.
DECODERS: Final = {
    "h264": "H.264", "hevc": "H.265", "vp8": "VP8", "vp9": "VP9", "libdav1d": "AV1", "mpeg4": "MPEG-4 part 2",
}  # fmt: skip
OPTIONS: Final = {
    "codec_whitelist": ",".join(DECODERS),
    "format_whitelist": f"{MP4},{MATROSKA}",
    "protocol_whitelist": "none",
}
# Of all samples of a file of this many bytes: samples of a damaged one may overlap.
MAX_GROWTH: Final = 2
SLACK_BYTES: Final = 1 << 20
# The distance of a frame from its place at a constant rate, in frames.
_TOLERANCE: Final = 0.5
_VP8_IS_SHOWN: Final = 0x10
_DISPLAY_MATRIX: Final = 9
_RIGHT_ANGLE: Final = 90
_EDGE_PIXELS: Final = 1 << 16
_SAMPLE_SIDE: Final = 64


@contextlib.contextmanager
def open_video(data: bytes, max_pixels: int) -> Iterator[VideoFile]:
    """Open a file whose frames may have `max_pixels` each, and close it at the end of the block.

    Raises:
        RefusedImageError: it is no video that can be decoded, or damaged; also of what is decoded within the block.
        MemoryError: it takes more memory than there is.
        Exception: an error of this process, which is not due to the file.
    """
    demuxer = container_of(data)
    try:
        with av.open(BytesIO(data), "r", demuxer, OPTIONS, metadata_errors="replace") as container:
            yield VideoFile(container, max_pixels, len(data))
    except av.FFmpegError as error:
        if isinstance(error, (MemoryError, av.error.BugError)) or is_own(error):
            raise
        raise RefusedImageError(f"is damaged: {error.strerror or error}") from error


def sample() -> bytes:
    """Return a small MP4 file, to open before a process is confined."""
    written = BytesIO()
    with av.open(written, "w", "mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.codec_context.thread_count = 1
        stream.width = stream.height = _SAMPLE_SIDE
        stream.pix_fmt = "yuv420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame(_SAMPLE_SIDE, _SAMPLE_SIDE, "yuv420p")))
        container.mux(stream.encode(None))
    return written.getvalue()


@dataclass(frozen=True, slots=True)
class _Sample:
    """A coded frame, and when it is shown, in units of the stream's time base."""

    packet: Packet[VideoStream]
    time: int
    is_key: bool


class VideoFile:
    """The first video in a file that is coded as one of `DECODERS`.

    Its frames are decoded as they are taken, and those between them skipped if possible. Frames of variable durations
    are taken as if as many were shown at a constant rate: each place has the frame that is shown at its time.
    """

    def __init__(self, container: InputContainer, max_pixels: int, size: int) -> None:
        """Read the samples of a file of `size` bytes, whose frames may have `max_pixels`.

        Raises:
            RefusedImageError: it has no video that can be decoded, or one of too many frames or seconds.
        """
        self._max_pixels = max_pixels
        self._stream = _video_of(container)
        self._context = self._stream.codec_context
        self._check_pixels(self._context.width, self._context.height)
        self._context.thread_count = 1
        # Streams may state other sides than their container. Decoders count edges, too.
        self._context.options = {"max_pixels": str(2 * max_pixels + _EDGE_PIXELS)}
        unit = self._stream.time_base or Fraction(1)
        self._samples, self._times = _samples(container, self._stream, size)
        if float((self._times[-1] - self._times[0]) * unit) > MAX_SECONDS:
            raise RefusedImageError(f"has frames more than {MAX_SECONDS} seconds apart")
        self.footage, self._places = _at_constant_rate(self._times, unit, self._stream.average_rate)

    def pictures(self, places: Sequence[int]) -> Iterator[Image.Image]:
        """Return the frames at ascending places of the footage, in mode RGB, as people see them.

        Raises:
            RefusedImageError: the file is damaged, or a frame has too many pixels.
            MemoryError: it takes more memory than there is.
        """
        decoder = _Decoder(self._context, self._samples)
        for place in places:
            frame = decoder.shown_at(self._times[self._places[place]])
            self._check_pixels(frame.width, frame.height)
            yield _picture(frame)

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self._max_pixels:
            raise RefusedImageError(f"has {width} x {height} pixels; at most {self._max_pixels} are allowed")


class _Decoder:
    """Decodes samples from key frame to key frame, and skips those that no frame needs that is asked for."""

    def __init__(self, context: VideoCodecContext, samples: Sequence[_Sample]) -> None:
        """Begin before the first of `samples`, which are in the order of decoding."""
        self._context = context
        self._samples = samples
        self._keys: list[int] = []
        self._key_times: list[int] = []
        for place, sample in enumerate(samples):
            if sample.is_key and not (self._keys and sample.time <= self._key_times[-1]):
                self._keys.append(place)
                self._key_times.append(sample.time)
        # Of the next sample.
        self._place = self._keys[0] if self._keys else 0
        self._has_ended = False
        # Before it, nothing can be decoded, as the samples that it needs were skipped.
        self._earliest: int | None = None
        self._ready: deque[VideoFrame] = deque()
        self._shown: VideoFrame | None = None

    def shown_at(self, time: int) -> VideoFrame:
        """Return the frame that is shown at `time`, which is not before that of an earlier call.

        Raises:
            RefusedImageError: the samples are damaged.
            av.FFmpegError: the same.
        """
        self._skip_to(time)
        while self._shown is None or _time_of(self._shown) < time:
            following = self._following()
            if following is None or (self._shown is not None and _time_of(following) > time):
                break
            self._shown = self._ready.popleft()
        if self._shown is None:
            raise RefusedImageError("is damaged: none of its frames can be decoded")
        if self._shown.is_corrupt:
            raise RefusedImageError("is damaged: it has frames that cannot be decoded as a whole")
        return self._shown

    def _skip_to(self, time: int) -> None:
        number = bisect_right(self._key_times, time) - 1
        if number < 0 or self._keys[number] <= self._place:
            return
        self._context.flush_buffers()
        self._ready.clear()
        self._shown = None
        self._place, self._earliest = self._keys[number], self._key_times[number]

    def _following(self) -> VideoFrame | None:
        """Decode until there is a frame, and return the next one; None: there is none left."""
        while not (self._ready or self._has_ended):
            if self._place == len(self._samples):
                self._has_ended = True
                self._ready.extend(self._context.decode(None))
                break
            sample = self._samples[self._place]
            self._place += 1
            if self._earliest is None or sample.time >= self._earliest:
                self._ready.extend(self._context.decode(sample.packet))
        return self._ready[0] if self._ready else None


def _time_of(frame: VideoFrame) -> int:
    if frame.pts is None:
        raise RefusedImageError("is damaged: a frame has no time")
    return frame.pts


def _video_of(container: InputContainer) -> VideoStream:
    others = []
    for stream in container.streams.video:
        if stream.disposition & Disposition.attached_pic:
            continue
        # None: FFmpeg does not know the codec.
        context: VideoCodecContext | None = stream.codec_context
        name = context.codec.name if context else "an unknown codec"
        if name in DECODERS:
            return stream
        others.append(name)
    if others:
        names = " and ".join(dict.fromkeys(others))
        raise RefusedImageError(f"is coded as {names}; supported are {', '.join(DECODERS.values())}")
    raise RefusedImageError("has no video, only sound" if container.streams.audio else "has no video")


def _samples(container: InputContainer, stream: VideoStream, size: int) -> tuple[list[_Sample], list[int]]:
    """Return the samples in the order of decoding, and the times at which frames are shown, in ascending order."""
    samples: list[_Sample] = []
    times: set[int] = set()
    left = MAX_GROWTH * size + SLACK_BYTES
    is_vp8 = stream.codec_context.codec.name == "vp8"
    for packet in container.demux(stream):
        if not packet.size:
            continue
        left -= packet.size
        if left < 0:
            raise RefusedImageError("is damaged: its frames have more bytes than the file")
        if len(samples) == MAX_FRAMES:
            raise RefusedImageError(f"has more than {MAX_FRAMES} frames")
        time = packet.dts if packet.pts is None else packet.pts
        if time is None:
            raise RefusedImageError("is damaged: a frame has no time")
        packet.pts = time
        samples.append(_Sample(packet, time, packet.is_keyframe))
        # Frames of VP8 may be for reference only.
        if not packet.is_discard and not (is_vp8 and not memoryview(packet)[0] & _VP8_IS_SHOWN):
            times.add(time)
    if not times:
        raise RefusedImageError("has no frames")
    return samples, sorted(times)


def _at_constant_rate(times: Sequence[int], unit: Fraction, average: Fraction | None) -> tuple[Footage, Sequence[int]]:
    """Return the footage for frames at `times`, which are in units of `unit` seconds, and the frame at each place."""
    count = len(times)
    if count == 1:
        return Footage(1, 1.0), (0,)
    seconds = np.array([time - times[0] for time in times], np.float64) * float(unit)
    even = np.arange(count)
    mean = float((count - 1) / seconds[-1])
    for rate in (float(average or 0), mean):
        if np.abs(seconds * rate - even).max() < _TOLERANCE:
            return Footage(count, rate), range(count)
    places: list[int] = (np.searchsorted(seconds, even / mean + float(unit) / 2, side="right") - 1).tolist()
    return Footage(count, mean), places


def _picture(frame: VideoFrame) -> Image.Image:
    """Return a frame in mode RGB, turned and mirrored as the file says."""
    pixels = frame.reformat(format="rgb24", threads=1).to_ndarray()
    try:
        # `frame.side_data` is kept by the frame that it refers to: both would stay until a search for cycles.
        constructor: Any = SideDataContainer  # Any: it is declared without its argument, and as another iterable
        sides = constructor(frame)
    except ValueError:  # it has data of a type that PyAV does not know, as those of spatial videos
        return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / _RIGHT_ANGLE))))
    matrix = next((side for side in sides if side.type is Type.DISPLAYMATRIX), None)
    if matrix is not None:
        # [x y 1] is multiplied by this matrix, of which the last column and row take no part.
        values = np.frombuffer(matrix, np.int32)[:_DISPLAY_MATRIX].astype(np.int64)
        a, b, _, c, d, *_ = values.tolist()
        if abs(a) < abs(b):
            pixels, a, d = pixels.transpose(1, 0, 2), c, b
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return Image.fromarray(np.ascontiguousarray(pixels))
