"""On a GPU, images are encoded and embeddings are taken over without waiting for the device."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch

from common.steps import EngineSpec
from common.types import EncoderOutputId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_decoder
from services.worker.engine.vision.encoder import EncoderImage
from services.worker.engine.vision.row_images import RowImages
from tests.services.worker.engine.vision.driving import PAGE
from tests.services.worker.engine.vision.models import MODELS, picture, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from services.worker.engine.model_runner import ModelRunner


def loaded(family: str, directory: Path) -> ModelRunner:
    save(directory, family)
    spec = EngineSpec(
        str(directory), dtype="float32", max_rows=2, max_context=96, page_size=PAGE, device_pages=64, vision=True
    )
    return load_decoder(spec, lambda *_: None, RunnerOptions(backend="auto", threads=1, device="cuda"))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise an error where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(MODELS))
def test_images_are_encoded_without_waiting(family: str, tmp_path: Path) -> None:
    runner, given = loaded(family, tmp_path), picture(family, 2, 3, seed=1)
    images = [EncoderImage(given.pixels, given.grid)] * 2
    expected = runner.encode_images(images)
    with no_waiting():
        encoded = runner.encode_images(images)
    assert len(encoded) == 2
    assert all(torch.equal(*pair) for pair in zip(encoded, expected, strict=True))


@pytest.mark.gpu
def test_embeddings_of_other_workers_are_kept_without_waiting(tmp_path: Path) -> None:
    runner = loaded("qwen2.5-vl", tmp_path)
    assert runner.vision is not None
    config = runner.vision.config
    images, content = RowImages(runner, config), torch.rand(6, config.components)
    with no_waiting():
        images.keep(EncoderOutputId(1), memoryview(bytearray(content.numpy().tobytes())))
    assert images.kept_embeddings == 6
