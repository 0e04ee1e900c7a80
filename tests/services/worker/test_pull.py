"""The container that downloads a model fetches the files that the pods of a pipeline need."""

from __future__ import annotations

import sys

import pytest

from services.worker import pull


@pytest.mark.parametrize(
    ("pod", "ranks_per_pod", "tensor_parallel", "stages"),
    [
        (0, 8, 8, [0]),
        (1, 8, 8, [1]),
        # Two pods have the ranks of one stage.
        (2, 4, 8, [1]),
        # A pod has two stages, or one and a half.
        (1, 8, 4, [2, 3]),
        (0, 6, 4, [0, 1]),
        (1, 6, 4, [1, 2]),
    ],
)
def test_a_pod_has_the_stages_of_its_ranks(
    pod: int, ranks_per_pod: int, tensor_parallel: int, stages: list[int]
) -> None:
    assert list(pull.stages_of(pod, ranks_per_pod, tensor_parallel)) == stages


@pytest.mark.parametrize(
    ("changed", "problem"),
    [("--pod=2", "there is no pod 2"), ("--pod=-1", "there is no pod -1"), ("--tensor-parallel=0", "at least 1")],
)
def test_numbers_that_mean_nothing_are_refused(changed: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["org/name", "--tensor-parallel=8", "--pipeline-parallel=2", "--ranks-per-pod=8", "--pod=0", changed]
    with pytest.raises(SystemExit):
        pull.parse(arguments)
    assert problem in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ["--tensor-parallel=1", "--pipeline-parallel=2", "--ranks-per-pod=1", "--pod=1"]
    monkeypatch.setattr(sys, "argv", ["pull", "./nothing", *numbers])
    assert pull.main() == 2
    assert capsys.readouterr().err.startswith("model './nothing': no such model")
