"""Two ranks on the CPU, by tensor parallelism or as stages: the same model, the same answers, and one fate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema
import pytest

from common.settings import GatewaySettings, SchedulerSettings, Settings
from tests.e2e.conftest import require_model, serve
from tests.e2e.test_structured_output import chat
from tests.services.worker.engine.grammars.corpus import CORPUS
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.extended]

# The model is sure of their continuations (tests/e2e/greedy/reference.json): two ranks add in another order than one,
# in bfloat16 on some processors.
PROMPTS = ("1, 2, 3, 4, 5,", '{"name": "Alice", "age": 30, "friends": [{"name": "Bob", "age": 31}, {"name": "Carol",')


@pytest.fixture(scope="module")
def served_by_two(run_root: Path) -> Iterator[Served]:
    require_model()
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched")), run_root, ranks=2)


def test_two_ranks_answer_as_one_does(served: Served, served_by_two: Served) -> None:
    for prompt in PROMPTS:
        assert served_by_two.complete(prompt, max_tokens=12) == served.complete(prompt, max_tokens=12)


@pytest.mark.extended
def test_two_ranks_apply_grammars_and_jump_forward_consistently(served_by_two: Served) -> None:
    before = served_by_two.state().jumped_tokens
    for name in ("order", "enum of texts"):
        # Where log probabilities are told, each token takes a pass.
        told, answer = (chat(served_by_two, CORPUS[name], n=2, seed=3, logprobs=told) for told in (True, False))
        assert len(answer.choices) == 2
        for choice, other in zip(answer.choices, told.choices, strict=True):
            assert choice.message.content == other.message.content
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.message.content), CORPUS[name])
    assert served_by_two.state().jumped_tokens > before


def test_when_one_rank_dies_both_start_again_and_serve(served_by_two: Served) -> None:
    deployment = served_by_two.deployment
    before = [deployment.pid_of(f"worker-{rank}") for rank in range(2)]
    deployment.kill("worker-1")
    wait_until(
        lambda: all(deployment.pid_of(f"worker-{rank}") not in (None, before[rank]) for rank in range(2)), timeout_s=120
    )
    wait_until(served_by_two.is_ready, timeout_s=120)
    assert served_by_two.complete(max_tokens=3).startswith(" Paris")


@pytest.fixture(scope="module")
def served_by_stages(run_root: Path) -> Iterator[Served]:
    require_model()
    scheduler = SchedulerSettings(pipeline_parallel=2)
    yield from serve(Settings(gateway=GatewaySettings(port=0, anonymous="vouched"), scheduler=scheduler), run_root)


def test_two_stages_answer_as_one_rank_does_also_after_one_died(served: Served, served_by_stages: Served) -> None:
    expected = [served.complete(prompt, max_tokens=12) for prompt in PROMPTS]
    assert [served_by_stages.complete(prompt, max_tokens=12) for prompt in PROMPTS] == expected
    schema = CORPUS["order"]
    answers = [chat(each, schema, seed=3) for each in (served, served_by_stages)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    deployment = served_by_stages.deployment
    before = [deployment.pid_of(f"worker-{rank}") for rank in range(2)]
    deployment.kill("worker-0")
    wait_until(
        lambda: (
            all(deployment.pid_of(f"worker-{rank}") is not None for rank in range(2))
            and deployment.pid_of("worker-0") != before[0]
        ),
        timeout_s=120,
    )
    wait_until(served_by_stages.is_ready, timeout_s=120)
    assert [served_by_stages.complete(prompt, max_tokens=12) for prompt in PROMPTS] == expected
