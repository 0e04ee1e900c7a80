"""What models answer to prompts with images, against `transformers`: logits and greedy tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidRequestError
from common.steps import EngineSpec, SleepLevel, StepPlan
from common.types import EncoderOutputId, StepId
from services.worker.engine.backends import RunnerOptions
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.execution.synchronous_runner import SynchronousRunner
from services.worker.engine.loader import load_encoder
from services.worker.engine.vision.row_images import RowImages
from services.worker.engine.vision.vision_model import VisionModel
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.scenario import chunk
from tests.services.worker.engine.vision.driving import NEW_TOKENS, PAGE, Answer, Session, engine_of
from tests.services.worker.engine.vision.models import (
    MODELS,
    TILED,
    VOCABULARY,
    Prompt,
    expected,
    picture,
    prompt,
    save,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

pytestmark = pytest.mark.extended

BACKENDS = ("torch", "compiled")


def text(count: int, seed: int) -> list[int]:
    return random_ids(count, VOCABULARY - 5, seed)


def prompts_of(family: str) -> list[Prompt]:
    """Return prompts with one image, with two of different sizes next to each other and in a text, and with none."""
    # In tiles of many embeddings, or in single ones.
    sizes = ((1, 1), (2, 3)) if family in TILED else ((2, 2), (5, 3))
    small, large = (picture(family, *size, seed=seed) for seed, size in enumerate(sizes, 1))
    return [
        prompt(text(5, 1), small, text(7, 2)),
        prompt(large, small, text(4, 3), picture(family, 1, 3, seed=3), text(3, 4)),
        prompt(text(40, 5)),
    ]


def check(directory: Path, prompts: list[Prompt], answers: list[Answer]) -> None:
    for each, answer in zip(prompts, answers, strict=True):
        answer.check(*expected(directory, each, NEW_TOKENS))


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(family), family)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_images_continue_as_transformers_does(directory: Path, family: str, backend: str) -> None:
    prompts, session = prompts_of(family), Session(engine_of(directory, backend))
    # Together, then each in chunks that cut images in two, then once more with the slots of closed rows.
    check(directory, prompts, session.answer(prompts))
    check(directory, prompts, session.answer(prompts, borders=(9, 21, 37, 58)))
    check(directory, prompts[1:2], session.answer(prompts[1:2], borders=(1, 2, 50)))


def as_rank(rank: int, world_size: int, rendezvous: str, directory: str, family: str) -> list[Answer]:
    engine = engine_of(directory, "compiled", rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        return Session(engine).answer(prompts_of(family), borders=(9, 37))
    finally:
        engine.close()


def test_two_ranks_see_images_as_transformers_does(ranks: Ranks, directory: Path, family: str) -> None:
    first, _ = ranks.run(as_rank, 2, str(directory), family)
    check(directory, prompts_of(family), first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_with_images_is_continued_without_their_pixels(directory: Path, family: str, backend: str) -> None:
    small, large = picture(family, 2, 2, seed=1), picture(family, 3, 2, seed=2)
    turns = prompt(text(5, 1), small, text(30, 2)), prompt(text(5, 1), small, text(30, 2), large, text(7, 3))
    session = Session(engine_of(directory, backend))
    first, _ = turns
    session.answer(turns[:1])
    # The pages of the closed row, as far as they are full, are the prefix of the next one.
    known = (len(first.ids) - 1) // PAGE * PAGE
    assert known > first.images[0].offset + len(small.ids), "all of the image's tokens are computed"
    bare, new = turns[1].images
    row = replace(turns[1], images=(replace(bare, pixels=None), new))
    session.run(replace(session.open(0, row, computed=known), prefills=(chunk(0, known, len(row.ids) - known),)))
    session.run(StepPlan(StepId(0), steps=NEW_TOKENS - 1))
    session.answers[0].check(*expected(directory, turns[1], NEW_TOKENS))


def test_kept_embeddings_answer_another_question_as_transformers_does(directory: Path, family: str) -> None:
    large, output = picture(family, 2, 3, seed=1), EncoderOutputId(1)
    first, second = prompt(text(5, 1), large, text(7, 2)), prompt(text(9, 6), large, text(4, 4))
    session = Session(engine_of(directory, "compiled"))
    keeping = replace(first, images=(replace(first.images[0], output=output),))
    check(directory, [first], session.answer([keeping]))
    model, runner = session.engine._model, session.engine._runner
    assert model is not None
    assert isinstance(runner, SynchronousRunner)
    assert isinstance(runner._images, RowImages)
    (kept,) = runner._images._outputs.values()
    assert kept.nbytes == model.capacity.embedding_bytes * first.images[0].length
    bare = replace(second, images=(replace(second.images[0], output=output, pixels=None),))
    check(directory, [second], session.answer([bare], borders=(11,)))


def test_embeddings_of_another_process_answer_as_transformers_does(directory: Path, family: str) -> None:
    large, output = picture(family, 2, 3, seed=1), EncoderOutputId(1)
    asked = prompt(text(5, 1), large, text(7, 2))
    session, options = Session(engine_of(directory, "compiled")), RunnerOptions(backend="compiled", threads=1)
    spec = EngineSpec(str(directory), dtype="float32", vision=True, only_encodes=True)
    encoder = ModelEngine(lambda spec, report: VisionModel(lambda report: load_encoder(spec, report, options), report))
    capacity = encoder.configure(spec, lambda _fraction, _stage: None)
    model = session.engine._model
    assert model is not None
    assert capacity.encoder_identity == model.capacity.encoder_identity != ""
    awake = encoder.encoder
    assert awake is not None
    with pytest.raises(InvalidRequestError, match="embeddings"):
        awake.encode([replace(asked.images[0], length=1)])
    with pytest.raises(InvalidPlanError):
        encoder.execute(StepPlan(StepId(0)), lambda _: None)
    # It sleeps and wakes in between.
    encoder.sleep(SleepLevel.HOST, keeps_host_pages=False)
    assert encoder.encoder is None
    encoder.configure(spec, lambda _fraction, _stage: None)
    (content,) = awake.encode(asked.images)
    assert len(content) == capacity.embedding_bytes * asked.images[0].length
    assert session.engine.images is not None
    session.engine.images.keep(output, memoryview(bytearray(content)))
    bare = replace(asked, images=(replace(asked.images[0], output=output, pixels=None),))
    check(directory, [asked], session.answer([bare], borders=(11,)))


@pytest.mark.gpu
def test_a_gpu_sees_images_as_transformers_does(directory: Path, family: str) -> None:
    """In float32, with plain torch kernels there; `test_overlapped.py` has the others."""
    prompts, session = prompts_of(family), Session(engine_of(directory, "auto", device="cuda"))
    check(directory, prompts, session.answer(prompts))
    check(directory, prompts, session.answer(prompts, borders=(9, 21, 37, 58)))
