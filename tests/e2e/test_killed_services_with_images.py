"""`kill -9` of any service but the worker in the middle of an answer to an image: the answer goes on, token for token.

`test_images.py` does it to the worker.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import SecretStr

from common.settings import GatewaySettings, ModelSettings, Settings, TokenizerSettings
from common.settings.gateway import StateSettings
from common.settings.tokenizer import ImageDecodingSettings
from deploy.supervisor.layout import free_port
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import save_seeing_model
from tests.e2e.test_images import WIDE, ask, body_of, message
from tests.fakes.redis_process import temporary_redis
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

TOKENS = 240
QUESTION = message(WIDE, "Tell a long story about it.")
SECRET = "a secret that has more than 32 characters"
RECOVERY_S = 180.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, run_root: Path) -> Iterator[Served]:
    """A deployment whose gateway keeps answers where the next one finds them."""
    with temporary_redis() as redis_process:
        state = StateSettings(url=SecretStr(redis_process.url), secret=SecretStr(SECRET))
        settings = Settings(
            model=ModelSettings(
                reference=str(save_seeing_model(tmp_path_factory.mktemp("seeing"))), dtype="float32", images="on"
            ),
            gateway=GatewaySettings(port=0, metrics_port=free_port("127.0.0.1"), anonymous="vouched", state=state),
            tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
        )
        yield from serve(settings, run_root)


def resumptions(served: Served) -> float:
    """Return the number of answers that the gateway has submitted again."""
    port = served.deployment.layout.find("gateway").settings.gateway.metrics_port
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=30).text
    return sum(map(float, re.findall(r"^pando_gateway_resumptions_total{[^}]*} (\S+)", metrics, re.MULTILINE)))


class Client:
    """A client of one streamed chat: it has the tokens of all its connections, and the last event's id."""

    def __init__(self, served: Served, user: str) -> None:
        self.tokens: list[int] = []
        self.is_complete = False
        self._served = served
        self._body = body_of(served, user, QUESTION, tokens=TOKENS) | {"stream": True}
        self._last_id: str | None = None

    def events(self) -> Iterator[int]:
        """Receive events until the stream's end, from the last event on, and yield the number of tokens so far."""
        headers = {} if self._last_id is None else {"last-event-id": self._last_id}
        with (
            self._served.http() as http,
            http.stream("POST", "/v1/chat/completions", json=self._body, headers=headers) as response,
        ):
            assert response.status_code == httpx.codes.OK, response.read()
            event_id = None
            for line in response.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    self.is_complete = True
                elif name == "data":
                    chunk: dict[str, Any] = json.loads(value)
                    assert "error" not in chunk, chunk
                    for choice in chunk["choices"]:
                        self.tokens += choice.get("token_ids") or []
                elif not line:
                    self._last_id = event_id
                    yield len(self.tokens)


@pytest.mark.extended
@pytest.mark.parametrize("dies", ["tokenizer", "scheduler", "detokenizer", "gateway"])
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_an_answer_to_an_image_goes_on_after_a_service_has_died(recorded: Served, dies: str, is_known: bool) -> None:
    deployment, user = recorded.deployment, f"{dies} {is_known}"
    wait_until(recorded.is_ready, RECOVERY_S)
    whole = ask(recorded, "undisturbed", QUESTION, tokens=TOKENS)["choices"][0]["token_ids"]
    assert len(whole) == TOKENS
    assert len(set(whole[TOKENS // 2 :])) > 2, "tokens of an answer that has lost its place or its picture differ"
    if is_known:
        # The second request names the picture, which no service but the tokenizer and the scheduler has.
        ask(recorded, user, message(WIDE, "What is it?"), tokens=1)
    resumed = resumptions(recorded)
    restarts, client, killed_at = deployment.restarts_of(dies), Client(recorded, user), 0
    try:
        for tokens in client.events():
            if tokens and not killed_at:
                deployment.kill(dies)
                killed_at = tokens
                if dies == "tokenizer":
                    # It has done its part of this answer, whose tokens go on without it.
                    assert recorded.state().running_rows == 1
    except httpx.TransportError:
        assert dies == "gateway"
    assert 0 < killed_at < TOKENS
    assert client.is_complete == (dies != "gateway")
    wait_until(lambda: deployment.restarts_of(dies) > restarts, RECOVERY_S)
    wait_until(recorded.is_ready, RECOVERY_S)
    if dies == "gateway":
        assert len(client.tokens) < TOKENS
        for _ in client.events():
            pass
        assert client.is_complete
    if dies in ("scheduler", "detokenizer"):
        assert resumptions(recorded) > resumed
    assert client.tokens == whole
    with recorded.leaving_nothing_behind():
        assert ask(recorded, user, QUESTION, tokens=TOKENS)["choices"][0]["token_ids"] == whole
