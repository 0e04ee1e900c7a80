"""Whether a model is served with images, by its files and the settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import ConfigurationError
from common.settings import ModelSettings, SchedulerSettings, Settings
from common.vision import SEEING_FAMILIES, mark_id, placeholder_id, seeing_model
from services.tokenizer.images.registry import READERS
from services.worker.engine.vision.registry import vision_families

if TYPE_CHECKING:
    from pathlib import Path

SEEING = {"model_type": "qwen2_5_vl", "vision_config": {}}


def write(directory: Path, config: dict[str, Any], *, has_processor: bool = True) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    if has_processor:
        (directory / "preprocessor_config.json").write_text("{}")


def settings_of(directory: Path, images: str, *, stages: int = 1, load_format: str = "auto") -> Settings:
    model = ModelSettings.model_validate({"reference": str(directory), "images": images, "load_format": load_format})
    return Settings(model=model, scheduler=SchedulerSettings(pipeline_parallel=stages))


def test_tokenizers_and_workers_know_the_same_families() -> None:
    assert set(SEEING_FAMILIES) == set(READERS) == set(vision_families())


@pytest.mark.parametrize("images", ["auto", "on"])
def test_a_model_with_a_known_encoder_and_processor_sees(tmp_path: Path, images: str) -> None:
    write(tmp_path, SEEING)
    assert seeing_model(settings_of(tmp_path, images)) == tmp_path


@pytest.mark.parametrize("load_format", ["fake", "auto"])
def test_nothing_is_seen_that_is_turned_off_or_made_up(tmp_path: Path, load_format: str) -> None:
    write(tmp_path, SEEING)
    assert (
        seeing_model(settings_of(tmp_path, "off" if load_format == "auto" else "on", load_format=load_format)) is None
    )


@pytest.mark.parametrize(
    ("config", "has_processor", "stages", "words"),
    [
        ({"model_type": "llama"}, True, 1, "'llama' take no images"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}, True, 1, "clip_vision_model"),
        ({"model_type": "gemma3", "vision_config": {"model_type": "clip_vision_model"}}, True, 1, "clip_vision_model"),
        (SEEING, False, 1, "has no processor_config.json or preprocessor_config.json"),
        (SEEING, True, 2, "pipeline_parallel"),
        ({**SEEING, "architectures": ["XForSequenceClassification"], "id2label": {"0": "a"}}, True, 1, "classifiers"),
    ],
)  # fmt: skip
def test_other_models_read_texts_only(
    config: dict[str, Any], has_processor: bool, stages: int, words: str, tmp_path: Path
) -> None:
    write(tmp_path, config, has_processor=has_processor)
    assert seeing_model(settings_of(tmp_path, "auto", stages=stages)) is None
    with pytest.raises(ConfigurationError, match=f"model.images: .*{words}"):
        seeing_model(settings_of(tmp_path, "on", stages=stages))


def test_the_placeholder_has_two_names_in_files() -> None:
    assert placeholder_id({"image_token_id": 3}) == placeholder_id({"image_token_index": 3}) == 3
    with pytest.raises(ConfigurationError, match="image_token_id"):
        placeholder_id({})


def test_an_image_may_have_another_mark_than_its_embeddings() -> None:
    assert mark_id({"image_token_id": 3}) == 3
    assert mark_id({"image_token_index": 3, "boi_token_index": 5}) == 5
