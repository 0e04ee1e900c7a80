"""Where images stand in prompts: their tokens in place of placeholders, and the ids that key them in the cache."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import InvalidRequestError
from common.images import image_ids, image_spans
from common.requests import ImageFile
from common.tokenization.vocabulary import byte_alphabet
from common.types import Subject, View
from services.tokenizer.images.pool import PreparedImages
from services.tokenizer.images.processor import Detail, prepared, prepared_video
from services.tokenizer.images.prompts import PreparedPrompts
from services.tokenizer.images.registry import read_processor
from services.tokenizer.images.sampling import FrameTimes
from tests.services.tokenizer.images.pictures import picture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from PIL.Image import Image

    from services.tokenizer.images.pool import ImagePool
    from services.tokenizer.images.processor import PreparedImage

ADA = Subject("acme", "ada")
VIDEO_MARK = "<|video_pad|>"
SMOLVLM_MARKS = ["<image>", "<fake_token_around_image>", "<global-img>"]
SMOLVLM_MARKS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "qwen": (
        {"model_type": "qwen2_5_vl", "vision_config": {}}, {"min_pixels": 784, "max_pixels": 20_000}, ["<|image_pad|>"],
    ),
    "qwen3": (
        {"model_type": "qwen3_vl", "vision_config": {}},
        {"min_pixels": 784, "max_pixels": 20_000, "patch_size": 16},
        ["<|image_pad|>", VIDEO_MARK, "<|vision_start|>", "<|vision_end|>"],
    ),
    "smolvlm": (
        {"model_type": "smolvlm", "vision_config": {"image_size": 32, "patch_size": 4}, "scale_factor": 2},
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}, SMOLVLM_MARKS,
    ),
    "pixtral": (
        {"model_type": "mistral3", "vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
        {"size": {"longest_edge": 200}}, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    ),
    "gemma": (
        {"model_type": "gemma3", "vision_config": {"image_size": 16}, "mm_tokens_per_image": 4},
        {
            "size": {"height": 16, "width": 16}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 30,
            "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 2,
        },
        ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    ),
}  # fmt: skip


class Pool:
    """Prepares pictures by their number, which is all that a file has."""

    def __init__(self, images: Sequence[PreparedImage]) -> None:
        self.images = images

    async def prepare(
        self, _subject: Subject, files: Sequence[ImageFile], _param: str, _most: int, _view: View | None
    ) -> PreparedImages:
        return PreparedImages([self.images[(file.data or file.frames[0])[0]] for file in files], are_kept=False)


class Bench:
    def __init__(self, directory: Path, name: str, *pictures: Image) -> None:
        config, stated, marks = MODELS[name]
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "preprocessor_config.json").write_text(json.dumps(stated))
        self.mark = marks[0]
        placeholder = "<image_soft_token>" if name == "gemma" else self.mark
        processor = read_processor(directory, placeholder)
        letters = {letter: byte for byte, letter in byte_alphabet().items()}
        # A text that ends so joins the one that precedes crops.
        self.tokenizer = Tokenizer(models.BPE(vocab={**letters, ":H": len(letters)}, merges=[(":", "H")]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        self.tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 8)])
        cut = [processor.cut(image, Detail.AUTO) for image in pictures]
        self.images = [prepared(processor, grid, values.tobytes()) for grid, values in cut]
        pool = cast("ImagePool", Pool(self.images))  # only `prepare` is called
        mark_id, placeholder_id = map(self.tokenizer.token_to_id, (self.mark, placeholder))
        assert mark_id is not None
        assert placeholder_id is not None
        video_mark = self.tokenizer.token_to_id(VIDEO_MARK)
        self.prompts = PreparedPrompts(pool, self.tokenizer, mark_id, placeholder_id, video_mark)
        self.processor = processor

    def ids(self, text: str) -> np.ndarray[Any, Any]:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def whole_text(image: PreparedImage) -> str:
    return image.before + image.text + image.after


@pytest.mark.parametrize("name", MODELS)
async def test_the_text_of_images_stands_in_place_of_placeholders(name: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, name, picture(90, 60, seed=1), picture(40, 100, seed=2), picture(20, 20, seed=3))
    text = "One {} and two{}\n{}. Which?"
    files = [ImageFile(bytes([number])) for number in range(3)]
    placed = await bench.prompts.place(ADA, bench.ids(text.format(*[bench.mark] * 3)), files, "messages")
    whole = bench.ids(text.format(*map(whole_text, bench.images)))
    assert np.array_equal(bench.prompts.shown(placed.token_ids), whole)
    # What the scheduler checks: the ids are those of the images, which begin there.
    spans = image_spans(placed.token_ids, placed.images)
    for image, source, (first, _) in zip(placed.images, bench.images, spans, strict=True):
        assert (image.digest, image.grid, image.pixels) == (source.digest, source.grid, source.pixels)
        assert (image.offset, image.length) == (first, source.embeddings)
        below = placed.token_ids[image.offset :]
        assert np.array_equal(below[below < 0][: image.length], image_ids(image.digest, image.length))


@pytest.mark.parametrize(("param", "words"), [("prompt", "2 placeholders"), ("messages", "places for 2 of 1 images")])
async def test_other_numbers_of_placeholders_are_refused(param: str, words: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, "qwen", picture(30, 30))
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await bench.prompts.place(ADA, bench.ids(f"{bench.mark} {bench.mark}"), [ImageFile(b"\0")], param)
    assert caught.value.param == param


async def test_a_video_with_times_stands_in_place_of_its_mark_and_the_marks_around_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "qwen3", picture(40, 60))
    grid, values = bench.processor.cut_frames((picture(64, 64, seed=i) for i in range(4)), 4, Detail.AUTO)
    bench.images.append(prepared_video(bench.processor, grid, values.tobytes(), FrameTimes.even(4, 1.0)))
    video, still = ImageFile(b"", frames=(b"\1",)), ImageFile(b"\0")
    image_mark, video_mark = (f"<|vision_start|>{mark}<|vision_end|>" for mark in (bench.mark, VIDEO_MARK))
    # Videos come after images at /generate, whatever their order in the text.
    asked = bench.ids(f"a: {video_mark}{image_mark} b {VIDEO_MARK} c")
    placed = await bench.prompts.place(ADA, asked, [still, video, video], "prompt")
    image, clip = map(whole_text, bench.images)
    assert clip.startswith("<0.5 seconds><|vision_start|>")
    assert "<|vision_end|><2.5 seconds><|vision_start|>" in clip
    whole = bench.ids(f"a: {clip}<|vision_start|>{image}<|vision_end|> b {clip} c")
    assert np.array_equal(bench.prompts.shown(placed.token_ids), whole)
    assert [each.digest == bench.images[1].digest for each in placed.images] == [True, False, True]
    assert len(image_spans(placed.token_ids, placed.images)) == 3
    for number, files in ((2, [video, video]), (0, [])):
        with pytest.raises(InvalidRequestError, match=rf"1 placeholders <\|video_pad\|> for {number} videos"):
            await bench.prompts.place(ADA, bench.ids(video_mark), files, "prompt")


async def test_marks_that_stand_around_the_placeholder_of_a_picture_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "smolvlm", picture(20, 20))
    around = "<fake_token_around_image>"
    assert whole_text(bench.images[0]).startswith(around)
    asked = bench.ids(f"a{around}{bench.mark}{around}b")
    placed = await bench.prompts.place(ADA, asked, [ImageFile(b"\0")], "prompt")
    whole = bench.ids(f"a{around}{whole_text(bench.images[0])}{around}b")
    assert np.array_equal(bench.prompts.shown(placed.token_ids), whole)


@pytest.mark.parametrize("text", ["{}{}", "\n{}\n\n{}\n", "See:{} and :{}:", "\n\n\n", "a\n{}:", "{}"])
@pytest.mark.parametrize("sides", [(20, 20), (40, 120), (200, 30)])
async def test_texts_beside_images_are_encoded_with_them(text: str, sides: tuple[int, int], tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gemma", picture(*sides, seed=1))
    count = text.count("{}")
    files = [ImageFile(b"\0")] * count
    placed = await bench.prompts.place(ADA, bench.ids(text.replace("{}", bench.mark)), files, "messages")
    whole = bench.ids(text.replace("{}", whole_text(bench.images[0])))
    assert np.array_equal(bench.prompts.shown(placed.token_ids), whole)
    assert len(image_spans(placed.token_ids, placed.images)) == count


async def test_names_of_special_tokens_in_texts_beside_images_stay_text(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gemma", picture(20, 20))
    # As a user's text is encoded that has such a name in it.
    name = np.array(list(bench.mark.encode()), np.int32)
    ids = np.concatenate([bench.ids("\n"), name, bench.ids(f"\n{bench.mark}"), name])
    placed = await bench.prompts.place(ADA, ids, [ImageFile(b"\0")], "messages")
    shown = bench.prompts.shown(placed.token_ids)
    image = bench.ids(bench.images[0].text)
    whole = [bench.ids("\n"), name, bench.ids("\n\n\n"), image, bench.ids("\n\n"), name]
    assert np.array_equal(shown, np.concatenate(whole))


async def test_ids_that_are_not_those_of_their_text_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "gemma", picture(20, 20))
    own = np.concatenate([bench.ids(":"), bench.ids("H")])
    placed = await bench.prompts.place(ADA, np.concatenate([own, bench.ids(bench.mark)]), [ImageFile(b"\0")], "prompt")
    assert np.array_equal(placed.token_ids[:2], own)
    assert bench.tokenizer.id_to_token(int(placed.token_ids[2])) == "\n\n"
