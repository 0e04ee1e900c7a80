from __future__ import annotations

import re

import orjson
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from common.errors import UnavailableError
from gateway.metrics import FewLabels
from gateway.server.middleware import TRACEPARENT, trace_of
from tests.gateway.support import HELLO, error_of, gateway_saying


async def test_alive_even_if_nothing_can_be_served() -> None:
    gateway = gateway_saying("x")
    gateway.readiness.lacking = ["tokenizer: not connected"]
    assert (await gateway.get("/health")).status_code == 200
    response = await gateway.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "missing": ["tokenizer: not connected"]}


async def test_ready_when_nothing_is_missing() -> None:
    response = await gateway_saying("x").get("/ready")
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "missing": []}


async def test_metrics_count_requests_and_tokens() -> None:
    gateway = gateway_saying("a", "b")
    await gateway.chat(stream=True)
    await gateway.chat(temperature=-1)
    text = (await gateway.get("/metrics")).text
    assert 'pando_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'pando_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'pando_gateway_completion_tokens_total{model="tiny"} 2.0' in text
    assert 'pando_gateway_prompt_tokens_total{model="tiny"} 7.0' in text
    assert 'pando_gateway_cached_prompt_tokens_total{model="tiny"} 4.0' in text
    assert "pando_gateway_open_requests 0.0" in text
    assert 'pando_gateway_time_to_first_token_seconds_count{model="tiny"} 1.0' in text
    assert 'pando_gateway_inter_token_latency_seconds_count{model="tiny"} 1.0' in text


@pytest.mark.parametrize(
    ("path", "level"), [("/health", "debug"), ("/ready", "debug"), ("/metrics", "debug"), ("/v1/models", "info")]
)
async def test_probe_requests_are_logged_at_debug_level_only(path: str, level: str) -> None:
    with capture_logs() as events:
        await gateway_saying("x").get(path)
    assert [event["log_level"] for event in events if event["event"] == "request.finished"] == [level]


async def test_log_lines_carry_the_request_s_id_as_text() -> None:
    gateway = gateway_saying("x")
    with capture_logs(processors=[merge_contextvars]) as events:
        named = await gateway.get("/v1/models", headers={"x-request-id": "mine"})
        unnamed = await gateway.get("/v1/models")
    ids = [named.headers["x-request-id"], unnamed.headers["x-request-id"]]
    assert ids[0] == "mine"
    assert [event["http_request_id"] for event in events] == ids


async def test_models_show_the_context_length() -> None:
    gateway = gateway_saying("x")
    (card,) = (await gateway.get("/v1/models")).json()["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == 2048
    assert (await gateway.get("/v1/models/tiny")).json() == card
    missing = await gateway.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_model_card_outlives_the_tokenizer() -> None:
    gateway = gateway_saying("x")
    assert (await gateway.get("/v1/models")).status_code == 200
    gateway.model.error = UnavailableError("away")
    assert (await gateway.get("/v1/models")).status_code == 200
    assert gateway.model.questions == 1


async def test_tokenize_and_detokenize() -> None:
    gateway = gateway_saying("x")
    encoded = (await gateway.post("/tokenize", {"prompt": "hi", "return_token_strs": True})).json()
    assert encoded == {"count": 3, "max_model_len": 2048, "tokens": [2, 104, 105], "token_strs": ["\x02", "h", "i"]}
    plain = (await gateway.post("/tokenize", {"prompt": "hi", "add_special_tokens": False})).json()
    assert plain == {"count": 2, "max_model_len": 2048, "tokens": [104, 105]}
    chat = (await gateway.post("/tokenize", {"model": "tiny", "messages": HELLO})).json()
    assert chat["count"] == len("<user>Hello")
    decoded = (await gateway.post("/detokenize", {"tokens": [2, 104, 105]})).json()
    assert decoded == {"prompt": "\x02hi"}
    for wrong in (-1, 2**31 - 1):
        assert error_of(await gateway.post("/detokenize", {"tokens": [wrong]}), 400)["param"].startswith("tokens")
    assert (await gateway.post("/tokenize", {"model": "other", "prompt": "x"})).status_code == 404


async def test_api_description_shows_the_body_of_every_endpoint_that_has_one() -> None:
    description = (await gateway_saying("x").get("/openapi.json")).json()
    schemas = description["components"]["schemas"]
    posts = {path: methods["post"] for path, methods in description["paths"].items() if "post" in methods}
    without = {
        "/flush_cache",
        "/sleep",
        "/wake_up",
        "/v1/responses/{response_id}/cancel",
        "/v1/batches/{batch_id}/cancel",
    }
    assert {path for path, operation in posts.items() if "requestBody" not in operation} == without
    bodies = {}
    for path in posts.keys() - without:
        body = posts[path]["requestBody"]
        assert body["required"]
        names = re.findall(r"#/components/schemas/(\w+)", orjson.dumps(body).decode())
        bodies[path] = set().union(*(schemas[name]["properties"] for name in names))
    assert len(bodies) == 31
    assert {"messages", "temperature", "tools"} <= bodies["/v1/chat/completions"]
    assert {"messages", "prompt"} <= bodies["/tokenize"]
    assert "max_tokens" in schemas["MessagesBody"]["required"]
    assert "max_tokens" not in schemas["CountTokensBody"]["required"]
    # Nothing refers to what is not there.
    assert set(re.findall(r"#/components/schemas/(\w+)", orjson.dumps(description).decode())) <= schemas.keys()


async def test_api_description_shows_the_shape_of_errors_and_streams() -> None:
    description = (await gateway_saying("x").get("/openapi.json")).json()
    operations = [operation for methods in description["paths"].values() for operation in methods.values()]
    assert len(operations) == 67
    for operation in operations:
        assert operation["responses"].keys() == {"200", "4XX", "503"}
        shape = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert shape["properties"]["error"]["required"] == ["message", "type", "param", "code"]
    streaming = {
        path
        for path, methods in description["paths"].items()
        for operation in methods.values()
        if "text/event-stream" in operation["responses"]["200"]["content"]
    }
    continued = "/v1/responses/{response_id}"
    generating = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
    assert streaming == generating | {continued}


@pytest.mark.parametrize("given", ["abc-123", "req_1.2:3/4+5=@x", "a" * 128])
async def test_sane_request_id_of_the_client_is_kept(given: str) -> None:
    response = await gateway_saying("x").get("/health", {"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "a;b", "é"])
async def test_other_request_ids_are_replaced(given: str) -> None:
    async with gateway_saying("x").client() as client:
        response = await client.get("/health", headers={b"x-request-id": given.encode("latin-1")})
    assert re.fullmatch(r"req_[0-9a-f]{32}", response.headers["x-request-id"])


async def test_request_id_is_on_streams_too() -> None:
    assert (await gateway_saying("x").chat(stream=True)).headers["x-request-id"]


async def test_only_pages_of_named_origins_may_call_from_browsers() -> None:
    gateway = gateway_saying("x", cors_origins=("https://chat.example",))
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with gateway.client() as client:
        for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://other.example", None)):
            preflight = await client.options("/v1/chat/completions", headers={"origin": origin, **asking})
            assert preflight.headers.get("access-control-allow-origin") == allowed
            assert preflight.is_success == (allowed is not None)
            body = {"model": "tiny", "prompt": "x"}
            answer = await client.post("/v1/completions", json=body, headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed
            # Of a refusal, too, a page is told why.
            refused = await client.post("/v1/completions", json={}, headers={"origin": origin})
            assert refused.headers.get("access-control-allow-origin") == allowed
    assert "x-request-id" in answer.headers


def test_trace_of_the_caller_is_continued() -> None:
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace = trace_of({"traceparent": caller, "tracestate": "vendor=1"})
    match = TRACEPARENT.fullmatch(trace.traceparent)
    assert match is not None
    assert match[2] == "0af7651916cd43dd8448eb211c80319c"
    assert match[3] != "b7ad6b7169203331"
    assert match[4] == "01"
    assert trace.tracestate == "vendor=1"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-0-0-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ],
)
def test_malformed_trace_begins_a_new_one(given: str) -> None:
    trace = trace_of({"traceparent": given, "tracestate": "vendor=1"})
    assert TRACEPARENT.fullmatch(trace.traceparent)
    assert "0af7651916cd43dd8448eb211c80319c" not in trace.traceparent
    assert trace.tracestate is None


async def test_refusals_are_counted_by_tenant_and_cause() -> None:
    gateway = gateway_saying("x")
    for cause in ("limit", "queue_full"):
        gateway.metrics.refuse("acme", cause)
    gateway.metrics.refuse(None, "unauthenticated")
    text = (await gateway.get("/metrics")).text
    assert 'pando_gateway_refusals_total{cause="limit",tenant="acme"} 1.0' in text
    assert 'pando_gateway_refusals_total{cause="unauthenticated",tenant=""} 1.0' in text


def test_the_number_of_labels_is_bounded() -> None:
    labels = FewLabels(2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]
