"""Files of videos: their frames are those that PyAV decodes, at their times, upright; and what is refused."""

from __future__ import annotations

import contextlib
import errno
import gc
import random
import struct
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING

import av
import numpy as np
import pytest
from PIL import Image

from services.tokenizer.images import video_files
from services.tokenizer.images.containers import container_of
from services.tokenizer.images.processor import RefusedImageError
from services.tokenizer.images.video_files import DECODERS, open_video, sample
from tests.services.tokenizer.images.clips import ENCODERS, clip_file, clip_pictures, decoded, sound_file
from tests.services.tokenizer.images.pictures import file_of, picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_PIXELS = 100_000
COUNT = 40
# The numbers in the track's header of MP4: a b u, c d v, x y w, with 16 or 30 bits after the point.
UNTURNED = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def read(file: bytes, places: Sequence[int] | None = None, max_pixels: int = MAX_PIXELS) -> list[NDArray[np.uint8]]:
    with open_video(file, max_pixels) as video:
        return [np.asarray(each) for each in video.pictures(places or range(video.footage.frames))]


def refusal(file: bytes, max_pixels: int = MAX_PIXELS) -> str:
    with pytest.raises(RefusedImageError) as caught:
        read(file, max_pixels=max_pixels)
    return str(caught.value)


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("places", [None, (0, COUNT - 1), (3, 4, 17, 39), (11, 12, 13, 24, 25, 38), (30,)])
def test_frames_are_those_that_pyav_decodes_also_after_skipped_ones(codec: str, places: Sequence[int] | None) -> None:
    file = clip_file(clip_pictures(COUNT), codec)
    expected = decoded(file)
    found = read(file, places)
    assert len(expected) == COUNT
    assert len(found) == len(places or expected)
    for place, one in zip(places or range(COUNT), found, strict=True):
        assert np.array_equal(one, expected[place])


def test_there_is_an_encoder_for_every_decoder() -> None:
    assert {name.replace("libdav1d", "av1") for name in DECODERS} == set(ENCODERS)


@pytest.mark.parametrize(
    ("codec", "container"), [("h264", "matroska"), ("h264", "mov"), ("av1", "mp4"), ("vp9", "mp4")]
)
def test_containers_and_decoders_combine(codec: str, container: str) -> None:
    file = clip_file(clip_pictures(6), codec, container=container)
    assert np.array_equal(read(file), decoded(file))


def test_only_frames_that_are_needed_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = clip_file(clip_pictures(COUNT))
    with open_video(file, MAX_PIXELS) as video:
        decoder = DecodesNoted(video._context)
        monkeypatch.setattr(video, "_context", decoder)
        assert len(list(video.pictures([0, 37]))) == 2
    # Of the distance between key frames, which is 12: the first ones, and those after the last key frame.
    assert 2 <= decoder.packets < COUNT - 12


class DecodesNoted:
    """A codec's context that counts the packets that it decodes."""

    def __init__(self, context: av.VideoCodecContext) -> None:
        self.packets = 0
        self.flush_buffers = context.flush_buffers
        self._context = context

    def decode(self, packet: av.Packet[av.VideoStream] | None) -> list[av.VideoFrame]:
        self.packets += packet is not None
        return self._context.decode(packet)


@pytest.mark.parametrize("rate", [10, Fraction(30_000, 1001), Fraction(1, 2), 24])
@pytest.mark.parametrize("codec", ["mpeg4", "vp9"])
def test_the_footage_is_that_which_transformers_reads(rate: int | Fraction, codec: str) -> None:
    file = clip_file(clip_pictures(15), codec, rate=rate)
    with open_video(file, MAX_PIXELS) as video, av.open(BytesIO(file), "r") as container:
        average = container.streams.video[0].average_rate
        assert average is not None
        assert (video.footage.frames, video.footage.rate) == (15, float(average))


@pytest.mark.parametrize("codec", ["h264", "vp9"])
def test_frames_of_variable_durations_are_taken_by_their_times(codec: str) -> None:
    # Eight frames in 0.4 s, then one for a second, then eight in 0.4 s.
    times = [*range(0, 400, 50), *range(1400, 1800, 50)]
    file = clip_file(clip_pictures(len(times)), codec, milliseconds=times)
    expected = decoded(file)
    with open_video(file, MAX_PIXELS) as video:
        footage = video.footage
        found = [np.asarray(each) for each in video.pictures(range(footage.frames))]
    assert footage.frames == len(times)
    assert footage.rate == pytest.approx((len(times) - 1) / 1.75)
    for place, one in enumerate(found):
        shown = max(number for number, time in enumerate(times) if time / 1000 <= place / footage.rate + 0.0006)
        assert np.array_equal(one, expected[shown])
    still = [one for one in found if np.array_equal(one, expected[7])]
    assert len(still) in (9, 10), "the frame that is shown for a second of 1.75"


def turned(file: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Return a file whose track has another display matrix: a, b, c, d."""
    place = file.index(UNTURNED, file.index(b"tkhd"))
    a, b, c, d = (value << 16 for value in matrix)
    return file[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + file[place + len(UNTURNED) :]


@pytest.mark.parametrize(
    ("matrix", "transposed"),
    [
        ((1, 0, 0, 1), None),
        ((0, 1, -1, 0), Image.Transpose.ROTATE_270),
        ((-1, 0, 0, -1), Image.Transpose.ROTATE_180),
        ((0, -1, 1, 0), Image.Transpose.ROTATE_90),
        ((-1, 0, 0, 1), Image.Transpose.FLIP_LEFT_RIGHT),
        ((1, 0, 0, -1), Image.Transpose.FLIP_TOP_BOTTOM),
        ((0, 1, 1, 0), Image.Transpose.TRANSPOSE),
        ((0, -1, -1, 0), Image.Transpose.TRANSVERSE),
    ],
)
def test_frames_are_upright(matrix: tuple[int, int, int, int], transposed: Image.Transpose | None) -> None:
    file = clip_file(clip_pictures(2))
    plain = [Image.fromarray(frame) for frame in decoded(file)]
    expected = [frame if transposed is None else frame.transpose(transposed) for frame in plain]
    found = read(turned(file, matrix))
    assert [one.shape for one in found] == [np.asarray(one).shape for one in expected]
    assert all(np.array_equal(one, np.asarray(other)) for one, other in zip(found, expected, strict=True))


def test_frames_with_data_of_an_unknown_type_are_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    file = turned(clip_file(clip_pictures(2)), (0, 1, -1, 0))
    expected = read(file)

    def refused(frame: av.VideoFrame) -> None:
        raise ValueError(f"{frame}: 30 is not a valid Type")

    monkeypatch.setattr(video_files, "SideDataContainer", refused)
    found = read(file)
    assert found[0].shape == (64, 48, 3)
    assert np.array_equal(found, expected)


def test_frames_are_freed_without_a_search_for_cycles() -> None:
    file = turned(clip_file(clip_pictures(COUNT)), (-1, 0, 0, 1))
    gc.collect()
    # Objects that are there already are not searched, which would take half a minute after other tests.
    gc.freeze()
    gc.disable()
    try:
        with open_video(file, MAX_PIXELS) as video:
            most = max(count(av.VideoFrame) for _ in video.pictures(range(COUNT)))
        del video
        assert 0 < most < COUNT / 4
        assert count(av.VideoFrame) == 0
        # `pytest.raises` would keep the error.
        with contextlib.suppress(IndexError), open_video(file, MAX_PIXELS) as video:
            next(video.pictures([COUNT]))
        del video
        assert count(av.VideoCodecContext) == count(av.container.InputContainer) == 0
    finally:
        gc.enable()


def count(kind: type) -> int:
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_what_is_no_whole_video_is_refused_by_name() -> None:
    mp4, webm = clip_file(clip_pictures(COUNT)), clip_file(clip_pictures(COUNT), "vp9")
    assert refusal(b"") == refusal(b"GIF89a") == "is damaged, or not a video; supported are MP4 and WebM"
    for file in (mp4, webm):
        for length in (len(file) - 1, len(file) // 2, 300):
            assert refusal(file[:length]).startswith(f"is cut off: it has {length} of its ")
    assert refusal(b"\x00\x00\x00\x10ftypmp42\x00\x00\x00\x00").startswith("is damaged: ")
    assert refusal(b"\x1a\x45\xdf\xa3\x80").startswith("is damaged: ")
    assert refusal(sound_file()) == "has no video, only sound"
    assert refusal(mp4, max_pixels=64 * 47) == "has 64 x 48 pixels; at most 3008 are allowed"


def test_other_codecs_are_refused_by_name() -> None:
    written = BytesIO()
    with av.open(written, "w", "matroska") as output:
        stream = output.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for each in clip_pictures(3):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(each), "rgb24").reformat(format="yuvj420p")))
        output.mux(stream.encode(None))
    assert refusal(written.getvalue()) == (
        "is coded as mjpeg; supported are H.264, H.265, VP8, VP9, AV1, MPEG-4 part 2"
    )


def several(*codecs: str, colour_of_last: int) -> bytes:
    """Return a file with a video of each codec, of one black frame, or of one gray one in the last."""
    written = BytesIO()
    with av.open(written, "w", "matroska") as output:
        streams = []
        for codec in codecs:
            stream = output.add_stream(codec, rate=5)
            assert isinstance(stream, av.VideoStream)
            stream.width, stream.height = 64, 48
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.codec_context.thread_count = 1
            streams.append(stream)
        for stream in streams:
            gray = np.full((48, 64, 3), colour_of_last if stream is streams[-1] else 0, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(gray, "rgb24").reformat(format=stream.pix_fmt)))
        for stream in streams:
            output.mux(stream.encode(None))
    return written.getvalue()


def test_the_first_video_is_shown_whose_codec_is_supported() -> None:
    (frame,) = read(several("mjpeg", "mpeg4", colour_of_last=128))
    assert abs(float(frame.mean()) - 128) < 10
    (first,) = read(several("mpeg4", "mpeg4", colour_of_last=128))
    assert float(first.mean()) < 10
    assert refusal(several("mjpeg", "mpeg2video", colour_of_last=128)) == (
        "is coded as mjpeg and mpeg2video; supported are H.264, H.265, VP8, VP9, AV1, MPEG-4 part 2"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of a program"), KeyError("of a program"), av.error.PermissionError(errno.EPERM, "not permitted"),
        av.error.BlockingIOError(errno.EAGAIN, "no thread"), av.error.BugError(0, "bug"), MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_errors_that_are_not_of_the_file_are_not_reported_as_damage(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    file = clip_file(clip_pictures(1))
    monkeypatch.setattr(video_files, "_samples", fail)
    with pytest.raises(type(error)) as caught:
        read(file)
    assert caught.value is error


def test_frames_that_are_damaged_are_refused() -> None:
    file = clip_file(clip_pictures(COUNT), "vp9")
    with av.open(BytesIO(file), "r") as container:
        largest = max((bytes(each) for each in container.demux(video=0) if each.size), key=len)
    place = file.index(largest)
    damaged = file[: place + 1] + bytes(len(largest) - 1) + file[place + len(largest) :]
    assert refusal(damaged).startswith("is damaged")


def test_a_stream_with_larger_frames_than_its_container_says_is_refused() -> None:
    file = clip_file(clip_pictures(4, 640, 480), "vp9")
    # The sides that Matroska states: elements B0 and BA of two bytes each.
    small = file.replace(b"\xb0\x82\x02\x80", b"\xb0\x82\x00\x40").replace(b"\xba\x82\x01\xe0", b"\xba\x82\x00\x30")
    assert small != file
    assert refusal(small, max_pixels=640 * 479) == "has 640 x 480 pixels; at most 306560 are allowed"


def test_times_a_day_apart_are_refused() -> None:
    file = clip_file(clip_pictures(3), "vp9", milliseconds=[0, 1000, 100_000_000])
    assert refusal(file) == "has frames more than 86400 seconds apart"


def test_files_of_more_frames_than_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = clip_file(clip_pictures(COUNT))
    monkeypatch.setattr(video_files, "MAX_FRAMES", COUNT)
    assert len(read(file)) == COUNT
    monkeypatch.setattr(video_files, "MAX_FRAMES", COUNT - 1)
    assert refusal(file) == f"has more than {COUNT - 1} frames"


def test_samples_of_more_bytes_than_the_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = clip_file(clip_pictures(COUNT))
    monkeypatch.setattr(video_files, "MAX_GROWTH", 0)
    monkeypatch.setattr(video_files, "SLACK_BYTES", 100)
    assert refusal(file) == "is damaged: its frames have more bytes than the file"


def test_frames_of_no_duration_are_one_frame() -> None:
    file = clip_file(clip_pictures(6), "vp9", container="mp4")
    # The table of durations: its one entry is a number of frames, and the duration of each.
    place = file.index(b"stts") + 12
    assert struct.unpack(">II", file[place : place + 8]) == (6, 1024)
    with open_video(file[: place + 4] + bytes(4) + file[place + 8 :], MAX_PIXELS) as video:
        assert video.footage.frames == 1


def test_files_that_are_written_as_they_are_sent_have_no_stated_end() -> None:
    file = clip_file(clip_pictures(4), "vp9")
    place = file.index(b"\x18\x53\x80\x67") + 4
    assert file[place] == 1, "a size of eight bytes"
    live = file[:place] + b"\x01" + b"\xff" * 7 + file[place + 8 :]
    assert np.array_equal(read(live), decoded(file))


def test_the_sample_is_a_video() -> None:
    assert len(read(sample())) == 2


def test_containers_are_recognised_or_refused_whatever_follows_their_first_bytes() -> None:
    random_, seen = random.Random(1), set()
    files = [clip_file(clip_pictures(2), codec) for codec in ("mpeg4", "vp9")]
    for _ in range(2000):
        file = bytearray(random_.choice(files)[: random_.randrange(1, 1500)])
        for _ in range(random_.randrange(4)):
            file[random_.randrange(len(file))] = random_.randrange(256)
        try:
            seen.add(container_of(bytes(file)))
        except RefusedImageError as error:
            seen.add(str(error)[:6])
    assert seen == {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "is cut", "is dam"}


def test_a_picture_is_no_video() -> None:
    assert "not a video" in refusal(file_of(picture(20, 20)))
