"""/generate and its companions, as SGLang's test kits call them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from common.requests import TokenPrompt
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import LENGTH, logprob, says
from tests.gateway.support import FakedGateway, error_of, events, faked, gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

    import httpx


async def generate(gateway: FakedGateway, **body: Any) -> httpx.Response:
    return await gateway.post("/generate", body)


async def test_one_text_gives_one_object_with_its_account() -> None:
    gateway = faked(says(" Paris", ".", finish=LENGTH))
    answer = (
        await generate(gateway, text="The capital", sampling_params={"max_new_tokens": 2, "temperature": 0})
    ).json()
    meta = answer.pop("meta_info")
    assert answer == {"text": " Paris.", "output_ids": [1000, 1001]}
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (7, 2, 4)
    [request] = gateway.pipeline.submitted
    assert (request.options.stop.max_tokens, request.options.sampling.temperature) == (2, 0)


async def test_a_batch_and_several_choices_give_lists() -> None:
    gateway = gateway_saying("x")
    assert [entry["text"] for entry in (await generate(gateway, text=["a", "b"])).json()] == ["x", "x"]
    assert len((await generate(gateway, text=["a"])).json()) == 1
    assert len((await generate(gateway, text="a", sampling_params={"n": 3})).json()) == 3
    assert len((await generate(gateway, input_ids=[[1, 2], [3]])).json()) == 2
    assert gateway.pipeline.submitted[-1].prompt == TokenPrompt((3,))
    assert (await generate(gateway, input_ids=[1, 2])).json()["text"] == "x"


async def test_a_stream_carries_the_whole_text_so_far() -> None:
    response = await generate(gateway_saying("a", "b"), text="x", stream=True)
    *chunks, done = list(events(response.text))
    assert [orjson.loads(chunk)["text"] for chunk in chunks] == ["a", "ab"]
    metas = [orjson.loads(chunk)["meta_info"] for chunk in chunks]
    assert [meta["finish_reason"] for meta in metas] == [None, {"type": "stop", "matched": None}]
    assert metas[0]["prompt_tokens"] == 7
    assert done == "[DONE]"


async def test_log_probabilities_have_sglangs_shape() -> None:
    gateway = faked(says("a", logprobs=[logprob("a", -0.5, ("a", -0.5), ("b", -1.5))]))
    meta = (await generate(gateway, text="x", return_logprob=True, top_logprobs_num=2)).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 0, "a"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 0, "a"], [-1.5, 1, "b"]]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"text": "a", "input_ids": [1]}, None),
        ({"text": 3}, "text"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "rid": "a\x00"}, "rid"),
    ],
)
async def test_invalid_fields_of_generate_are_named(body: dict[str, Any], param: str | None) -> None:
    assert error_of(await generate(gateway_saying("x"), **body), 400)["param"] == param


async def test_a_request_is_aborted_by_its_exact_id_only() -> None:
    gateway = faked(None)
    asking = asyncio.create_task(generate(gateway, text="x", rid="job-1"))
    await gateway.pipeline.submissions(1)
    for rid in ("job", "job-", "job-11", "JOB-1"):
        assert (await gateway.post("/abort_request", {"rid": rid})).json() == {"aborted": 0}
    assert (await gateway.post("/abort_request", {"rid": "job-1"})).json() == {"aborted": 1}
    assert "aborted" in error_of(await asking, 400)["message"]
    assert len(gateway.pipeline.aborted) == 1


async def test_an_id_to_abort_that_no_request_can_have_is_refused() -> None:
    assert error_of(await faked(None).post("/abort_request", {"rid": "x" * 20_000}), 400)["param"] == "rid"


async def test_keys_without_admin_rights_cannot_abort_for_others_or_administrate(tmp_path: Path) -> None:
    keys = [ApiKey(name, hash_of(name), "acme", admin=name == "root") for name in ("ann", "bob", "root")]
    save_keys(tmp_path / "keys.toml", keys)
    gateway = faked(None, keys_file=tmp_path / "keys.toml")

    def bearer(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {name}"}

    asking = asyncio.create_task(gateway.post("/generate", {"text": "x", "rid": "j"}, bearer("ann")))
    await gateway.pipeline.submissions(1)
    assert (await gateway.post("/abort_request", {"rid": "j"}, bearer("bob"))).json() == {"aborted": 0}
    for path in ("/flush_cache", "/get_server_info", "/server_info"):
        assert (await gateway.get(path)).status_code == 401
        assert (await gateway.get(path, bearer("ann"))).status_code == 403
        assert (await gateway.get(path, bearer("root"))).status_code == 200
    assert (await gateway.post("/abort_request", {"abort_all": True}, bearer("ann"))).status_code == 403
    assert (await gateway.post("/abort_request", {"rid": "j"}, bearer("ann"))).json() == {"aborted": 1}
    await asking


async def test_remote_and_cross_site_callers_cannot_administer_a_gateway_without_keys() -> None:
    gateway = gateway_saying("x")
    assert (await gateway.post("/flush_cache", {})).status_code == 200
    assert gateway.administration.flushes == 1
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert (await gateway.get("/flush_cache", elsewhere)).status_code == 403
    gateway.peer = "10.1.2.3"
    assert (await gateway.post("/flush_cache", {})).status_code == 403
    assert gateway.administration.flushes == 1


async def test_health_and_information() -> None:
    gateway = gateway_saying("x")
    assert (await gateway.get("/health_generate")).status_code == 200
    assert (await gateway.get("/get_model_info")).json()["model_path"] == "tiny"
    assert (await gateway.get("/get_server_info")).json()["internal_states"] == [
        {"running_rows": 0, "weight_version": "default"}
    ]
    gateway.readiness.lacking = ["tokenizer: not connected"]
    assert (await gateway.get("/health_generate")).status_code == 503
    assert not gateway.pipeline.submitted
