"""Two models behind one gateway, each with services of its own; one of them dies."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from common.settings import Settings
from tests.e2e.conftest import fake_steps, serve
from tests.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.served import Served

# Both make tokens up; each takes 20 ms for a step, so that answers last while things happen.
SETTINGS = {
    "model": {"load_format": "fake"},
    "models": {"small": {"max_context": 512, "aliases": ["gpt-4o-mini"]}, "large": {"scheduler": {"max_rows": 4}}},
    "gateway": {"port": 0, "default_model": "large"},
    "worker": {"threads": 1},
}


@pytest.fixture(scope="module")
def both(run_root: Path) -> Iterator[Served]:
    with fake_steps(20.0):
        yield from serve(Settings.model_validate(SETTINGS), run_root)


def stream(
    client: openai.OpenAI, model: str, max_tokens: int, on_chunk: Callable[[], None] = lambda: None
) -> tuple[str, int]:
    """Return an answer's text and its number of tokens."""
    text, tokens = "", 0
    for chunk in client.completions.create(
        model=model, prompt="x", max_tokens=max_tokens, seed=1, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.text for choice in chunk.choices)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        on_chunk()
    return text, tokens


def test_both_models_are_listed_and_answer_by_name(both: Served) -> None:
    client = both.client()
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert {name: model["max_model_len"] for name, model in listed.items()} == {"small": 512, "large": 8192}
    assert listed["small"]["aliases"] == ["gpt-4o-mini"]
    assert client.completions.create(model="gpt-4o-mini", prompt="x", max_tokens=2).model == "small"
    with pytest.raises(openai.NotFoundError, match="'small', 'large'"):
        client.completions.create(model="huge", prompt="x")
    answer = httpx.post(f"{both.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
    assert answer.json()["model"] == "large"


def test_a_model_that_dies_does_not_disturb_the_other(both: Served) -> None:
    client = both.client()
    undisturbed, _ = stream(client, "large", 60)
    answers: dict[str, tuple[str, int]] = {}
    begun = {model: threading.Event() for model in ("small", "large")}

    def ask(model: str) -> None:
        answers[model] = stream(client, model, 200, begun[model].set)

    threads = [threading.Thread(target=ask, args=(model,)) for model in begun]
    for thread in threads:
        thread.start()
    assert all(event.wait(TIMEOUT_S) for event in begun.values())
    both.deployment.kill("small/scheduler")
    # While it is away, the gateway says so of this model, and of no other.
    with both.http() as http:

        def is_away() -> bool:
            assert http.get("/ready?model=large").status_code == 200
            small, all_ = http.get("/ready?model=small"), http.get("/ready")
            return small.status_code == 503 and all_.json()["status"] == "partial"

        wait_until(is_away, step_s=0.01)
    for thread in threads:
        thread.join()
    assert answers["large"][0].startswith(undisturbed)
    # What was interrupted went on where it was, once the scheduler was back; the other was never interrupted.
    assert answers["small"][1] == answers["large"][1] == 200
    metrics = httpx.get(f"{both.url}/metrics", timeout=60).text
    assert 'pando_gateway_resumptions_total{model="small"}' in metrics
    assert 'pando_gateway_resumptions_total{model="large"}' not in metrics


def test_each_scheduler_is_asked_by_its_model_s_name(both: Served) -> None:
    with httpx.Client(base_url=both.url, timeout=60) as http:
        states = http.get("/get_server_info", params={"model": "large"}).json()["internal_states"]
        assert [state["max_rows"] for state in states] == [4]
        assert "pages" in http.post("/flush_cache").text
        http.post("/v1/completions", json={"model": "large", "prompt": "x", "max_tokens": 1}).raise_for_status()
        metrics = http.get("/metrics").text
    assert 'pando_gateway_link_connected{link="tokenizer",model="small"} 1.0' in metrics
    assert 'pando_gateway_completion_tokens_total{model="large"}' in metrics
