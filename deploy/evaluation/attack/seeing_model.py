"""Models that see images, to be served with random weights, and a tiny one of them: none with vision is bundled."""

from __future__ import annotations

import json
import string
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from common.tokenization.vocabulary import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "tiny-qwen2.5-vl"
_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_BYTES = 256
_PATCH, _MERGE = 14, 2
_TEXT_WIDTH = 64
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_seeing_model(directory: Path) -> None:
    """Write its config.json, its tokenizer of bytes, its chat template and its processor's settings.

    The encoder is large beside the decoder, so that time shows whether a picture was encoded.
    """
    ids = {mark: _BYTES + number for number, mark in enumerate(_MARKS)}
    _write(directory, "config.json", _config(ids))
    _save_processor(directory, ids, (4 * 28 * 28, 64 * 28 * 28))


def save_shape(shape: Mapping[str, Any], directory: Path) -> None:
    """Write the config.json `shape` of a model like Qwen2.5-VL, and what it needs beside it: see `save_seeing_model`.

    Each token has a text, but for those after the last special one: its own byte, or three letters that texts are never
    encoded to. Bounds of pictures are those of the published models.

    Raises:
        KeyError: the config.json does not name the special tokens.
    """
    names = ("bos", "eos", "vision_start", "vision_end", "image", "video")
    ids = {mark: int(shape[f"{name}_token_id"]) for mark, name in zip(_MARKS, names, strict=True)}
    _write(directory, "config.json", dict(shape))
    _save_processor(directory, ids, (4 * 28 * 28, 16384 * 28 * 28))


def _save_processor(directory: Path, ids: Mapping[str, int], pixels: tuple[int, int]) -> None:
    """Write the tokenizer, the chat template and the processor's settings; `pixels` are its bounds of pictures."""
    _write(directory, "tokenizer.json", _tokenizer(ids))
    _write(directory, "tokenizer_config.json", {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>"})
    _write(
        directory,
        "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": _PATCH,
            "merge_size": _MERGE,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        },
    )


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": _BYTES + len(_MARKS),
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "bos_token_id": ids["<|im_start|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "depth": 8,
            "num_heads": 6,
            "out_hidden_size": _TEXT_WIDTH,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [3, 7],
            "hidden_act": "silu",
        },
    }


def _tokenizer(ids: Mapping[str, int]) -> dict[str, Any]:
    free = [number for number in range(_BYTES, max(ids.values())) if number not in ids.values()]
    words = ("".join(letters) for letters in product(string.ascii_letters + string.digits, repeat=3))
    fillers = dict(zip(islice(words, len(free)), free, strict=True))
    added = [
        {
            "id": number,
            "content": mark,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for mark, number in ids.items()
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in byte_alphabet().items()} | fillers | dict(ids),
            "merges": [],
        },
    }


def _write(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")
