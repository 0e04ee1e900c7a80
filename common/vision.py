"""Whether a model's images are served: by its files, and the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from common.errors import ConfigurationError
from common.heads import read_head
from common.models import ModelKind, resolve_model
from common.tokenization.directory import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from common.settings import Settings

# `model_type` of config.json, and of the encoder within it where there are several that go with a family.
SEEING_FAMILIES: Final = {
    "gemma3": "siglip_vision_model", "idefics3": None, "smolvlm": None, "qwen2_5_vl": None, "qwen3_vl": None,
    "mistral3": "pixtral", "llava": "pixtral",
}  # fmt: skip
# Those that take videos, too, and the token of a video where config.json leaves it out.
VIDEO_FAMILIES: Final = ("qwen2_5_vl", "qwen3_vl")
QWEN_VIDEO_ID: Final = 151_656
# Files of `transformers` with the settings of a model's processor.
PROCESSOR_FILES: Final = ("processor_config.json", "preprocessor_config.json")


def seeing_model(settings: Settings) -> Path | None:
    """Return the directory of the model if it is served with images; None: with texts only.

    Raises:
        ConfigurationError: model.images is "on", and the model or another setting prevents it.
    """
    model = settings.model
    if model.images == "off" or model.load_format in ("fake", "gguf"):
        return None
    files = resolve_model(model.reference, weights=False)
    problem = (
        "GGUF files have no encoder of images"
        if files.kind is not ModelKind.DIRECTORY
        else _problem(settings, files.path)
    )
    if problem is None:
        return files.path
    if model.images == "on":
        raise ConfigurationError(f"model.images: {problem}")
    return None


def placeholder_id(config: Mapping[str, Any]) -> int:
    """Return the token that stands for each embedding of an image, by config.json.

    Raises:
        ConfigurationError: the file has none.
    """
    for name in ("image_token_id", "image_token_index"):
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ConfigurationError("config.json has no 'image_token_id'")


def mark_id(config: Mapping[str, Any]) -> int:
    """Return the token that stands for a whole image in chat templates and prompts, by config.json.

    In Gemma 3 it is the one before an image's placeholders, elsewhere a placeholder.

    Raises:
        ConfigurationError: the file has none.
    """
    for name in ("boi_token_id", "boi_token_index"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return placeholder_id(config)


def video_mark_id(config: Mapping[str, Any]) -> int | None:
    """Return the token that stands for a whole video in chat templates and prompts, if the model takes videos here."""
    taken = config.get("model_type") in VIDEO_FAMILIES
    return int(config.get("video_token_id", QWEN_VIDEO_ID)) if taken else None


def _problem(settings: Settings, directory: Path) -> str | None:
    """Return why the model's images are not served."""
    config = read_json(directory / "config.json")
    family = str(config.get("model_type"))
    if family not in SEEING_FAMILIES:
        return f"models of the type {family!r} take no images here; {', '.join(SEEING_FAMILIES)} do"
    encoder, wanted = (config.get("vision_config") or {}).get("model_type"), SEEING_FAMILIES[family]
    if wanted is not None and encoder != wanted:
        return f"encoders of the type {encoder!r} are not supported in {family}"
    if not any((directory / name).is_file() for name in PROCESSOR_FILES):
        return f"{directory} has no {' or '.join(PROCESSOR_FILES)}"
    if settings.scheduler.pipeline_parallel > 1:
        return "scheduler.pipeline_parallel: a model with images cannot be cut into stages yet"
    if read_head(config, settings.model.classifier_from_token) is not None:
        return "classifiers read texts only"
    return None
