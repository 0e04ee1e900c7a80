from __future__ import annotations

import pytest

from common.errors import UnavailableError
from common.types import ErrorCode, RequestFailure
from tests.fakes.pipeline import rejects
from tests.gateway.support import FakedGateway, error_of, faked, gateway_saying


@pytest.fixture
def gateway() -> FakedGateway:
    return gateway_saying("x")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RequestFailure(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long", "messages"), 400, "context_length_exceeded"),
        (RequestFailure(ErrorCode.INVALID_REQUEST, "bad id", "prompt"), 400, None),
        (RequestFailure(ErrorCode.MODEL_NOT_FOUND, "no model"), 404, "model_not_found"),
        (RequestFailure(ErrorCode.QUEUE_FULL, "full", retryable=True, retry_after_ms=2500), 429, "rate_limit_exceeded"),
        (RequestFailure(ErrorCode.INTERNAL, "a defect"), 500, "internal_error"),
    ],
)
async def test_a_rejection_by_the_pipeline_becomes_its_http_status(
    failure: RequestFailure, status: int, code: str | None, stream: bool
) -> None:
    response = await faked(rejects(failure)).chat(stream=stream)
    error = error_of(response, status)
    assert error["code"] == code
    assert error["param"] == failure.param
    assert error["message"] == failure.message


async def test_full_queue_says_when_to_come_back() -> None:
    failure = RequestFailure(ErrorCode.QUEUE_FULL, "full", retryable=True, retry_after_ms=2500)
    response = await faked(rejects(failure)).chat()
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2500"
    assert response.headers["x-should-retry"] == "true"


async def test_a_defect_should_not_be_repeated() -> None:
    response = await faked(rejects(RequestFailure(ErrorCode.INTERNAL, "a defect"))).chat()
    assert response.headers["x-should-retry"] == "false"


async def test_unreachable_tokenizer_is_503_with_retry_after(gateway: FakedGateway) -> None:
    gateway.model.error = UnavailableError("the tokenizer is away")
    response = await gateway.chat()
    assert error_of(response, 503)["code"] == "service_unavailable"
    assert response.headers["retry-after"] == "1"


async def test_an_internal_defect_is_a_well_formed_500(gateway: FakedGateway) -> None:
    gateway.model.error = None
    gateway.model.card = None  # type: ignore[assignment]  # the defect
    response = await gateway.chat()
    error = error_of(response, 500)
    assert error["code"] == "internal_error"
    assert "None" not in error["message"]


async def test_more_open_requests_than_allowed_are_429() -> None:
    gateway = gateway_saying("x", max_open_requests=2)
    assert (await gateway.complete(prompt=["a", "b"])).status_code == 200
    error_of(await gateway.complete(prompt=["a", "b", "c"]), 429)
