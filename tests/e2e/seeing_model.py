"""A tiny model of the family Qwen2.5-VL with random weights, as published ones are laid out, and what it answers."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from common.tokenization.vocabulary import byte_alphabet
from common.types import RowImage
from tests.services.tokenizer.images.pictures import file_of
from tests.services.worker.engine.vision.models import Prompt, expected, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from PIL.Image import Image

MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_MARK = 256
START, END, PAD, VIDEO_PAD = (FIRST_MARK + i for i in (2, 3, 4, 5))
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_seeing_model(directory: Path) -> Path:
    """Write the model, its tokenizer of bytes, its chat template and its processor to `directory`."""
    save(
        directory, "qwen2.5-vl", FIRST_MARK + len(MARKS), image_token_id=PAD, video_token_id=VIDEO_PAD,
        vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in byte_alphabet().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


def prompt_of(*parts: str | Image) -> Prompt:
    """Return the prompt that the processor of `transformers` makes of texts and pictures within marks."""
    tokenizer, ids, images = _tokenizer(), [], []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special_tokens=False).ids
            continue
        made = Qwen2VLImageProcessorPil(**PROCESSOR)(images=part, return_tensors="np")
        grid = tuple(made["image_grid_thw"][0].tolist())
        length = grid[1] * grid[2] // PROCESSOR["merge_size"] ** 2
        images.append(RowImage(b"", len(ids), length, grid, made["pixel_values"].astype(np.float32)))
        ids += [-1] * length
    return Prompt(tuple(ids), tuple(images))


def chat_prompt(*parts: str | Image) -> Prompt:
    """Return the prompt of a conversation with one message of texts and pictures."""
    marked: list[str | Image] = ["<|im_start|>user\n"]
    for part in parts:
        marked += [part] if isinstance(part, str) else ["<|vision_start|>", part, "<|vision_end|>"]
    return prompt_of(*marked, "<|im_end|>\n<|im_start|>assistant\n")


def video_prompt(before: str, frames: Sequence[Image], interval: int) -> Prompt:
    """Return the prompt of a conversation with one message of a text and a video of an even number of frames.

    `interval` is the distance between the coordinates of its steps in time.
    """
    stills = [chat_prompt(before, frame).images[0] for frame in frames]
    single = chat_prompt(before, frames[0])
    (_, rows, columns), steps = stills[0].grid, len(frames) // 2
    # Of a picture, both halves of a patch are equal.
    numbers = [still.pixels for still in stills if isinstance(still.pixels, np.ndarray)]
    halves = np.stack([each.reshape(-1, 3, 2, PROCESSOR["patch_size"] ** 2)[:, :, 0] for each in numbers])
    pixels = np.stack([halves[0::2], halves[1::2]], axis=3).reshape(steps * rows * columns, -1)
    first, length = stills[0].offset, steps * stills[0].length
    ids = (*single.ids[:first], *[-1] * length, *single.ids[first + stills[0].length :])
    times = (step * interval for step in range(steps))
    return Prompt(ids, (RowImage(b"", first, length, (steps, rows, columns, *times), pixels),))


def continued(directory: Path, prompt: Prompt, tokens: int, interval: float = 1.0) -> list[int]:
    """Return the tokens with which `transformers` continues a prompt, greedily; `interval` as in `video_prompt`."""
    return expected(directory, prompt, tokens, PAD, VIDEO_PAD, interval)[0]


def content_of(*parts: str | Image | bytes | dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a chat's message with texts, pictures, files that may be none, and parts as they are."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else part
        if isinstance(part, dict)
        else image_part(part)
        for part in parts
    ]


def video_part(frames: Sequence[Image], rate: float) -> dict[str, Any]:
    """Return the part of a message that has a video as a data URL of its frames."""
    coded = ",".join(base64.b64encode(file_of(frame)).decode() for frame in frames)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{coded}", "fps": rate}}


def video_file_part(file: bytes, media_type: str, **fields: float) -> dict[str, Any]:
    """Return the part of a message that has the file of a video as a data URL."""
    url = f"data:{media_type};base64,{base64.b64encode(file).decode()}"
    return {"type": "video_url", "video_url": {"url": url, **fields}}


def image_part(picture: Image | bytes) -> dict[str, Any]:
    """Return the part of a message that has an image as a data URL."""
    data = picture if isinstance(picture, bytes) else file_of(picture)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
