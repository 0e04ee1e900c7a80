"""The encoder of Qwen2.5-VL with all of its layers in calls of the compiled operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from common.steps import EngineSpec
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.loader import load_encoder
from services.worker.engine.vision.encoder import EncoderImage
from services.worker.engine.vision.qwen2_5 import Qwen25Encoder
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.vision.driving import NEW_TOKENS, Session, engine_of
from tests.services.worker.engine.vision.models import MODELS, VOCABULARY, expected, picture, prompt, save_as, video

if TYPE_CHECKING:
    from pathlib import Path

    from services.worker.engine.kernels.cpu.library import CpuLibrary

FAMILY = "qwen2.5-vl"
# Rows and columns of squares of patches, of which windows have two: whole windows, cut ones, and less than one.
SIZES = ((4, 4), (5, 3), (1, 1), (2, 7))
INTERVAL = 1.6
# Of embeddings relative to their norm: sums are in another order. Numbers that lie between two of bfloat16 may be
# rounded to either.
TOLERANCES = {"float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, library: CpuLibrary) -> Path:
    """A model whose encoder has one head of 32 components: whole registers on all processors."""
    assert 32 % library.lanes == 0
    name, options = MODELS[FAMILY]
    narrow: dict[str, Any] = {**options, "vision_config": {**options["vision_config"], "num_heads": 1}}
    return save_as(tmp_path_factory.mktemp("fused"), name, narrow)


def encoder_of(directory: Path, dtype: str, threads: int) -> Qwen25Encoder:
    options = RunnerOptions(backend="compiled", threads=threads)
    spec = EngineSpec(str(directory), dtype=dtype, vision=True, only_encodes=True)
    encoder, _ = load_encoder(spec, lambda _fraction, _stage: None, options)
    assert isinstance(encoder, Qwen25Encoder)
    assert encoder._fused is not None
    return encoder


def images() -> list[EncoderImage]:
    """Return pictures, and a video of three steps in time."""
    given = [picture(FAMILY, *size, seed=seed) for seed, size in enumerate(SIZES)]
    made = [EncoderImage(each.pixels, each.grid) for each in given]
    clip = video(FAMILY, 3, 3, 2, seed=9, interval=INTERVAL)
    return [*made, EncoderImage(clip.pixels, clip.grid)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fused_layers_give_the_embeddings_of_separate_operators(
    directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(directory, dtype, threads=2)
    fused = encoder.encode(images())
    monkeypatch.setattr(encoder, "_fused", None)
    separate = encoder.encode(images())
    assert len(fused) == len(separate) == len(SIZES) + 1
    for these, those in zip(fused, separate, strict=True):
        assert these.shape == those.shape
        assert (these - those).norm() < TOLERANCES[dtype] * those.norm()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_depend_neither_on_other_images_nor_on_threads(directory: Path, dtype: str) -> None:
    together = encoder_of(directory, dtype, threads=2).encode(images())
    alone = encoder_of(directory, dtype, threads=1)
    assert len(together) == len(SIZES) + 1
    for these, image in zip(together, images(), strict=True):
        assert torch.equal(these, *alone.encode([image]))


def test_rows_continue_after_pictures_and_videos_as_transformers_does(directory: Path) -> None:
    words = [random_ids(count, VOCABULARY - 5, count) for count in (5, 7, 4)]
    clip = video(FAMILY, 3, 4, 2, seed=1, interval=INTERVAL)
    asked = prompt(words[0], picture(FAMILY, 5, 3, seed=2), words[1], clip, picture(FAMILY, 2, 2, seed=3), words[2])
    (answer,) = Session(engine_of(directory, "compiled")).answer([asked])
    answer.check(*expected(directory, asked, NEW_TOKENS, interval=INTERVAL))
