from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING

import pytest

from common.types import ErrorCode, RequestFailure
from tests.gateway.support import events, gateway_saying

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.requests import GenerateRequest
    from tests.fakes.pipeline import Event

AWAY = RequestFailure(ErrorCode.UNAVAILABLE, "the worker went away", retryable=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_sees_only_a_pause(stream: bool) -> None:
    """The same answer comes whether or not the pipeline breaks in the middle, streamed or whole."""
    undisturbed = await gateway_saying("Hel", "lo", " wor", "ld").chat(stream=stream, n=2, seed=1)
    gateway = gateway_saying("Hel", "lo", " wor", "ld")
    script = gateway.pipeline.script
    assert script is not None

    def broken(request: GenerateRequest) -> Iterator[Event]:
        if len(gateway.pipeline.submitted) > 1:
            yield from script(request)
            return
        # The admission, the first word of both choices, and the second of one.
        yield from islice(script(request), 4)
        gateway.pipeline.lose(request.request_id, AWAY)

    gateway.pipeline.script = broken
    response = await gateway.chat(stream=stream, n=2, seed=1)
    assert len(gateway.pipeline.submitted) > 1
    assert _contents(response.text) == _contents(undisturbed.text)


def _contents(text: str) -> dict[int, str]:
    contents: dict[int, str] = {}
    documents = list(events(text))[:-1] if text.endswith("\n\n") else [text]
    for document in documents:
        for choice in json.loads(document)["choices"]:
            part = choice.get("delta", choice.get("message"))
            contents[choice["index"]] = contents.get(choice["index"], "") + (part.get("content") or "")
            if choice["finish_reason"]:
                contents[choice["index"]] += f"|{choice['finish_reason']}"
    return contents
