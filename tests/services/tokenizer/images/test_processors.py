"""Pictures as models take them, number for number as the processors of `transformers` that use Pillow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from common.errors import ConfigurationError
from common.images import image_ids
from services.tokenizer.images.processor import Detail, RefusedImageError, prepared
from services.tokenizer.images.registry import read_processor
from tests.services.tokenizer.images.pictures import picture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from services.tokenizer.images.processor import ImageProcessor, PreparedImage

HALF = [0.5, 0.5, 0.5]
# Of models that are published: config.json, what differs from the defaults in the processor's file, and its class.
QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {}}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
SMOLVLM = {"model_type": "smolvlm", "vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 4}
IDEFICS3 = {"model_type": "idefics3", "vision_config": {"image_size": 46, "patch_size": 5}, "scale_factor": 3}
MISTRAL3 = {"model_type": "mistral3", "vision_config": {"patch_size": 14}, "spatial_merge_size": 2}
GEMMA3 = {"model_type": "gemma3", "vision_config": {"image_size": 56, "patch_size": 14}, "mm_tokens_per_image": 4}
LLAVA = {"model_type": "llava", "vision_config": {"patch_size": 16}}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "qwen2.5-vl": (QWEN25, {"min_pixels": 3136, "max_pixels": 200_000}, Qwen2VLImageProcessorPil),
    "qwen3-vl": (
        QWEN3,
        {
            "size": {"shortest_edge": 65536, "longest_edge": 300_000}, "patch_size": 16, "image_mean": HALF,
            "image_std": HALF, "resample": 3,
        },
        Qwen2VLImageProcessorPil,
    ),
    "smolvlm": (
        SMOLVLM, {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}, SmolVLMImageProcessorPil,
    ),
    "smolvlm-whole": (
        SMOLVLM,
        {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}, "do_image_splitting": False},
        SmolVLMImageProcessorPil,
    ),
    "idefics3": (
        IDEFICS3, {"size": {"longest_edge": 4 * 46}, "max_image_size": {"longest_edge": 46}, "resample": 1},
        Idefics3ImageProcessorPil,
    ),
    "mistral3": (MISTRAL3, {"size": {"longest_edge": 280}, "patch_size": 28}, PixtralImageProcessorPil),
    "llava": (LLAVA, {}, PixtralImageProcessorPil),
    "gemma3": (GEMMA3, {"size": {"height": 56, "width": 56}, "do_pan_and_scan": None}, Gemma3ImageProcessorPil),
    "gemma3-crops": (
        GEMMA3,
        {
            "size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 100,
            "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        Gemma3ImageProcessorPil,
    ),
}  # fmt: skip
SIZES = ((64, 64), (640, 427), (31, 200), (200, 31), (1, 1), (1000, 9), (333, 334), (28, 28), (1200, 300))


def processor_of(directory: Path, name: str, **changes: Any) -> ImageProcessor:
    config, stated, _ = MODELS[name]
    # Of Pixtral's processors, the patches are those of the model, and the squares are the processor's.
    stated = {key: value for key, value in stated.items() if config is not MISTRAL3 or key != "patch_size"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(stated | changes))
    return read_processor(directory, "<image>")


def prepare(processor: ImageProcessor, image: Any, detail: Detail = Detail.AUTO) -> PreparedImage:
    grid, values = processor.cut(image, detail)
    assert values.flags.c_contiguous, "a confined process writes its memory as it is"
    return prepared(processor, grid, values.tobytes())


def reference(name: str, image: Any) -> tuple[np.ndarray[Any, Any], tuple[int, ...] | None]:
    """Return the pixels of an image by `transformers`, and its grid if it states one."""
    _, stated, kind = MODELS[name]
    extra = {"return_row_col_info": True} if "Idefics" in kind.__name__ or "Smol" in kind.__name__ else {}
    made = kind(**stated)(images=image, return_tensors="np", **extra)
    pixels = np.asarray(made["pixel_values"])
    if "image_grid_thw" in made:
        return pixels, tuple(made["image_grid_thw"][0].tolist())
    if "num_crops" in made:
        return pixels, None
    if extra:
        return pixels[0], (made["rows"][0][0], made["cols"][0][0])
    return pixels[0], None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_the_reference(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    image = picture(*size, seed=3)
    try:
        pixels, grid = reference(name, image)
    except ValueError:
        with pytest.raises(RefusedImageError, match="too narrow"):
            prepare(processor_of(tmp_path, name), image)
        return
    own = prepare(processor_of(tmp_path, name), image)
    assert np.array_equal(own.pixels.unpacked(), pixels.astype(np.float32))
    assert grid is None or own.grid == grid
    assert own.text.count("<image>") == own.embeddings


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "mistral3", "llava", "smolvlm"])
def test_a_low_detail_costs_fewer_embeddings(name: str, tmp_path: Path) -> None:
    processor = processor_of(tmp_path, name, **({"max_pixels": 4_000_000} if "qwen" in name else {}))
    if "qwen" not in name and name != "smolvlm":
        processor = processor_of(tmp_path, name, size={"longest_edge": 1540})
    image = picture(1400, 1400)
    auto, high, low = (prepare(processor, image, detail) for detail in (Detail.AUTO, Detail.HIGH, Detail.LOW))
    assert auto.digest == high.digest != low.digest
    assert low.embeddings < auto.embeddings / 3


@pytest.mark.parametrize(
    "changes",
    [
        {"image_mean": [0.5, 0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0.5]},
        {"rescale_factor": 1 / 127.5},
        {"resample": 2},
        {"min_pixels": 6272},
        {"max_pixels": 199_999},
        {"max_pixels": 50_000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_takes_part_in_the_key_of_a_picture(changes: dict[str, Any], tmp_path: Path) -> None:
    """So pages that were computed with other settings are not hit, also where the values that are cut are equal."""
    image = picture(280, 196)
    first, again = (prepare(processor_of(tmp_path, "qwen2.5-vl"), image) for _ in range(2))
    other = prepare(processor_of(tmp_path, "qwen2.5-vl", **changes), image)
    assert first.digest == again.digest != other.digest
    ids, others = (image_ids(each.digest, each.embeddings) for each in (first, other))
    assert not np.isin(others, ids).any()


def test_a_low_detail_has_no_crops(tmp_path: Path) -> None:
    processor, image = processor_of(tmp_path, "gemma3-crops"), picture(1200, 300)
    auto, low = (prepare(processor, image, detail) for detail in (Detail.AUTO, Detail.LOW))
    assert (auto.grid, auto.embeddings, low.grid, low.embeddings) == ((1, 4), 20, (0, 0), 4)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen2.5-vl", {"patch_size": 16}, "patches of 16"),
        ("qwen2.5-vl", {"do_rescale": False}, "do_rescale = false"),
        ("smolvlm", {"max_image_size": {"longest_edge": 32}}, "tiles of 32 pixels"),
        ("smolvlm", {"size": {"height": 9, "width": 9}}, "is not supported"),
        ("mistral3", {"patch_size": 16}, "patches of 16"),
        ("llava", {"do_center_crop": True}, "do_center_crop"),
        ("llava", {"image_mean": [0.5]}, "3 numbers"),
        ("gemma3", {"size": {"height": 56, "width": 28}}, "56 x 56"),
        ("gemma3", {"image_seq_length": 256}, "256 embeddings of a picture, but the model has 4"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        processor_of(tmp_path, name, **changes)


def test_a_processor_s_own_file_takes_precedence(tmp_path: Path) -> None:
    processor_of(tmp_path, "mistral3")
    inner = {"size": {"longest_edge": 140}}
    outer = {"image_processor": inner, "patch_size": 14, "spatial_merge_size": 2, "image_end_token": "[DONE]"}
    (tmp_path / "processor_config.json").write_text(json.dumps(outer))
    own = prepare(read_processor(tmp_path, "<image>"), picture(280, 280))
    assert own.grid == (5, 5)
    assert own.text.endswith("<image>[DONE]")


def test_the_tokens_of_tiles_are_laid_out_as_in_training(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "smolvlm")
    # By the processor of `transformers`, which cannot be loaded without torchvision: rows end with line breaks, and an
    # empty line precedes the whole picture.
    tile = "<image>" * 4
    assert processor.plan((2, 1)).text == (
        f"<fake_token_around_image><row_1_col_1>{tile}\n<fake_token_around_image><row_2_col_1>{tile}\n\n"
        f"<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    )
    assert processor.plan((0, 0)).text == f"<fake_token_around_image><global-img>{tile}<fake_token_around_image>"
    for grid in ((1, 0), (-1, 2)):
        with pytest.raises(ValueError, match="a grid of"):
            processor.plan(grid)


def test_the_texts_of_pictures_and_their_crops_are_those_of_the_reference(tmp_path: Path) -> None:
    # What the reference's constructor makes of a tokenizer's tokens.
    made = object.__new__(Gemma3Processor)
    made.full_image_sequence = "\n\n<start_of_image>" + 4 * "<image>" + "<end_of_image>\n\n"
    processor = processor_of(tmp_path, "gemma3-crops")
    for grid in ((0, 0), (1, 2), (4, 1)):
        plan = processor.plan(grid)
        assert plan.before + plan.text + plan.after == made.replace_image_token({"num_crops": [grid[0] * grid[1]]}, 0)
        assert plan.text.startswith("<start_of_image>")
        assert plan.text.endswith("<end_of_image>")
