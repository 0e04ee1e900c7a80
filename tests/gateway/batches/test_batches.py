"""Files and batches over HTTP, and the gateways that work on them."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.deltas import Delta
from common.names import MAX_NAME_BYTES
from common.settings import BatchesSettings
from common.types import Finish, FinishReason
from gateway.assembly import build_runner
from gateway.batches import runner as runner_module
from gateway.batches.batches import ENDED
from gateway.batches.files import FileOwner
from gateway.batches.lines import ENDPOINTS, REFUSED_FIELDS, BatchLineError, parse_line
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.fakes.pipeline import EMBEDDING, PROMPT
from tests.gateway.state.servers import working
from tests.gateway.support import FakedGateway, error_of, faked, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    import httpx

    from common.requests import GenerateRequest

ENDPOINT = "/v1/completions"
DOCUMENT = Path(__file__).parents[3] / "docs" / "batches.md"
ANN, BOB = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr(runner_module, "LEAST_WAIT_S", 0.01)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    save_keys(path, [ApiKey(name, hash_of(name), "acme") for name in ("ann", "bob")])
    return path


def line(number: int, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": f"Line {number}", **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[object]) -> bytes:
    return "\n".join(json.dumps(each) for each in lines).encode()


async def upload(
    gateway: FakedGateway, content: bytes, headers: dict[str, str] | None = None, purpose: str = "batch"
) -> httpx.Response:
    async with gateway.client() as client:
        return await client.post(
            "/v1/files", data={"purpose": purpose}, files={"file": ("in.jsonl", content)}, headers=headers
        )


async def create(gateway: FakedGateway, lines: Sequence[object], endpoint: str = ENDPOINT) -> str:
    file_id = (await upload(gateway, jsonl(lines))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}}
    response = await gateway.post("/v1/batches", body)
    assert response.status_code == 200, response.text
    assert response.json()["status"] == "validating"
    assert response.json()["metadata"] == {"a": "b"}
    return str(response.json()["id"])


@asynccontextmanager
async def running(gateway: FakedGateway) -> AsyncIterator[None]:
    runner = build_runner(gateway.app, gateway.context, gateway.settings)
    stopping = asyncio.Event()
    async with working(lambda: runner.run(stopping)):
        yield


async def retrieve(gateway: FakedGateway, batch_id: str) -> dict[str, Any]:
    return dict((await gateway.get(f"/v1/batches/{batch_id}")).json())


async def ended(gateway: FakedGateway, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            batch = await retrieve(gateway, batch_id)
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(0.02)


async def content(gateway: FakedGateway, file_id: str) -> list[dict[str, Any]]:
    response = await gateway.get(f"/v1/files/{file_id}/content")
    assert response.status_code == 200
    return [json.loads(each) for each in response.text.splitlines()]


async def test_files_are_stored_listed_and_deleted() -> None:
    gateway = gateway_saying("x")
    text = b"x" * 600_000
    file = (await upload(gateway, text, purpose="user_data")).json()
    assert (file["object"], file["bytes"], file["filename"], file["purpose"]) == (
        "file",
        600_000,
        "in.jsonl",
        "user_data",
    )
    second = (await upload(gateway, b"y")).json()
    assert (await gateway.get(f"/v1/files/{file['id']}")).json() == file
    downloaded = await gateway.get(f"/v1/files/{file['id']}/content")
    assert downloaded.content == text
    assert downloaded.headers["content-disposition"] == "attachment"
    listed = (await gateway.get("/v1/files")).json()
    assert {each["id"] for each in listed["data"]} == {file["id"], second["id"]}
    assert [each["id"] for each in (await gateway.get("/v1/files?purpose=batch")).json()["data"]] == [second["id"]]
    first_page = (await gateway.get("/v1/files?limit=1")).json()
    assert first_page["has_more"]
    rest = (await gateway.get(f"/v1/files?limit=1&after={first_page['last_id']}")).json()
    assert len(rest["data"]) == 1
    assert not rest["has_more"]
    assert rest["data"] != first_page["data"]
    async with gateway.client() as client:
        assert (await client.delete(f"/v1/files/{file['id']}")).json()["deleted"] is True
        assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 404
    assert (await gateway.get(f"/v1/files/{file['id']}/content")).status_code == 404


async def test_another_users_files_and_batches_do_not_exist(keys_file: Path) -> None:
    gateway = gateway_saying("x", keys_file=keys_file)
    file_id = (await upload(gateway, jsonl([line(0)]), ANN)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_id = (await gateway.post("/v1/batches", body, ANN)).json()["id"]
    missing = await gateway.get("/v1/files/file-none", BOB)
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        refused = await gateway.get(path, BOB)
        assert error_of(refused, 404) == {
            **error_of(missing, 404),
            "message": error_of(missing, 404)["message"].replace("file-none", file_id),
        }
        assert (await gateway.get(path, ANN)).status_code == 200
    assert (await gateway.get(f"/v1/batches/{batch_id}", BOB)).status_code == 404
    assert (await gateway.post(f"/v1/batches/{batch_id}/cancel", None, BOB)).status_code == 404
    assert (await gateway.post("/v1/batches", body, BOB)).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await gateway.get(path, BOB)).json()["data"] == []
        assert len((await gateway.get(path, ANN)).json()["data"]) == 1
    async with gateway.client() as client:
        assert (await client.delete(f"/v1/files/{file_id}", headers=BOB)).status_code == 404
        # It is the input of an unfinished batch.
        assert (await client.delete(f"/v1/files/{file_id}", headers=ANN)).status_code == 409


async def test_anonymous_callers_own_nothing() -> None:
    gateway = gateway_saying("x", anonymous="isolated")
    assert "credential" in error_of(await upload(gateway, b"x"), 400)["message"]
    error_of(await gateway.get("/v1/batches"), 400)


async def test_uploads_are_bounded_and_checked() -> None:
    gateway = gateway_saying("x", batches=BatchesSettings(max_file_bytes=100_000, max_bytes=1024 * 1024))
    error_of(await upload(gateway, b"x" * 110_000), 413)
    error_of(await upload(gateway, b"x" * 300_000), 413)
    assert error_of(await upload(gateway, b"x", purpose="fine-tune"), 400)["param"] == "purpose"
    async with gateway.client() as client:
        error_of(await client.post("/v1/files", json={"file": "x"}), 415)
        assert error_of(await client.post("/v1/files", files={"other": b"x"}), 400)["param"] == "file"
        wrong = {"content-type": "multipart/form-data"}
        error_of(await client.post("/v1/files", content=b"x", headers=wrong), 400)
        form = {"content-type": "multipart/form-data; boundary=b"}
        part = 'Content-Disposition: form-data; name="{}"'.format
        for name in ("a\x07b", "x" * (MAX_NAME_BYTES + 1)):
            file = f'--b\r\n{part("file")}; filename="{name}"\r\n\r\nx\r\n'
            body = f"{file}--b\r\n{part('purpose')}\r\n\r\nbatch\r\n--b--\r\n"
            assert error_of(await client.post("/v1/files", content=body, headers=form), 400)["param"] == "file"
    for _ in range(6):
        response = await upload(gateway, b"x" * 100_000)
        if response.status_code != 200:
            break
    assert "organization" in error_of(response, 429)["message"]
    assert len((await gateway.get("/v1/files")).json()["data"]) == 5


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
async def test_wrong_batches_are_refused(change: dict[str, Any], param: str) -> None:
    gateway = gateway_saying("x")
    file_id = (await upload(gateway, jsonl([line(0)]))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **change}
    assert error_of(await gateway.post("/v1/batches", body), 400)["param"] == param


async def test_files_that_no_batch_can_read_to_its_end_are_refused() -> None:
    gateway = gateway_saying("x")
    other_purpose = (await upload(gateway, b"x", purpose="user_data")).json()["id"]
    passing = (await upload(gateway, jsonl([line(0)]))).json()
    folder = f"files:{FileOwner('default', 'local').digest}"
    expiring = json.dumps({**passing, "expires_at": passing["created_at"] + 86_000}).encode()
    await gateway.context.files._documents.put(folder, passing["id"], expiring)
    for file_id in (other_purpose, passing["id"]):
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        assert error_of(await gateway.post("/v1/batches", body), 400)["param"] == "input_file_id"


async def test_an_owner_has_a_bounded_number_of_unfinished_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = gateway_saying("x")
    monkeypatch.setattr(gateway.context.batches, "_max_open", 2)
    file_id = (await upload(gateway, jsonl([line(0)]))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    ids = [(await gateway.post("/v1/batches", body)).json()["id"] for _ in range(2)]
    error_of(await gateway.post("/v1/batches", body), 429)
    async with running(gateway):
        for batch_id in ids:
            await ended(gateway, batch_id)
    assert (await gateway.post("/v1/batches", body)).status_code == 200
    error_of(await gateway.post(f"/v1/batches/{ids[0]}/cancel", None), 409)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"custom_id": None}, "invalid_request", "custom_id"),
        ({"custom_id": ""}, "invalid_request", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_request", "custom_id"),
        ({"method": "GET"}, "invalid_request", "method"),
        ({"body": []}, "invalid_request", "body"),
        ({"url": "/v1/models"}, "mismatched_endpoint", "url"),
        *(({"body": {field: 1}}, "invalid_request", f"body.{field}") for field in REFUSED_FIELDS),
    ],
)
def test_wrong_lines_are_refused_by_name(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(BatchLineError) as refused:
        parse_line(json.dumps({**line(0), **change}).encode(), 0, ENDPOINT, 10_000)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_harmless_values_of_refused_fields_are_accepted() -> None:
    harmless = line(0)
    harmless["body"] |= dict.fromkeys(REFUSED_FIELDS) | {"stream": False, "priority": 0}
    assert parse_line(json.dumps(harmless).encode(), 0, ENDPOINT, 10_000).body == harmless["body"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\n \n", "empty_file"),
        (jsonl([line(number) for number in range(4)]), "too_many_lines"),
        (jsonl([line(0, prompt="x" * 5000)]), "line_too_large"),
        (b"{", "invalid_json_line"),
    ],
)
async def test_wrong_files_fail_their_batch(content: bytes, code: str) -> None:
    gateway = gateway_saying("x", max_body_bytes=4096, batches=BatchesSettings(max_lines=3))
    file_id = (await upload(gateway, content)).json()["id"]
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    batch_id = (await gateway.post("/v1/batches", body)).json()["id"]
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["status"] == "failed"
    assert [error["code"] for error in batch["errors"]["data"]] == [code]


async def test_a_batch_whose_input_is_gone_fails() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(0)])
    file_id = (await retrieve(gateway, batch_id))["input_file_id"]
    await gateway.context.files.delete(FileOwner("default", "local"), file_id)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert [error["code"] for error in batch["errors"]["data"]] == ["file_not_found"]


def test_the_document_lists_all_that_lines_are_refused_for() -> None:
    text = DOCUMENT.read_text().partition("## What is refused")[2]
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    sources = [DOCUMENT.parents[1] / "gateway" / "batches" / name for name in ("lines.py", "runner.py")]
    codes = {
        code
        for source in sources
        for code in re.findall(r"(?:BatchLineError|_error)\(\s*\"(\w+)\"", source.read_text())
    }
    assert len(codes) >= 8
    second = [row.split(" | ")[1] for row in rows]
    assert codes == {cell.strip("`") for cell in second if re.fullmatch(r"`[a-z_]+`", cell)} - {"code"}
    for field, reason in REFUSED_FIELDS.items():
        assert any(row.startswith(f"| `{field}`") and reason in row for row in rows)
    [endpoints] = [row for row in rows if "`endpoint` other than" in row]
    assert set(re.findall(r"`(/[\w/]+)`", endpoints)) == {*ENDPOINTS, "/embed", "/rerank"}


async def test_a_batch_runs_to_its_end_in_the_lowest_class() -> None:
    gateway = gateway_saying("All", " right")
    lines: list[dict[str, Any]] = [line(number) for number in range(20)]
    lines[7]["body"]["temperature"] = "hot"
    batch_id = await create(gateway, lines)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
    assert batch["completed_at"] >= batch["in_progress_at"] >= batch["created_at"]
    outputs = await content(gateway, batch["output_file_id"])
    assert [each["custom_id"] for each in outputs] == [f"line-{number}" for number in range(20) if number != 7]
    for each in outputs:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["text"] == "All right"
    [failed] = await content(gateway, batch["error_file_id"])
    assert failed["custom_id"] == "line-7"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert gateway.pipeline.submitted
    assert all(request.options.is_batch for request in gateway.pipeline.submitted)
    # Latencies are those of other requests; tokens are counted for all.
    text = (await gateway.get("/metrics")).text
    assert 'pando_gateway_time_to_first_token_seconds_count{model="tiny"} 0.0' in text
    assert 'pando_gateway_request_seconds_count{route="/v1/completions"}' not in text
    assert 'pando_gateway_completion_tokens_total{model="tiny"} 38.0' in text
    await gateway.complete()
    assert not gateway.pipeline.submitted[-1].options.is_batch


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}),
        ("/generate", {"text": "Hello"}),
    ],
)
async def test_lines_of_other_endpoints_get_the_answers_of_these(endpoint: str, body: dict[str, Any]) -> None:
    gateway = gateway_saying("All", " right")
    request = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    batch_id = await create(gateway, [request], endpoint)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    [answer] = await content(gateway, batch["output_file_id"])
    assert "All right" in json.dumps(answer["response"]["body"])
    assert [each.options.is_batch for each in gateway.pipeline.submitted] == [True]


TEXTS = {"model": "tiny", "input": "Hello"}
DOCUMENTS = {"model": "tiny", "query": "Hello", "documents": ["a", "b"]}


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/embeddings", TEXTS, "data"),
        ("/v1/pooling", TEXTS, "data"),
        ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}, "data"),
        ("/v1/rerank", DOCUMENTS, "results"),
        ("/v2/rerank", DOCUMENTS, "results"),
        ("/v2/embed", {"model": "tiny", "texts": ["a"], "input_type": "search_query"}, "embeddings"),
    ],
)
async def test_lines_may_ask_for_what_generates_nothing(endpoint: str, body: dict[str, Any], field: str) -> None:
    def embeds(request: GenerateRequest) -> Iterator[Delta]:
        finish = Finish(FinishReason.STOP, embedding=EMBEDDING)
        yield Delta(request.request_id, 0, 0, (), "", prompt_usage=PROMPT, finish=finish)

    gateway = faked(embeds)
    request = {"custom_id": "one", "method": "POST", "url": endpoint, "body": body}
    batch_id = await create(gateway, [request], endpoint)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    [answer] = await content(gateway, batch["output_file_id"])
    assert answer["response"]["body"][field]
    assert {each.options.is_batch for each in gateway.pipeline.submitted} == {True}
    usage = (await gateway.get("/v1/usage?group_by=batch,operation&limit=1")).json()["data"]
    assert [(use["batch"], use["requests"]) for use in usage] == [(True, len(gateway.pipeline.submitted))]


async def test_wrong_lines_fail_the_batch_before_anything_runs() -> None:
    gateway = gateway_saying("x")
    lines: list[object] = [line(0), line(0), line(1, stream=True), line(2, "/v1/embeddings"), "text", {}]
    batch_id = await create(gateway, lines)
    async with running(gateway):
        batch = await ended(gateway, batch_id)
    assert batch["status"] == "failed"
    errors = batch["errors"]["data"]
    assert [(error["line"], error["code"]) for error in errors] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_request"),
        (4, "mismatched_endpoint"),
        (5, "invalid_json_line"),
        (6, "invalid_request"),
    ]
    assert errors[1]["param"] == "body.stream"
    assert batch["output_file_id"] is None
    assert not gateway.pipeline.submitted


async def test_a_cancelled_batch_keeps_the_responses_so_far() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(number) for number in range(3)])
    owner = FileOwner("default", "local")
    batch = await gateway.context.batches.get(owner, batch_id)
    output = b'{"custom_id": "line-1"}\n'
    await gateway.context.batches.note_outcome(batch_id, 1, succeeded=True, output=output)
    counts = {"total": 3, "completed": 0, "failed": 0}
    await gateway.context.batches.update(
        batch, lambda batch: batch.changed(status="in_progress", request_counts=counts)
    )
    cancelling = await gateway.post(f"/v1/batches/{batch_id}/cancel", None)
    assert cancelling.json()["status"] == "cancelling"
    async with running(gateway):
        ended_batch = await ended(gateway, batch_id)
    assert ended_batch["status"] == "cancelled"
    assert [each["custom_id"] for each in await content(gateway, ended_batch["output_file_id"])] == ["line-1"]
    assert ended_batch["request_counts"] == {"total": 3, "completed": 1, "failed": 0}
    assert (await gateway.post(f"/v1/batches/{batch_id}/cancel", None)).json()["status"] == "cancelled"
    assert not gateway.pipeline.submitted


async def test_an_expired_batch_names_the_lines_that_have_not_run() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(number) for number in range(3)])
    batch = await gateway.context.batches.get(FileOwner("default", "local"), batch_id)
    await gateway.context.batches.update(batch, lambda batch: batch.changed(expires_at=1))
    async with running(gateway):
        ended_batch = await ended(gateway, batch_id)
    assert ended_batch["status"] == "expired"
    errors = await content(gateway, ended_batch["error_file_id"])
    assert {each["error"]["code"] for each in errors} <= {"batch_expired"}
    outputs = [] if ended_batch["output_file_id"] is None else await content(gateway, ended_batch["output_file_id"])
    assert sorted(each["custom_id"] for each in outputs + errors) == ["line-0", "line-1", "line-2"]


async def test_another_gateway_takes_over_and_each_line_has_one_outcome() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(number) for number in range(200)])
    async with running(gateway):
        await until(lambda: len(gateway.pipeline.submitted) >= 20)
    # Cancelled like a killed one, but its lease is given up; one that hangs keeps it until it runs out.
    lease = await gateway.context.batches.claim(batch_id, "hung")
    assert lease is not None
    async with running(gateway):
        await asyncio.sleep(0.05)
        assert (await retrieve(gateway, batch_id))["status"] not in ("completed", "finalizing")
        await gateway.context.batches.give_up(batch_id, lease)
        batch = await ended(gateway, batch_id)
    assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
    outputs = await content(gateway, batch["output_file_id"])
    assert [each["custom_id"] for each in outputs] == [f"line-{number}" for number in range(200)]


async def test_a_holder_gives_up_a_lease_whose_renewal_it_did_not_see() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(0)])
    batches = gateway.context.batches
    lease = await batches.claim(batch_id, "one")
    assert lease is not None
    assert await batches.renew(batch_id, lease) not in (None, lease)
    await batches.give_up(batch_id, lease)
    other = await batches.claim(batch_id, "two")
    assert other is not None
    await batches.give_up(batch_id, lease)
    assert await batches.claim(batch_id, "three") is None, "a lease is given up by its holder only"
    assert await batches.renew(batch_id, other) is not None


async def test_batches_of_a_later_version_are_run_and_keep_its_fields() -> None:
    gateway = gateway_saying("x")
    batch_id = await create(gateway, [line(0)])
    documents, owner = gateway.context.batches._documents, FileOwner("default", "local").digest
    for folder, part in ((f"batches:{owner}", "caller"), ("batches-open", None)):
        stored = json.loads(await documents.get(folder, batch_id) or b"")
        stored["later"] = 1
        if part is not None:
            stored[part]["later"] = 2
        await documents.put(folder, batch_id, json.dumps(stored).encode())
    async with running(gateway):
        assert (await ended(gateway, batch_id))["status"] == "completed"
    stored = json.loads(await documents.get(f"batches:{owner}", batch_id) or b"")
    assert (stored["later"], stored["caller"]["later"]) == (1, 2)
