"""Finds the processor of a model's images by its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigurationError
from common.tokenization.directory import read_json
from common.vision import PROCESSOR_FILES
from services.tokenizer.images.gemma import read_gemma
from services.tokenizer.images.idefics import read_idefics
from services.tokenizer.images.pixtral import read_pixtral
from services.tokenizer.images.qwen import read_qwen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from services.tokenizer.images.processor import ImageProcessor

# By `model_type`, as in `common/vision.py`.
READERS: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], str], ImageProcessor]]] = {
    "gemma3": read_gemma,
    "idefics3": read_idefics,
    "smolvlm": read_idefics,
    "qwen2_5_vl": read_qwen,
    "qwen3_vl": read_qwen,
    "mistral3": read_pixtral,
    "llava": read_pixtral,
}


# The settings of a processor of videos, if they are neither within the processor's own file nor those of images.
VIDEO_FILE: Final = "video_preprocessor_config.json"
# What a processor's own file says beside, or in place of, that of its part for images.
_OUTER: Final = ("patch_size", "spatial_merge_size", "image_break_token", "image_end_token", "image_seq_length")


def read_processor(directory: Path, placeholder: str = "") -> ImageProcessor:
    """Read the files of a model and of its processor; `placeholder` is the text of the token of each embedding.

    Raises:
        ConfigurationError: the model takes no images, or its processor is not supported.
    """
    config = read_json(directory / "config.json")
    reader = READERS.get(str(config.get("model_type")))
    if reader is None:
        raise ConfigurationError(f"{directory}: models of the type {config.get('model_type')!r} take no images here")
    outer, inner = (read_json(directory / name) for name in PROCESSOR_FILES)
    stated = dict(outer.get("image_processor") or inner)
    stated["video_processor"] = (
        outer.get("video_processor") or read_json(directory / VIDEO_FILE) or inner or dict(stated)
    )
    stated |= {name: outer[name] for name in _OUTER if outer.get(name) is not None}
    try:
        return reader(stated, config, placeholder)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{directory}: the settings of its image processor: {error!r}") from error
