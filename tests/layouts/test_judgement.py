"""The comparison of layouts finds what differs, and a run that shows nothing is a problem of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.evaluation.bench.results import Provenance
from tests.e2e.byte_models import save_byte_model
from tests.layouts import judgement
from tests.layouts.arrangements import ARRANGEMENTS, ONE
from tests.layouts.judgement import Judge
from tests.layouts.load import Answer, requests_of
from tests.layouts.runs import Outcome, results_of

GREEDY: dict[str, Any] = {"prompt": [1, 2, 3], "temperature": 0}
ANSWER = Answer((10, 11, 12), "abc", (-0.1, -0.2, -0.3), "length")
CHANGES = {
    "another token": replace(ANSWER, token_ids=(10, 99, 12)),
    "a shorter answer": replace(ANSWER, token_ids=(10, 11), logprobs=(-0.1, -0.2)),
    "another text": replace(ANSWER, text="abd"),
    "another finish": replace(ANSWER, finish="stop"),
    "another log probability": replace(ANSWER, logprobs=(-0.1, -0.3, -0.3)),
    "no log probabilities": replace(ANSWER, logprobs=()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_exact", [True, False])
def test_an_answer_that_differs_is_found(change: str, *, is_exact: bool, byte_model: Path) -> None:
    judge = Judge(byte_model, is_exact=is_exact)
    found = judge.differences([GREEDY, GREEDY], [ANSWER, CHANGES[change]], [ANSWER, ANSWER])
    assert [text.startswith("request 1:") for text in found] == [True]
    assert judge.ties == 0


def test_equal_answers_do_not_differ_but_for_roundings_of_log_probabilities() -> None:
    judge = Judge(Path("unused"), is_exact=True)
    rounded = replace(ANSWER, logprobs=(-0.101, -0.2, -0.3))
    assert not judge.differences([GREEDY], [rounded], [ANSWER])


def test_tokens_that_are_nearly_as_likely_are_a_tie_only_where_sums_have_another_order(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Judge(byte_model, is_exact=False)._logits(GREEDY["prompt"])
    second, first = (int(token) for token in logits.argsort()[-2:])
    gap = float(logits[first] - logits[second])
    one, own = (Answer((token,), "", (), "length") for token in (first, second))
    for is_exact, factor, ties in ((False, 1.5, 1), (False, 0.5, 0), (True, 1.5, 0)):
        monkeypatch.setattr(judgement, "TIE_LOGIT", factor * gap)
        judge = Judge(byte_model, is_exact=is_exact)
        assert len(judge.differences([GREEDY], [own], [one])) == 1 - ties
        assert judge.ties == ties


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"), ONE["dense"])


def test_half_of_the_requests_are_greedy_and_all_are_seeded() -> None:
    bodies = requests_of("dense, two stages", 1000)
    assert 400 < sum(not body["temperature"] for body in bodies) < 600
    assert all("seed" in body for body in bodies)
    assert bodies != requests_of("dense, two stages", 1000, seed=1)
    assert bodies == requests_of("dense, two stages", 1000)


def test_results_have_the_counts_of_each_layout_and_the_origin() -> None:
    outcomes = [Outcome(name, 667, 330, 11, 5, 0, 1, 200.0) for name in ARRANGEMENTS]
    results = results_of(outcomes, Provenance("python -m tests.layouts", "abc", "2026-11-29"))
    assert {result.label for result in results} == set(ARRANGEMENTS)
    of_one = {result.metric: result.value for result in results if result.label == "mixture, expert parallel"}
    assert of_one == {
        "requests": 667, "greedy": 330, "kills": 11, "refusals": 5, "differences": 0, "ties": 1, "duration": 200,
    }  # fmt: skip
