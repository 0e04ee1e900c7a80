from __future__ import annotations

import asyncio
import json

import pytest

from common.types import ErrorCode, RequestFailure
from tests.gateway.support import gateway_saying

AWAY = RequestFailure(ErrorCode.UNAVAILABLE, "the worker went away", retryable=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_sees_only_a_pause(stream: bool) -> None:
    """The same answer comes whether or not the pipeline breaks in the middle, streamed or whole."""
    undisturbed = await gateway_saying("Hel", "lo", " wor", "ld").chat(stream=stream, n=2, seed=1)
    gateway = gateway_saying("Hel", "lo", " wor", "ld")
    gateway.pipeline.pause_s = 0.05

    async def disturb() -> None:
        await gateway.pipeline.submissions(1)
        await asyncio.sleep(0.08)
        gateway.pipeline.lose(gateway.pipeline.submitted[0].request_id, AWAY)

    disturbing = asyncio.create_task(disturb())
    response = await gateway.chat(stream=stream, n=2, seed=1)
    await disturbing
    assert len(gateway.pipeline.submitted) > 1
    assert _contents(response.text) == _contents(undisturbed.text)


def _contents(text: str) -> dict[int, str]:
    contents: dict[int, str] = {}
    documents = text.removesuffix("data: [DONE]\n\n").split("data: ")[1:] if text.startswith("data: ") else [text]
    for document in documents:
        for choice in json.loads(document)["choices"]:
            part = choice.get("delta", choice.get("message"))
            contents[choice["index"]] = contents.get(choice["index"], "") + (part.get("content") or "")
            if choice["finish_reason"]:
                contents[choice["index"]] += f"|{choice['finish_reason']}"
    return contents
