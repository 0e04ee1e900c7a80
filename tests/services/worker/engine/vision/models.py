"""Tiny models that see images, as `transformers` writes them, and what it makes of prompts with images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import pad

from common.images import runs_of
from common.types import RowImage

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 131
PLACEHOLDER = 130
VIDEO_PLACEHOLDER = 129
# By default of `transformers`.
TOKENS_PER_SECOND = 4
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights, so that attention is sharp and logits are far apart.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3,
}  # fmt: skip
_PIXTRAL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4,
    "image_size": 64, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": {"model_type": "llama", **_TEXT, "head_dim": 16},
            "vision_config": {**_SIGLIP, "image_size": 32, "patch_size": 4},
            "scale_factor": 2,
            "image_token_id": PLACEHOLDER,
        },
    ),
    # Of a side that is no power of two, nor a multiple of the patches' side, as SmolVLM-2.2B.
    "idefics3": (
        "Idefics3",
        {
            "text_config": {"model_type": "llama", **_TEXT, "head_dim": 16, "tie_word_embeddings": True},
            "vision_config": {**_SIGLIP, "image_size": 46, "patch_size": 5},
            "scale_factor": 3,
            "image_token_id": PLACEHOLDER,
            "tie_word_embeddings": True,
        },
    ),
    # Windows of 2 x 2 squares of 2 x 2 patches.
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 3, 2]},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "depth": 3,
                "num_heads": 4,
                "out_hidden_size": 48,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "initializer_range": 0.3,
            },
            "image_token_id": PLACEHOLDER,
            "video_token_id": 129,
            "vision_start_token_id": 128,
            "vision_end_token_id": 127,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "depth": 3,
                "num_heads": 4,
                "out_hidden_size": 48,
                "patch_size": 4,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [0, 2],
                "initializer_range": 0.3,
            },
            "image_token_id": PLACEHOLDER,
            "video_token_id": 129,
            "vision_start_token_id": 128,
            "vision_end_token_id": 127,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **_PIXTRAL, "hidden_act": "silu"},
            "spatial_merge_size": 2,
            "image_token_id": PLACEHOLDER,
            "tie_word_embeddings": False,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16, "sliding_window": 40},
            "vision_config": {"model_type": "pixtral", **_PIXTRAL},
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
            "image_token_id": PLACEHOLDER,
        },
    ),
    # Windows are shorter than a picture's run of tokens, and of a length that is no multiple of pages.
    "gemma3": (
        "Gemma3",
        {
            "text_config": {
                **_TEXT, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 13, "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window_pattern": 2,
            },
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 46, "patch_size": 5},
            "mm_tokens_per_image": 9,
            "image_token_index": PLACEHOLDER,
        },
    ),
}  # fmt: skip
# Those whose images are cut into tiles, which have many embeddings each.
TILED = ("smolvlm", "idefics3", "gemma3")
# Those whose images are patches of any number of rows and columns, with positions on three axes.
BY_PATCHES = ("qwen2.5-vl", "qwen3-vl")


@dataclass(frozen=True)
class Picture:
    """An image as its processor would leave it; `ids` stand in the prompt for it, below 0 where embeddings belong."""

    ids: tuple[int, ...]
    pixels: np.ndarray[Any, np.dtype[np.float32]]
    grid: tuple[int, ...]
    is_in_blocks: bool = False
    """Whether neighbours among its tokens see each other."""

    @property
    def length(self) -> int:
        return sum(token < 0 for token in self.ids)


@dataclass(frozen=True)
class Prompt:
    """Ids, below 0 at the places of embeddings, and the images that these are of."""

    ids: tuple[int, ...]
    images: tuple[RowImage, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    """Tokens [start, stop) that chunks must not cut."""

    def border(self, end: int) -> int:
        """Return where a chunk ends that would end at `end` if it might cut everything."""
        return next((start for start, stop in self.blocks if start < end < stop), min(end, len(self.ids)))


def picture(family: str, rows: int, columns: int, seed: int) -> Picture:
    """Return a random image of so many rows and columns, of tiles or of squares of patches, as `family` cuts it."""
    random = np.random.default_rng(seed)
    _, options = MODELS[family]
    vision = options["vision_config"]
    if family in BY_PATCHES:
        # One frame, twice, in squares of four patches.
        patches, numbers = 4 * rows * columns, 3 * 2 * vision["patch_size"] ** 2
        pixels = random.normal(size=(patches, numbers)).astype(np.float32)
        return Picture((128, *(-1 - seed for _ in range(rows * columns)), 127), pixels, (1, 2 * rows, 2 * columns))
    if vision.get("model_type") == "pixtral":
        side = vision["patch_size"] * options.get("spatial_merge_size", 1)
        pixels = random.normal(size=(3, rows * side, columns * side)).astype(np.float32)
        # A mark ends each row.
        return Picture(
            (-1 - seed,) * columns + ((5,) + (-1 - seed,) * columns) * (rows - 1) + (6,), pixels, (rows, columns)
        )
    side = vision["image_size"]
    per_tile = options.get("mm_tokens_per_image") or (side // vision["patch_size"] // options["scale_factor"]) ** 2
    pixels = random.normal(size=(rows * columns + 1, 3, side, side)).astype(np.float32)
    ids: list[int] = []
    for tile in range(rows * columns + 1):
        # Marks of rows and columns stand between tiles.
        ids += [3 + tile % 5, *(-1 - seed for _ in range(per_tile))]
    return Picture((*ids, 9), pixels, (rows, columns), is_in_blocks="mm_tokens_per_image" in options)


def video(family: str, steps: int, rows: int, columns: int, seed: int, interval: float = 1.0) -> Picture:
    """Return a random video of so many steps in time, each of rows and columns of squares.

    `interval` is the distance between the coordinates of steps in Qwen2.5-VL; in Qwen3-VL texts stand between steps.
    """
    random = np.random.default_rng(seed)
    _, options = MODELS[family]
    patches, numbers = 4 * steps * rows * columns, 3 * 2 * options["vision_config"]["patch_size"] ** 2
    pixels = random.normal(size=(patches, numbers)).astype(np.float32)
    step = (-1 - seed,) * (rows * columns)
    grid = steps, 2 * rows, 2 * columns
    if family == "qwen2.5-vl":
        times = (int(np.float32(i) * np.float32(interval)) for i in range(steps))
        return Picture((128, *step * steps, 127), pixels, (*grid, *times))
    return Picture(sum(((7 + i, 8, 128, *step, 127) for i in range(steps)), ()), pixels, grid)


def prompt(*parts: list[int] | Picture) -> Prompt:
    """Return a prompt of texts and images."""
    ids: list[int] = []
    images = []
    blocks: list[tuple[int, int]] = []
    for part in parts:
        if isinstance(part, Picture):
            if part.is_in_blocks:
                places = len(ids) + np.flatnonzero(np.array(part.ids) < 0)
                blocks += runs_of(places)
            first = next(i for i, token in enumerate(part.ids) if token < 0)
            digest = part.pixels.tobytes()[:32]
            images.append(RowImage(digest, len(ids) + first, part.length, part.grid, part.pixels))
            ids += part.ids
        else:
            ids += part
    return Prompt(tuple(ids), tuple(images), tuple(blocks))


def save(directory: Path, family: str, vocabulary: int = VOCABULARY, **changes: int) -> Path:
    """Write a tiny model to `directory`, which is returned; `changes` are token ids in its config.json."""
    name, options = MODELS[family]
    text = {**options["text_config"], "vocab_size": vocabulary}
    return save_as(directory, name, {**options, "text_config": text, **changes})


def save_wide(directory: Path, family: str) -> Path:
    """Write a model whose heads are as wide as kernels of GPUs take them to `directory`, which is returned."""
    name, options = MODELS[family]
    sections = {"qwen2.5-vl": [8, 12, 12], "qwen3-vl": [12, 10, 10]}
    wide: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.08}
    if family in sections:
        wide["rope_parameters"] = options["text_config"]["rope_parameters"] | {"mrope_section": sections[family]}
    vision = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.08}
    if family in sections:
        vision |= {"num_heads": 2, "out_hidden_size": 256}
    parts = {"text_config": options["text_config"] | wide, "vision_config": options["vision_config"] | vision}
    return save_as(directory, name, {**options, **parts})


def save_as(directory: Path, name: str, options: dict[str, Any]) -> Path:
    """Write a model of the class `name` of `transformers` to `directory`, which is returned."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norm weights start out as zeros and ones, and Gemma's projection of images as zeros.
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return directory


@cache
def _oracle(directory: Path) -> Any:  # transformers is not typed
    import transformers

    oracle = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    # Nothing ends an answer, and no token is excluded from it.
    oracle.generation_config.eos_token_id = None
    return oracle


def expected(
    directory: Path,
    prompt: Prompt,
    tokens: int,
    placeholder: int = PLACEHOLDER,
    video_placeholder: int = VIDEO_PLACEHOLDER,
    interval: float = 1.0,
) -> tuple[list[int], torch.Tensor]:
    """Return the tokens with which `transformers` continues a prompt, greedily, and their logits [tokens, vocabulary].

    It gets the whole prompt at once. Images of several steps in time are videos; `interval` as in `video`.
    """
    known = np.array(prompt.ids)
    below = np.flatnonzero(known < 0)
    for image in prompt.images:
        places, below = below[: image.length], below[image.length :]
        known[places] = video_placeholder if is_video(image) else placeholder
    ids = torch.from_numpy(known)[None]
    with torch.inference_mode():
        oracle = _oracle(directory)
        videos = [image for image in prompt.images if is_video(image)]
        pictures = Prompt(prompt.ids, tuple(image for image in prompt.images if not is_video(image)))
        inputs = _inputs(oracle, ids, pictures, placeholder)
        if videos:
            inputs |= {
                "pixel_values_videos": torch.cat([torch.from_numpy(each.pixels) for each in videos]),
                "video_grid_thw": torch.tensor([each.grid[:3] for each in videos]),
                "mm_token_type_ids": (ids == placeholder).int() + 2 * (ids == video_placeholder).int(),
            }
        if videos and oracle.config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = torch.tensor([interval / TOKENS_PER_SECOND] * len(videos))
        made = oracle.generate(
            ids, **inputs, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    return made.sequences[0, ids.shape[1] :].tolist(), torch.cat(made.logits)


def is_video(image: RowImage) -> bool:
    """Whether an image of Qwen's models has several steps in time."""
    return len(image.grid) > 2 and image.grid[0] > 1


def _inputs(oracle: Any, ids: torch.Tensor, prompt: Prompt, placeholder: int) -> dict[str, torch.Tensor]:
    """Return what `transformers` takes beside ids: images as one tensor, and how it is divided."""
    if not prompt.images:
        return {}
    each = [torch.from_numpy(image.pixels) for image in prompt.images]
    if each[0].ndim == 3:
        height, width = (max(pixels.shape[axis] for pixels in each) for axis in (1, 2))
        padded = [pad(pixels, (0, width - pixels.shape[2], 0, height - pixels.shape[1])) for pixels in each]
        sizes = torch.tensor([tuple(pixels.shape[1:]) for pixels in each])
        return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
    pixels = torch.cat(each)
    if oracle.config.model_type == "gemma3":
        return {"pixel_values": pixels, "token_type_ids": (ids == placeholder).int()}
    if pixels.ndim == 4:
        return {"pixel_values": pixels[None]}
    grids = torch.tensor([image.grid for image in prompt.images])
    return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == placeholder).int()}
