"""Videos as models take them, number for number as the processors of `transformers`, but for the filter that resizes.

These resize by torch, whose integers are rounded otherwise than Pillow's: frames of sides that stay are equal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL.Image import new as new_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_of_frames

from services.tokenizer.images.processor import Detail, RefusedImageError, prepared, prepared_video
from services.tokenizer.images.registry import read_processor
from services.tokenizer.images.sampling import FrameTimes
from tests.services.tokenizer.images.pictures import picture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from PIL.Image import Image

    from services.tokenizer.images.processor import ImageProcessor, PreparedImage

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 2}}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
# The fewest and the most pixels: of a frame of Qwen2.5-VL, and of all frames of Qwen3-VL.
BOUNDS = {"qwen2.5-vl": (28 * 28 * 4, 28 * 28 * 40), "qwen3-vl": (32 * 32 * 16, 32 * 32 * 160)}
SIZES = ((112, 56), (640, 427), (31, 200), (1200, 300), (20, 28))


def processor_of(directory: Path, name: str, **video: Any) -> ImageProcessor:
    least, most = BOUNDS[name]
    own = {"size": {"shortest_edge": least, "longest_edge": most}, "patch_size": 14 if name == "qwen2.5-vl" else 16}
    (directory / "config.json").write_text(json.dumps(QWEN25 if name == "qwen2.5-vl" else QWEN3))
    (directory / "preprocessor_config.json").write_text(json.dumps({"patch_size": own["patch_size"]}))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(own | video))
    return read_processor(directory, PAD)


def clip(count: int, width: int, height: int) -> list[Image]:
    return [picture(width, height, seed=number) for number in range(count)]


def prepare(
    processor: ImageProcessor, frames: list[Image], rate: float | None = None, detail: Detail = Detail.AUTO
) -> PreparedImage:
    grid, values = processor.cut_frames(iter(frames), len(frames), detail)
    assert values.flags.c_contiguous, "a confined process writes its memory as it is"
    assert processor.video is not None
    times = FrameTimes.even(len(frames), rate or processor.video.sampling.rate)
    return prepared_video(processor, grid, values.tobytes(), times)


def sides_of(name: str, count: int, width: int, height: int) -> Any:  # transformers is not typed
    """Return the sides of frames by `transformers`."""
    least, most = BOUNDS[name]
    if name == "qwen2.5-vl":
        return smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
    return smart_resize_of_frames(count, height, width, 2, 32, min_pixels=least, max_pixels=most)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("size", SIZES)
def test_frames_have_the_sides_and_the_patches_of_the_reference(
    name: str, count: int, size: tuple[int, int], tmp_path: Path
) -> None:
    processor, frames = processor_of(tmp_path, name), clip(count, *size)
    assert processor.video is not None
    own, patch = prepare(processor, frames), 14 if name == "qwen2.5-vl" else 16
    height, width = sides_of(name, count, *size)
    grid = -(-count // 2), height // patch, width // patch
    assert own.grid[:3] == grid
    assert own.embeddings == own.text.count(PAD) == grid[0] * grid[1] * grid[2] // 4
    # As pictures of those sides, each of which is in both halves of its patches.
    scale = {} if name == "qwen2.5-vl" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    still = Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=1, max_pixels=10**8, **scale)
    patches = own.pixels.unpacked().reshape(grid[0], -1, 3, 2, patch * patch)
    for number in range(2 * grid[0]):
        frame = processor.video.scaling.resize(frames[min(number, count - 1)], height, width)
        pixels = np.asarray(still(images=frame, return_tensors="np")["pixel_values"], np.float32)
        halves = pixels.reshape(-1, 3, 2, patch * patch)
        assert np.array_equal(patches[number // 2, :, :, number % 2], halves[:, :, 0])


def test_frames_are_resized_as_torch_does_but_for_one_step_of_256(tmp_path: Path) -> None:
    scaling = processor_of(tmp_path, "qwen3-vl").video.scaling  # type: ignore[union-attr]  # it takes videos
    frame = picture(640, 427, seed=1)
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None]
    # As torchvision's `resize` does with whole numbers on CPUs.
    torchs = torch.nn.functional.interpolate(pixels, size=(224, 320), mode="bicubic", antialias=True)
    own = np.asarray(scaling.resize(frame, 224, 320)).transpose(2, 0, 1)
    assert np.abs(own.astype(int) - torchs[0].numpy().astype(int)).max() <= 1


@pytest.mark.parametrize(("count", "rate"), [(2, None), (5, 4.0), (6, 0.7), (7, 29.97)])
def test_times_are_those_of_the_reference(count: int, rate: float | None, tmp_path: Path) -> None:
    frames = clip(count, 112, 56)
    own = prepare(processor_of(tmp_path, "qwen3-vl"), frames, rate)
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), rate or 2, 2)
    step = f"{START}{PAD * (own.embeddings // own.grid[0])}{END}"
    assert own.before + own.text == "".join(f"<{time:.1f} seconds>{step}" for time in times)
    assert len(own.grid) == 3
    timed = prepare(processor_of(tmp_path, "qwen2.5-vl"), frames, rate)
    seconds = torch.tensor([2 / (rate or 2)])
    assert timed.grid[3:] == tuple((torch.arange(timed.grid[0]) * (2 * seconds[0])).long().tolist())
    assert (timed.before, timed.text.replace(PAD, "")) == ("", "")


def test_a_key_depends_on_frames_their_order_and_the_rate(tmp_path: Path) -> None:
    processor, frames = processor_of(tmp_path, "qwen2.5-vl"), clip(4, 112, 56)
    keys = [
        prepare(processor, frames).digest,
        prepare(processor, frames[::-1]).digest,
        prepare(processor, frames, rate=1).digest,
        prepare(processor, frames[:3]).digest,
        prepare(processor_of(tmp_path, "qwen2.5-vl", image_mean=[0.5] * 3), frames).digest,
    ]
    assert len(set(keys)) == len(keys)
    assert prepare(processor, frames, rate=2).digest == keys[0], "the rate that the processor samples at"


@pytest.mark.parametrize("name", BOUNDS)
def test_no_video_has_the_key_of_a_picture(name: str, tmp_path: Path) -> None:
    processor, frame = processor_of(tmp_path, name), picture(112, 64)
    grid, values = processor.cut(frame, Detail.AUTO)
    keys = [prepared(processor, grid, values.tobytes()).digest]
    keys += [prepare(processor, [frame] * count).digest for count in (2, 4)]
    assert len(set(keys)) == len(keys)


def test_times_within_the_text_take_no_part_in_a_key(tmp_path: Path) -> None:
    processor, frames = processor_of(tmp_path, "qwen3-vl"), clip(4, 112, 64)
    slow, fast = (prepare(processor, frames, rate) for rate in (1, 4))
    assert slow.digest == fast.digest, "the same embeddings"
    assert slow.before != fast.before, "in another context, which is other tokens in the cache"


def test_a_low_detail_costs_fewer_embeddings(tmp_path: Path) -> None:
    for name in BOUNDS:
        processor = processor_of(tmp_path, name, size={"shortest_edge": 3136, "longest_edge": 10**8})
        auto, low = (prepare(processor, clip(2, 1400, 1400), detail=detail) for detail in (Detail.AUTO, Detail.LOW))
        assert low.embeddings < auto.embeddings / 3


def test_settings_are_found_where_transformers_looks(tmp_path: Path) -> None:
    processor_of(tmp_path, "qwen3-vl", fps=8)
    inner = {"video_processor": {"fps": 4, "patch_size": 16}}

    def rate() -> float:
        found = read_processor(tmp_path, PAD).video
        assert found is not None
        return found.sampling.rate

    assert rate() == 8
    (tmp_path / "processor_config.json").write_text(json.dumps(inner | {"image_processor": {"patch_size": 16}}))
    assert rate() == 4
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "video_preprocessor_config.json").unlink()
    assert rate() == 2


@pytest.mark.parametrize("name", BOUNDS)
def test_videos_that_models_cannot_take_are_refused(name: str, tmp_path: Path) -> None:
    processor = processor_of(tmp_path, name)
    with pytest.raises(RefusedImageError, match="fewer than 2 frames"):
        prepare(processor, clip(1, 56, 56))
    with pytest.raises(RefusedImageError, match="different sizes"):
        prepare(processor, [*clip(1, 56, 56), *clip(1, 56, 60)])
    with pytest.raises(RefusedImageError, match="too narrow"):
        prepare(processor, clip(2, 9000, 28))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_video_that_takes_too_many_bytes_is_refused_at_its_first_frame(name: str, tmp_path: Path) -> None:
    processor = processor_of(tmp_path, name, size={"shortest_edge": 3136, "longest_edge": 10**8})
    taken = []

    def frames() -> Iterator[Image]:
        for number in range(100):
            taken.append(number)
            yield new_image("RGB", (640, 640))

    with pytest.raises(RefusedImageError, match=r"takes \d+ bytes at the model's resolution, and 50331648 are allowed"):
        processor.cut_frames(frames(), 100, Detail.AUTO)
    assert taken == [0]


def test_answers_that_are_no_such_video_are_errors(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "qwen3-vl")
    grid, values = processor.cut_frames(iter(clip(4, 64, 64)), 4, Detail.AUTO)
    assert grid[0] == 2
    for count, changed in ((2, grid), (8, grid), (4, (1, *grid[1:])), (4, grid[1:])):
        with pytest.raises(ValueError, match=r"grid|unpack|reshape"):
            prepared_video(processor, changed, values.tobytes(), FrameTimes.even(count, 2))
    with pytest.raises(ValueError, match="a grid of"):
        prepared(processor, grid, values.tobytes())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "smolvlm", "vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 4})
    )
    stated = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    seeing = read_processor(tmp_path, PAD)
    with pytest.raises(RefusedImageError, match="the model takes none"):
        seeing.cut_frames(iter(clip(2, 64, 64)), 2, Detail.AUTO)
    with pytest.raises(ValueError, match="takes none"):
        prepared_video(seeing, grid, values.tobytes(), FrameTimes.even(4, 2))
