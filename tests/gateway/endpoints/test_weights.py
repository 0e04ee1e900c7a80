"""The endpoint that replaces weights, and the version that responses carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.deltas import Delta
from common.errors import InvalidRequestError, UnavailableError
from gateway.pipeline.port import WeightsUpdate
from tests.fakes.pipeline import says
from tests.gateway.support import HELLO, faked, gateway_saying

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.errors import PandoError
    from common.requests import GenerateRequest
    from common.types import Admission

PATH = "/update_weights_from_disk"


@pytest.mark.parametrize(
    ("fields", "update"),
    [
        ({}, WeightsUpdate("/weights")),
        ({"mode": "recompute", "weight_version": "7"}, WeightsUpdate("/weights", "", "recompute", "7")),
        ({"load_format": "safetensors"}, WeightsUpdate("/weights", "safetensors")),
        ({"abort_all_requests": True}, WeightsUpdate("/weights", mode="abort")),
        # Fields of SGLang's that change nothing here.
        ({"flush_cache": True, "is_async": False}, WeightsUpdate("/weights")),
    ],
)
async def test_an_update_is_passed_on(fields: dict[str, object], update: WeightsUpdate) -> None:
    gateway = gateway_saying("x")
    response = await gateway.post(PATH, {"model_path": "/weights", **fields})
    assert response.status_code == 200
    assert gateway.administration.updates == [update]
    assert response.json() == {
        "success": True,
        "message": "the weights of 1 scheduler groups are replaced",
        "num_paused_requests": 3,
        "weight_version": update.version or "1",
        "paused_seconds": 0.25,
        "loaded_beside": True,
    }


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidRequestError("it lacks tensors"), 400), (UnavailableError("another update"), 503)]
)
async def test_a_failure_is_told_in_the_shape_of_the_answer(error: PandoError, status: int) -> None:
    gateway = gateway_saying("x")
    gateway.administration.refusal = error
    response = await gateway.post(PATH, {"model_path": "/weights"})
    assert response.status_code == status
    assert response.json() == {"success": False, "message": str(error), "num_paused_requests": 0}


@pytest.mark.parametrize("body", [{}, {"model_path": 3}, {"model_path": "/weights", "mode": "later"}])
async def test_a_malformed_body_is_refused(body: dict[str, object]) -> None:
    gateway = gateway_saying("x")
    assert (await gateway.post(PATH, body)).status_code == 400
    assert not gateway.administration.updates


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/generate": {"text": "Hi"},
}


def weighted(request: GenerateRequest) -> Iterable[Delta | Admission]:
    """Answer as a pipeline whose scheduler names its weights."""
    for event in says("a", "b")(request):
        is_told = isinstance(event, Delta) and (event.finish or event.prompt_usage)
        yield event._replace(weight_version="tuesday") if isinstance(event, Delta) and is_told else event


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_responses_name_the_weights(path: str, stream: bool) -> None:
    gateway = faked(weighted)
    options = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    response = await gateway.post(path, {"model": "tiny", **BODIES[path], "stream": stream, **options})
    assert response.status_code == 200, response.text
    if stream:
        assert '"weight_version":"tuesday"' in response.text
    else:
        answer = response.json()
        assert (answer["meta_info"] if path == "/generate" else answer)["weight_version"] == "tuesday"
