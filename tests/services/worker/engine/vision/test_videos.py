"""Answers to prompts with videos, and positions of their tokens in time, compared with `transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common.steps import StepPlan
from common.types import RowImage, StepId
from services.worker.engine.execution.interface import InvalidPlanError
from services.worker.engine.vision.axes import coordinates_of
from tests.services.worker.engine.driving import random_ids
from tests.services.worker.engine.scenario import chunk
from tests.services.worker.engine.vision.driving import NEW_TOKENS, PAGE, Answer, Session, engine_of
from tests.services.worker.engine.vision.models import (
    BY_PATCHES,
    VOCABULARY,
    Prompt,
    expected,
    picture,
    prompt,
    save,
    video,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.services.worker.engine.parallel.ranks import Ranks

# Coordinates 0, 1 and 3: within a step's rows, so that `transformers` counts the text after a video as in training.
INTERVAL = 1.6


def text(count: int, seed: int) -> list[int]:
    return random_ids(count, VOCABULARY - 5, seed)


def prompts_of(family: str) -> list[Prompt]:
    """Return prompts with a video, with one beside a picture, and with two."""
    clip, other = video(family, 3, 4, 2, seed=1, interval=INTERVAL), video(family, 2, 2, 3, seed=2, interval=INTERVAL)
    return [
        prompt(text(5, 1), clip, text(7, 2)),
        prompt(picture(family, 2, 2, seed=3), clip, text(4, 3), picture(family, 1, 3, seed=4), text(3, 4)),
        prompt(other, clip, text(6, 5)),
    ]


def check(directory: Path, prompts: list[Prompt], answers: list[Answer]) -> None:
    assert len(prompts) == len(answers) > 0
    for each, answer in zip(prompts, answers, strict=True):
        answer.check(*expected(directory, each, NEW_TOKENS, interval=INTERVAL))


@pytest.fixture(scope="module", params=BY_PATCHES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(family), family)


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_rows_with_videos_continue_as_transformers_does(directory: Path, family: str, backend: str) -> None:
    prompts, session = prompts_of(family), Session(engine_of(directory, backend))
    check(directory, prompts, session.answer(prompts))
    # In chunks that cut videos, within a step and between steps.
    check(directory, prompts, session.answer(prompts, borders=(9, 14, 21, 37)))


def as_rank(rank: int, world_size: int, rendezvous: str, directory: str, family: str) -> list[Answer]:
    engine = engine_of(directory, rank=rank, world_size=world_size, rendezvous=rendezvous)
    try:
        # Chunks cut videos.
        return Session(engine).answer(prompts_of(family), borders=(9, 21))
    finally:
        engine.close()


@pytest.mark.extended
def test_two_ranks_see_videos_as_transformers_does(ranks: Ranks, directory: Path, family: str) -> None:
    first, _ = ranks.run(as_rank, 2, str(directory), family)
    check(directory, prompts_of(family), first)


@pytest.mark.extended
def test_a_prefix_with_a_video_is_continued_without_its_pixels(directory: Path, family: str) -> None:
    clip = video(family, 3, 4, 2, seed=1, interval=INTERVAL)
    first, second = (prompt(text(5, 1), clip, text(30, 2), *rest) for rest in ([], [text(7, 3)]))
    session = Session(engine_of(directory))
    session.answer([first])
    known = (len(first.ids) - 1) // PAGE * PAGE
    assert known > first.images[0].offset + len(clip.ids), "all of the video's tokens are computed"
    row = replace(second, images=(replace(second.images[0], pixels=None),))
    session.run(replace(session.open(0, row, computed=known), prefills=(chunk(0, known, len(row.ids) - known),)))
    session.run(StepPlan(StepId(0), steps=NEW_TOKENS - 1))
    session.answers[0].check(*expected(directory, second, NEW_TOKENS, interval=INTERVAL))


def test_text_goes_on_from_the_largest_coordinate_of_a_video() -> None:
    # Of one row and two columns, at 0 and 2 in time; three tokens of text before it and one after it.
    ids = np.array([1, 1, 1, -1, -2, -3, -4, 1], np.int32)
    clip = RowImage(b"", 3, 4, (2, 2, 4, 0, 2))
    coordinates, offset = coordinates_of(ids, [clip], 2)
    assert coordinates.tolist() == [
        [0, 1, 2, 3, 3, 5, 5, 6],
        [0, 1, 2, 3, 3, 3, 3, 6],
        [0, 1, 2, 3, 4, 3, 4, 6],
    ]
    assert offset == -1


def test_steps_with_text_between_them_are_counted_like_images() -> None:
    ids = np.array([1, -1, -2, 1, 1, -3, -4, 1], np.int32)
    coordinates, offset = coordinates_of(ids, [RowImage(b"", 1, 4, (2, 2, 4))], 2)
    pictures = [RowImage(b"", 1, 2, (1, 2, 4)), RowImage(b"", 5, 2, (1, 2, 4))]
    apart, same = coordinates_of(ids, pictures, 2)
    assert coordinates.tolist() == apart.tolist()
    assert offset == same == 0


@pytest.mark.parametrize("grid", [(2, 2, 4, 0), (2, 2, 4, 0, 5), (3, 2, 4), (2, 2, 8), (2, 4)])
def test_grids_that_are_not_those_of_the_tokens_are_refused(grid: tuple[int, ...]) -> None:
    ids = np.array([1, -1, -2, -3, -4, 1], np.int32)
    with pytest.raises(ValueError, match="grid"):
        coordinates_of(ids, [RowImage(b"", 1, 4, grid)], 2)


@pytest.mark.extended
def test_a_plan_with_times_of_other_steps_is_refused(directory: Path, family: str) -> None:
    clip = video(family, 3, 4, 2, seed=1)
    asked = prompt(text(5, 1), replace(clip, grid=(*clip.grid[:3], 0, 1)), text(7, 2))
    session = Session(engine_of(directory))
    with pytest.raises(InvalidPlanError, match="coordinates in time"):
        session.run(session.open(0, asked))
