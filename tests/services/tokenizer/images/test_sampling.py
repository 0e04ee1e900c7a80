"""The frames that are taken of a video's file are those that the processors of `transformers` take."""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from services.tokenizer.images.processor import MAX_PIXEL_BYTES, Detail, prepared_video
from services.tokenizer.images.sampling import Footage, FrameSampling, FrameTimes
from services.tokenizer.images.video_files import open_video
from tests.services.tokenizer.images.clips import clip_file, clip_pictures, decoded
from tests.services.tokenizer.images.test_videos import BOUNDS, END, PAD, START, processor_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.tokenizer.images.processor import ImageProcessor

# Of a module that is imported for its choice of frames only, which uses nothing of it.
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
QWEN2_PROCESSOR = "transformers.models.qwen2_vl.video_processing_qwen2_vl"
MOST = 768


@pytest.fixture(scope="module")
def references() -> Iterator[dict[str, Any]]:
    """Yield the video processors of `transformers` by our names of their models."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ABSENT:
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.delitem(sys.modules, QWEN2_PROCESSOR, raising=False)
        module = importlib.import_module(QWEN2_PROCESSOR)
        yield {"qwen2.5-vl": module.Qwen2VLVideoProcessor, "qwen3-vl": Qwen3VLVideoProcessor}
        sys.modules.pop(QWEN2_PROCESSOR, None)


def sampling_of(directory: Path, name: str, **stated: Any) -> FrameSampling:
    video = processor_of(directory, name, **stated).video
    assert video is not None
    return video.sampling


def expected(reference: Any, footage: Footage, rate: float | None, **stated: Any) -> list[int]:
    """Return the places that a processor of `transformers` with `stated` settings takes."""
    processor = reference(**stated)
    metadata = VideoMetadata(total_num_frames=footage.frames, fps=footage.rate)
    if processor.num_frames is None and rate is None:
        rate = processor.fps or 2
    count = processor.num_frames if rate is None else None
    given = {name: getattr(processor, name) for name in ("temporal_patch_size", "min_frames", "max_frames")}
    places: list[int] = processor.sample_frames(metadata, fps=rate, num_frames=count, **given).tolist()
    return places


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(
    "stated", [{}, {"fps": 1}, {"min_frames": 2, "max_frames": 12}, {"num_frames": 8}, {"fps": 4.0, "min_frames": 7}]
)
def test_places_are_those_of_the_reference(
    name: str, stated: dict[str, Any], references: dict[str, Any], tmp_path: Path
) -> None:
    random_, sampling = random.Random(name), sampling_of(tmp_path, name, **stated)
    for _ in range(300):
        frames = random_.choice((random_.randrange(8, 40), random_.randrange(8, 5000)))
        rate = random_.choice((1.0, 8.0, 10.0, 24.0, 25.0, 30.0, 30_000 / 1001, 60.0, random_.uniform(0.2, 240)))
        asked = None if "num_frames" in stated else random_.choice((None, None, 0.5, 1.0, 3.0))
        footage = Footage(frames, rate)
        places = expected(references[name], footage, asked, **stated)
        assert sampling.choose(footage, asked, MOST) == [place for place in places if place < frames]


@pytest.mark.parametrize("name", BOUNDS)
def test_short_videos_have_all_of_their_frames_and_long_ones_no_more_than_the_limit(
    name: str, references: dict[str, Any], tmp_path: Path
) -> None:
    sampling = sampling_of(tmp_path, name)
    for frames in range(2, 8):
        places = sampling.choose(Footage(frames, 30.0), None, MOST)
        assert places == expected(references[name], Footage(frames, 30.0), None)
        assert len(places) == min(4, frames if name == "qwen3-vl" else frames // 2 * 2)
    assert sampling.choose(Footage(1, 30.0), None, MOST) == [0]
    for most in (2, 5, 64):
        places = sampling.choose(Footage(9000, 30.0), None, most)
        assert len(places) == (most if name == "qwen3-vl" else most // 2 * 2)
        assert places == sorted(set(places))
        assert places == expected(references[name], Footage(9000, 30.0), None, max_frames=most)


@pytest.mark.parametrize("most", [2, 4096])
@pytest.mark.parametrize("reaches_end", [False, True])
def test_places_are_within_any_video(most: int, reaches_end: bool) -> None:
    random_ = random.Random(3)
    for _ in range(2000):
        count = random_.choice((None, None, 1, 2, 5, 64, 5000))
        sampling = FrameSampling(random_.uniform(0.001, 1000), 4, 768, count, 2, reaches_end)
        footage = Footage(random_.choice((1, 2, 3, 4, 5, 262_144)), 10 ** random_.uniform(-5, 9))
        places = sampling.choose(footage, None, most)
        assert 0 < len(places) <= most
        assert places == sorted(set(places))
        assert 0 <= places[0] <= places[-1] < footage.frames


def prepare(processor: ImageProcessor, file: bytes, rate: float | None = None, detail: Detail = Detail.AUTO,
            max_bytes: int | None = None) -> Any:  # fmt: skip
    """Return a file as the model takes it, and the places that were taken."""
    assert processor.video is not None
    with open_video(file, 10**7) as video:
        places = processor.video.sampling.choose(video.footage, rate, MOST)
        grid, values = processor.cut_frames(video.pictures(places), len(places), detail, max_bytes)
        times = FrameTimes.chosen(video.footage, places)
    return prepared_video(processor, grid, values.tobytes(), times), places


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("rate", [None, 5.0])
def test_a_file_is_prepared_as_its_frames_at_the_times_of_the_reference(
    name: str, rate: float | None, references: dict[str, Any], tmp_path: Path
) -> None:
    # Sides that stay as they are.
    processor, file = processor_of(tmp_path, name), clip_file(clip_pictures(32, 224, 224), rate=10)
    own, places = prepare(processor, file, rate)
    assert places == expected(references[name], Footage(32, 10.0), rate)
    frames = decoded(file)
    pictures = [Image.fromarray(frames[place]) for place in places]
    grid, values = processor.cut_frames(iter(pictures), len(pictures), Detail.AUTO)
    assert own.grid[:3] == grid
    assert np.array_equal(own.pixels.values.reshape(-1), values.reshape(-1))
    if name == "qwen3-vl":
        times = Qwen3VLProcessor._calculate_timestamps(None, list(places), 10.0, 2)
        step = f"{START}{PAD * (own.embeddings // grid[0])}{END}"
        assert own.before + own.text == "".join(f"<{time:.1f} seconds>{step}" for time in times)
        return
    metadata = VideoMetadata(total_num_frames=32, fps=10.0, frames_indices=places)
    seconds = torch.tensor([2 / metadata.sampled_fps])
    assert own.grid[3:] == tuple((torch.arange(grid[0]) * (2 * seconds[0])).long().tolist())


@pytest.mark.parametrize("name", BOUNDS)
def test_long_videos_are_resized_to_what_a_request_may_have(name: str, tmp_path: Path) -> None:
    processor = processor_of(tmp_path, name, size={"shortest_edge": 3136, "longest_edge": 10**9}, max_frames=20)
    file, most = clip_file(clip_pictures(40, 448, 448), rate=2), MAX_PIXEL_BYTES // 64
    whole, _ = prepare(processor, file, detail=Detail.HIGH)
    fitted, places = prepare(processor, file, max_bytes=most)
    assert whole.pixels.values.nbytes == 20 * 448 * 448 * 3
    assert most // 2 < fitted.pixels.values.nbytes <= most
    assert fitted.grid[1:] != whole.grid[1:]
    assert len(places) == 20
    assert prepare(processor, file, max_bytes=10**8)[0].digest == whole.digest


def test_a_key_is_of_pixels_and_not_of_the_file(tmp_path: Path) -> None:
    processor, pictures = processor_of(tmp_path, "qwen2.5-vl"), clip_pictures(40, 112, 112)
    mp4, matroska, other = (
        clip_file(pictures, "h264"),
        clip_file(pictures, "h264", container="matroska"),
        clip_file(pictures[::-1], "h264"),
    )
    first, rewritten, different = (prepare(processor, file)[0].digest for file in (mp4, matroska, other))
    assert first == rewritten != different
    assert prepare(processor, mp4, rate=1.0)[0].digest != first, "other times"
