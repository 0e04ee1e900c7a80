"""The ledger and budgets as clients meet them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from common.deltas import CachedPart, Delta, PromptUsage
from common.types import Admission, Finish, FinishReason
from gateway.delivery.answer_context import NOTED_AT_ONCE
from gateway.identity.keys import ApiKey, hash_of, save_keys
from gateway.ledger.entries import Tokens
from tests.fakes.pipeline import EMBEDDING, STOP, FakePipeline, says
from tests.gateway.support import HELLO, FakedGateway, error_of, faked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from common.requests import GenerateRequest

KEYS = [
    ApiKey("k1", hash_of("acme"), "acme", vouches_for_users=True),
    ApiKey("k2", hash_of("other"), "other"),
    ApiKey("k3", hash_of("root"), "root", admin=True),
]
# What the fake pipeline reports for each request.
PROMPT, CACHED = 7, 4


def gateway_with(tmp_path: Path, limits: str = "") -> FakedGateway:
    (tmp_path / "limits.toml").write_text(limits)
    save_keys(tmp_path / "keys.toml", KEYS)
    return faked(says("a", "b"), keys_file=tmp_path / "keys.toml", limits_file=tmp_path / "limits.toml")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(gateway: FakedGateway, key: str, **fields: object) -> httpx.Response:
    return await gateway.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, **fields}, bearer(key))


async def usage(gateway: FakedGateway, key: str, query: str = "") -> list[dict[str, Any]]:
    response = await gateway.get(f"/v1/usage?bucket_width=1d&limit=2{query}", headers=bearer(key))
    assert response.status_code == 200, response.text
    data: list[dict[str, Any]] = response.json()["data"]
    return data


async def test_the_ledger_is_the_sum_of_usages_and_shows_each_caller_its_own(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    for key, fields in (("acme", {"user": "ann"}), ("acme", {"user": "bob", "n": 2}), ("other", {"stream": True})):
        assert (await ask(gateway, key, **fields)).status_code == 200
    [everything] = await usage(gateway, "root")
    assert everything["requests"] == 3
    assert everything["prompt_tokens"] == 3 * PROMPT
    assert everything["cached_tokens"] == 3 * CACHED
    assert everything["output_tokens"] == 4 * 2
    own = await usage(gateway, "acme", "&group_by=tenant,subject")
    assert [(use["tenant"], use["requests"], use["output_tokens"]) for use in own] == [("acme", 1, 2), ("acme", 1, 4)]
    [others] = await usage(gateway, "other", "&group_by=tenant,model")
    assert (others["tenant"], others["model"], others["output_tokens"]) == ("other", "tiny", 2)


async def test_the_use_of_an_open_answer_is_noted_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.ledger.CHECKPOINT_S", 0)
    gateway = FakedGateway(FakePipeline())
    answers = gateway.context.answers
    noted: list[tuple[Tokens, bool]] = []
    checkpoints = 0

    async def commit() -> None:
        nonlocal checkpoints
        checkpoints += 1

    monkeypatch.setattr(answers.ledger, "note", lambda *given, has_ended: noted.append((given[3], has_ended)))
    monkeypatch.setattr(answers.ledger, "commit", commit)

    async def pass_checkpoints() -> None:
        last = checkpoints + 3
        async with asyncio.timeout(30):
            while checkpoints < last:  # noqa: ASYNC110  (checkpoints have no event)
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(answers.keep_ledger())
        answer = tasks.create_task(gateway.complete())
        [request] = await gateway.pipeline.submissions(1)
        await pass_checkpoints()
        assert noted == []
        gateway.pipeline.tell(Admission(request.request_id, PROMPT))
        await pass_checkpoints()
        assert noted == [(Tokens(1, PROMPT, 0, 0), False)]
        gateway.pipeline.tell(Delta(request.request_id, 0, 0, (1000,), "a", prompt_usage=PromptUsage(PROMPT, 0)))
        await pass_checkpoints()
        assert noted[1:] == [(Tokens(1, PROMPT, 0, 1), False)]
        gateway.pipeline.tell(Delta(request.request_id, 0, 1, (1001,), "b", finish=STOP))
        assert (await answer).status_code == 200
        keeper.cancel()
    assert noted[-1] == (Tokens(1, PROMPT, 0, 2), True)


async def test_tokens_are_delivered_between_the_notes_of_many_open_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.ledger.CHECKPOINT_S", 0)
    gateway = FakedGateway(FakePipeline())
    answers, turns = gateway.context.answers, 0
    noted: Counter[int] = Counter()
    monkeypatch.setattr(answers.ledger, "note", lambda *_given, has_ended: noted.update([turns]))

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(gateway.complete()) for _ in range(3 * NOTED_AT_ONCE)]
        for request in await gateway.pipeline.submissions(len(asked)):
            gateway.pipeline.tell(Admission(request.request_id, PROMPT))
        background = [tasks.create_task(count_turns()), tasks.create_task(answers.keep_ledger())]
        async with asyncio.timeout(30):
            while noted.total() < len(asked):  # noqa: ASYNC110  (notes have no event)
                await asyncio.sleep(0)
        assert max(noted.values()) <= NOTED_AT_ONCE
        for task in (*asked, *background):
            task.cancel()


async def test_openai_s_shape(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    await ask(gateway, "acme", user="ann")
    await ask(gateway, "other")
    path = f"/v1/organization/usage/completions?start_time={int(time.time()) - 86400}"
    page = (await gateway.get(f"{path}&group_by[]=project_id&models=tiny", headers=bearer("root"))).json()
    assert (page["object"], page["has_more"], page["next_page"]) == ("page", False, None)
    results = [result for bucket in page["data"] for result in bucket["results"]]
    assert [(each["project_id"], each["num_model_requests"], each["input_tokens"]) for each in results] == [
        ("acme", 1, PROMPT),
        ("other", 1, PROMPT),
    ]
    assert all(each["input_cached_tokens"] == CACHED and each["output_tokens"] == 2 for each in results)
    nothing = (await gateway.get(f"{path}&models=none", headers=bearer("root"))).json()
    assert all(not bucket["results"] for bucket in nothing["data"])


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("bucket_width=1m", "bucket_width"),
        ("limit=0", "limit"),
        ("limit=1000", "limit"),
        ("start_time=x", "start_time"),
        ("end_time=-1", "end_time"),
        ("group_by=tenant,text", "group_by"),
        ("tenants=acme", "tenants"),
    ],
)
async def test_wrong_parameters_are_refused(tmp_path: Path, query: str, param: str) -> None:
    response = await gateway_with(tmp_path).get(f"/v1/usage?{query}", headers=bearer("acme"))
    assert error_of(response, 400)["param"] == param


async def test_pages_continue_where_the_last_one_ended(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    path = "/v1/organization/usage/completions?start_time=864000&end_time=1209600&limit=2"
    starts, page = [], (await gateway.get(path, headers=bearer("root"))).json()
    while True:
        starts += [bucket["start_time"] for bucket in page["data"]]
        if not page["has_more"]:
            break
        page = (await gateway.get(f"{path}&page={page['next_page']}", headers=bearer("root"))).json()
    assert starts == [864000, 950400, 1036800, 1123200]


@pytest.mark.parametrize("period", ["day", "month"])
async def test_a_used_up_budget_gives_429_until_it_is_raised(tmp_path: Path, period: str) -> None:
    gateway = gateway_with(tmp_path, f"[tenants.acme]\ntokens_per_{period} = 9\n")
    assert (await ask(gateway, "acme", user="ann")).status_code == 200
    refused = await ask(gateway, "acme", user="bob")
    error = error_of(refused, 429)
    assert error["code"] == "insufficient_quota"
    assert f"9 tokens per {period}. It is renewed at 20" in error["message"]
    assert refused.headers["x-should-retry"] == "false"
    assert (await ask(gateway, "other")).status_code == 200
    assert len(gateway.pipeline.submitted) == 2


async def test_a_subject_s_budget_stops_only_that_subject(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path, "[default.each_user]\ntokens_per_day = 9\n")
    assert [(await ask(gateway, "acme", user=user)).status_code for user in ("ann", "bob", "ann")] == [200, 200, 429]


async def test_a_nearly_used_up_budget_lowers_the_rate(tmp_path: Path) -> None:
    limits = "tokens_per_day = 100\nthrottle_at = 0.25\nthrottled_requests_per_minute = 2\n"
    gateway = gateway_with(tmp_path, f"[tenants.acme]\n{limits}")
    # 9 tokens each: the fourth request is the first one beyond a quarter of the budget.
    statuses = [(await ask(gateway, "acme", user="ann")).status_code for _ in range(5)]
    assert statuses == [200] * 5
    refused = await ask(gateway, "acme", user="bob")
    assert "2 requests per minute" in error_of(refused, 429)["message"]
    assert int(refused.headers["retry-after"]) > 0
    assert (await ask(gateway, "other")).status_code == 200
    (tmp_path / "limits.toml").write_text(f"[tenants.acme]\n{limits.replace('100', '1000')}")
    gateway_again = gateway_with(tmp_path, f"[tenants.acme]\n{limits.replace('100', '1000')}")
    assert [(await ask(gateway_again, "acme")).status_code for _ in range(3)] == [200] * 3


async def test_requests_say_whose_budget_is_nearly_used_up(tmp_path: Path) -> None:
    limits = "[tenants.acme]\ntokens_per_day = 50\nthrottle_at = 0.5\nthrottled_weight = 0.1\n"
    subjects = '[tenants.acme.subjects."user/bob"]\ntokens_per_month = 100\nthrottle_at = 0.05\n'
    gateway = gateway_with(tmp_path, limits + subjects)
    # 9 tokens each.
    for user in ("ann", "bob", "bob", "ann", "ann"):
        assert (await ask(gateway, "acme", user=user)).status_code == 200
    assert (await ask(gateway, "other")).status_code == 200
    options = [request.options for request in gateway.pipeline.submitted]
    assert [each.tenant_is_throttled for each in options] == [False, False, False, True, True, False]
    assert [each.subject_is_throttled for each in options] == [False, False, True, False, False, False]


def generated(request: GenerateRequest) -> Iterator[Delta]:
    """Answer with three tokens, one forced and one drafted, or with an embedding."""
    parts = (CachedPart("device", "public", 3), CachedPart("host", "private", 1))
    usage = PromptUsage(PROMPT, CACHED, parts)
    if request.options.pooling is not None:
        finish = Finish(FinishReason.STOP, embedding=EMBEDDING)
        yield Delta(request.request_id, 0, 0, (), "", prompt_usage=usage, finish=finish)
        return
    yield Delta(request.request_id, 0, 0, (1, 2), "ab", prompt_usage=usage, forced_tokens=1)
    yield Delta(request.request_id, 0, 2, (3,), "c", finish=STOP, drafted_tokens=1)


async def test_use_is_shown_by_operation_and_by_tier_of_the_cache(tmp_path: Path) -> None:
    save_keys(tmp_path / "keys.toml", KEYS)
    gateway = faked(generated, keys_file=tmp_path / "keys.toml")
    key = bearer("other")
    text = {"model": "tiny", "prompt": "x", "max_tokens": 3}
    for path, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": HELLO}),
        ("/v1/completions", text),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 3}),
        ("/generate", {"text": "x"}),
        ("/v1/embeddings", {"model": "tiny", "input": "x"}),
        ("/v1/score", {"model": "tiny", "text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"model": "tiny", "query": "x", "documents": ["y"]}),
    ):
        response = await gateway.post(path, body, key)
        assert response.status_code == 200, response.text
    uses = {use.pop("operation"): use for use in await usage(gateway, "other", "&group_by=operation,adapter,batch")}
    assert set(uses) == {"chat", "completions", "responses", "messages", "generate", "embeddings", "score", "rerank"}
    chat = uses["chat"]
    assert (chat["adapter"], chat["batch"], chat["requests"]) == (None, False, 1)
    assert (chat["output_tokens"], chat["forced_tokens"], chat["drafted_tokens"]) == (3, 1, 1)
    assert chat["cached_tokens_by_tier"] == {
        "device": {"public": 3, "tenant": 0, "private": 0},
        "host": {"public": 0, "tenant": 0, "private": 1},
        "storage": {"public": 0, "tenant": 0, "private": 0},
    }
    assert all(uses[operation] | {"output_tokens": 3} == chat for operation in ("completions", "responses", "generate"))
    assert (uses["embeddings"]["prompt_tokens"], uses["embeddings"]["output_tokens"]) == (PROMPT, 0)
    assert uses["score"]["requests"] == uses["rerank"]["requests"] == 2, "an embedding of each text"
    counted = {}
    for kind in ("completions", "embeddings"):
        path = f"/v1/organization/usage/{kind}?start_time={int(time.time()) - 86400}"
        page = (await gateway.get(path, headers=key)).json()
        [result] = [result for bucket in page["data"] for result in bucket["results"]]
        assert result["object"] == f"organization.usage.{kind}.result"
        counted[kind] = result["num_model_requests"], result["input_tokens"], result.get("output_tokens")
    assert counted == {"completions": (5, 5 * PROMPT, 15), "embeddings": (1, PROMPT, None)}
    shown = gateway.context.metrics.exposition()[0].decode()
    assert 'pando_gateway_tenant_cached_tokens_total{level="public",tenant="other",tier="device"} 30.0' in shown
    assert 'pando_gateway_tenant_tokens_total{kind="forced",tenant="other"} 5.0' in shown


async def test_openai_s_filter_of_batches(tmp_path: Path) -> None:
    gateway = gateway_with(tmp_path)
    await ask(gateway, "other")
    path = f"/v1/organization/usage/completions?start_time={int(time.time()) - 86400}&group_by=batch"
    for flag, batches in (("false", [False]), ("true", [])):
        page = (await gateway.get(f"{path}&batch={flag}", headers=bearer("other"))).json()
        assert [result["batch"] for bucket in page["data"] for result in bucket["results"]] == batches
    assert error_of(await gateway.get(f"{path}&batch=1", headers=bearer("other")), 400)["param"] == "batch"
