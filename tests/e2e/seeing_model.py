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
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
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


def continued(directory: Path, prompt: Prompt, tokens: int) -> list[int]:
    """Return the tokens with which `transformers` continues a prompt, greedily."""
    return expected(directory, prompt, tokens, PAD)[0]


def content_of(*parts: str | Image | bytes) -> list[dict[str, Any]]:
    """Return the content of a chat's message with texts, pictures, and files that may be none."""
    return [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in parts]


def image_part(picture: Image | bytes) -> dict[str, Any]:
    """Return the part of a message that has an image as a data URL."""
    data = picture if isinstance(picture, bytes) else file_of(picture)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
