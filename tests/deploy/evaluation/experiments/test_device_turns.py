"""Requests of the experiment, to a server that is made up."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest

from deploy.evaluation.experiments.device_turns import TOKENS, ChangedAnswerError, Models


class Server:
    """Answers with tokens that depend on the model and the prompt, until it is told to give others."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.prompts: set[tuple[int, ...]] = set()
        self.added = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked[body["model"]] += 1
        self.prompts.add(tuple(body["prompt"]))
        answer = [(body["prompt"][0] + self.added + len(body["model"])) % 100] * body["max_tokens"]
        return httpx.Response(200, json={"choices": [{"token_ids": answer}]})


async def test_single_requests_are_compared_by_model_and_others_are_not() -> None:
    server = Server()
    async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server)) as client:
        models = Models(client, ["small", "larger"])
        for name in ("small", "larger", "small"):
            assert await models.ask(name) > 0
        server.added = 1
        assert await models.ask_all(3) > 0
        assert server.asked == {"small": 5, "larger": 4}
        assert len(server.prompts) == 3
        with pytest.raises(ChangedAnswerError, match=rf"small answered \[6(, 6){{{TOKENS - 1}}}\], and \[5"):
            await models.ask("small")


async def test_a_refused_request_is_an_error() -> None:
    async with httpx.AsyncClient(
        base_url="http://server", transport=httpx.MockTransport(lambda _: httpx.Response(503))
    ) as client:
        with pytest.raises(httpx.HTTPStatusError):
            await Models(client, ["small", "larger"]).ask("small")
