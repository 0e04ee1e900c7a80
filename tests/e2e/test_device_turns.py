"""Two models that take turns on one device: the same answers as alone, bounded waiting, and deaths within a turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers

from common.settings import Settings
from tests.e2e.conftest import serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PROMPTS = [list(range(start, start + 30)) for start in (20, 50, 80)]
MODELS = ("a", "b")
LONG = 200


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, run_root: Path) -> Iterator[Served]:
    """Two tiny models of different families."""
    root = tmp_path_factory.mktemp("turns")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    entries = {}
    for name, family in zip(MODELS, ("llama", "qwen3"), strict=True):
        model = save_family(root / name, family)
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(
            str(model / "tokenizer.json")
        )
        entries[name] = {"reference": str(model), "dtype": "float32"}
    settings = {
        "models": entries,
        "gateway": {"port": 0, "anonymous": "vouched", "default_model": "a"},
        "worker": {"threads": 1},
        "scheduler": {
            "max_rows": 8,
            "device_pages": 256,
            "sleep": {"max_waiting_requests": 8},
            "device_turns": {"enabled": True, "min_turn_s": 0.5, "idle_s": 0.1, "level": 2},
        },
    }
    yield from serve(Settings.model_validate(settings), run_root)


def complete(served: Served, model: str, prompt: list[int], tokens: int = 16) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    with served.http() as http:
        return http.post("/v1/completions", json=body)


def tokens_of(served: Served, model: str, prompt: list[int], tokens: int = 16) -> list[int]:
    answer = complete(served, model, prompt, tokens)
    assert answer.status_code == httpx.codes.OK, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(ids) == tokens
    return ids


def sleeping(served: Served) -> dict[str, bool]:
    with served.http() as http:
        return {name: http.get("/is_sleeping", params={"model": name}).json()["is_sleeping"] for name in MODELS}


def test_interleaved_requests_have_the_answers_of_undisturbed_ones(shared: Served) -> None:
    wanted = {(model, number): tokens_of(shared, model, PROMPTS[number]) for model in MODELS for number in range(3)}
    assert wanted["a", 0] != wanted["b", 0]
    states: list[dict[str, bool]] = []
    with ThreadPoolExecutor(8) as pool:
        answers = {
            (round_, *key): pool.submit(tokens_of, shared, key[0], PROMPTS[key[1]])
            for round_ in range(3)
            for key in sorted(wanted, key=lambda key: key[1])
        }
        while not all(answer.done() for answer in answers.values()):
            states.append(sleeping(shared))
    assert {key: answer.result() for key, answer in answers.items()} == {
        (round_, *key): ids for round_ in range(3) for key, ids in wanted.items()
    }
    # The models are asked one after the other, so this cannot show that never both were awake; the locks ensure that.
    assert {name for state in states for name in MODELS if state[name]} == set(MODELS)
    with shared.http() as http:
        assert {model["id"] for model in http.get("/v1/models").json()["data"]} == set(MODELS)
        assert http.get("/ready").json()["status"] in ("ready", "partial")


def test_long_answers_of_both_are_preempted_and_go_on(shared: Served) -> None:
    wanted = {model: tokens_of(shared, model, PROMPTS[0], LONG) for model in MODELS}
    with ThreadPoolExecutor(2) as pool:
        answers = {model: pool.submit(tokens_of, shared, model, PROMPTS[0], LONG) for model in MODELS}
        assert {model: answer.result() for model, answer in answers.items()} == wanted


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_the_death_of_the_one_that_is_awake_loses_nothing(shared: Served, service: str) -> None:
    wanted = {model: tokens_of(shared, model, PROMPTS[1], LONG) for model in MODELS}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tokens_of, shared, "a", PROMPTS[1], LONG)
        wait_until(lambda: first.done() or not sleeping(shared)["a"], timeout_s=120)
        second = pool.submit(tokens_of, shared, "b", PROMPTS[1], LONG)
        kill_and_wait_until_replaced(shared, f"a/{service}")
        assert {"a": first.result(), "b": second.result()} == wanted


def test_a_full_queue_refuses_with_a_hint(shared: Served) -> None:
    requests: list[tuple[str, list[int], int]] = [("a", PROMPTS[2], LONG)]
    requests += [("b", [*PROMPTS[2], number + 10], 4) for number in range(24)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers: list[httpx.Response] = list(pool.map(lambda request: complete(shared, *request), requests))
    refused = [answer for answer in answers if answer.status_code != httpx.codes.OK]
    assert answers[0].status_code == httpx.codes.OK
    assert len(refused) < len(answers) - 1
    for answer in refused:
        assert answer.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
        assert int(answer.headers["retry-after"]) > 0
    found: dict[str, Any] = {model: tokens_of(shared, model, PROMPTS[2]) for model in MODELS}
    assert len(found) == len(MODELS)
