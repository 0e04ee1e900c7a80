"""`kill -9` of any one service: the system serves again within seconds, and open requests end instead of hanging."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.gateway.support import events
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.e2e.served import Served

SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
RECOVERY_S = 180.0
# Long enough that a service is killed before the end.
TOKENS = 8000


def serves(served: Served) -> bool:
    try:
        return bool(served.complete("The capital of France is", max_tokens=2))
    except httpx.HTTPError:
        return False


def outcome(stream: str) -> str:
    """Return `answer` for a stream with all tokens, `error` for one that ends with an error, else the stream's end."""
    sent = list(events(stream))
    if sent[-1] != "[DONE]":
        return stream[-500:]
    parts = [json.loads(event) for event in sent[:-1]]
    errors = [part["error"] for part in parts if "error" in part]
    if errors:
        return "error" if len(errors) == 1 and errors[0]["message"] and "error" in parts[-1] else stream[-500:]
    reasons = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
    whole = reasons == ["length"] and parts[-1]["usage"]["completion_tokens"] == TOKENS
    return "answer" if whole else stream[-500:]


def kill_and_wait_until_replaced(served: Served, name: str) -> None:
    before = served.deployment.pid_of(name)
    served.deployment.kill(name)
    wait_until(lambda: served.deployment.pid_of(name) not in (None, before), RECOVERY_S)


@pytest.mark.parametrize("name", SERVICES)
def test_a_killed_service_recovers_and_an_open_request_ends_with_answer_or_error(
    served_fake: Served, name: str
) -> None:
    wait_until(lambda: serves(served_fake), RECOVERY_S)
    ended: list[str] = []
    body = {"model": served_fake.model, "prompt": "Hi", "max_tokens": TOKENS, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip

    def ask() -> None:
        try:
            with httpx.stream("POST", f"{served_fake.url}/v1/completions", json=body, timeout=RECOVERY_S) as answer:
                ended.append(outcome("".join(f"{line}\n" for line in answer.iter_lines())))
        except httpx.TimeoutException:
            ended.append("hung")
        except httpx.HTTPError as error:
            ended.append(f"connection: {error}")

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: served_fake.state().running_rows > 0 or bool(ended), timeout_s=120)
    kill_and_wait_until_replaced(served_fake, name)
    asking.join(timeout=2 * RECOVERY_S)
    assert ended, "the request neither ended nor failed"
    # With the gateway its connections are gone.
    assert ended[0] in ("answer", "error") or (name == "gateway" and ended[0].startswith("connection")), ended[0]
    wait_until(lambda: serves(served_fake), RECOVERY_S)
    wait_until(served_fake.is_idle, timeout_s=120, what=lambda: str(served_fake.state(include_requests=True)))


def test_an_answer_to_a_later_turn_of_a_session_goes_on_after_its_scheduler_s_death(served_fake: Served) -> None:
    wait_until(lambda: serves(served_fake), RECOVERY_S)
    with served_fake.http() as http:
        session = http.post("/open_session", json={}).json()
        # Of the fake, a token depends on its position and the seed.
        sampling = {"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 5}
        body: dict[str, Any] = {
            "input_ids": list(range(500, 520)),
            "sampling_params": sampling,
            "session_params": {"id": session},
        }
        first = http.post("/generate", json=body).json()
        whole = [*body["input_ids"], *first["output_ids"], 7, 8, 9]
        sampling["max_new_tokens"] = 1500
        expected = http.post("/generate", json={"input_ids": whole, "sampling_params": sampling}).json()["output_ids"]
        later = {"id": session, "rid": first["meta_info"]["id"]}
        body = {"input_ids": [7, 8, 9], "sampling_params": sampling, "session_params": later, "stream": True}
        with http.stream("POST", "/generate", json=body, timeout=RECOVERY_S) as answer:
            lines = answer.iter_lines()
            wait_until(lambda: next(lines).startswith("data: "))
            kill_and_wait_until_replaced(served_fake, "scheduler")
            sent = [line.removeprefix("data: ") for line in lines if line]
        assert sent[-1] == "[DONE]"
        answered = json.loads(sent[-2])
        assert answered["meta_info"]["prompt_tokens"] == len(whole)
        assert answered["output_ids"] == expected
        wait_until(lambda: serves(served_fake), RECOVERY_S)
        body = {"input_ids": [1], "sampling_params": sampling, "session_params": later}
        assert "is not open" in http.post("/generate", json=body).json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "worker",
        pytest.param("scheduler", marks=pytest.mark.extended),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("gateway", "tokenizer", "detokenizer")),
    ],
)
def test_the_real_model_answers_again_and_rightly(served: Served, name: str) -> None:
    kill_and_wait_until_replaced(served, name)
    wait_until(lambda: serves(served), RECOVERY_S)
    assert served.complete(max_tokens=3).startswith(" Paris")
    wait_until(served.is_idle, timeout_s=120, what=lambda: str(served.state(include_requests=True)))


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "worker", *(pytest.param(name, marks=pytest.mark.extended) for name in ("scheduler", "detokenizer"))],
)
def test_readiness_is_lost_while_a_service_is_down_and_returns_afterwards(served_fake: Served, name: str) -> None:
    wait_until(served_fake.is_ready, RECOVERY_S)
    served_fake.deployment.kill(name)
    wait_until(lambda: not served_fake.is_ready(), timeout_s=120, step_s=0.01)
    with served_fake.http() as http:
        assert http.get("/health").status_code == httpx.codes.OK
    wait_until(served_fake.is_ready, RECOVERY_S)
    # What /ready has said is true: this very request is served.
    assert served_fake.complete("Hi", max_tokens=2)


def test_a_service_that_reports_ready_answers_at_once(served_fake: Served) -> None:
    assert served_fake.is_ready()
    assert served_fake.complete("Hi", max_tokens=2)
