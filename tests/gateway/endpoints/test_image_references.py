"""Images that requests name by an uploaded file or a URL: whose files are read, and when URLs are fetched."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from common.requests import ImageFile
from gateway.assembly import build_runner
from gateway.batches import runner as runner_module
from gateway.batches.batches import ENDED
from gateway.batches.files import NO_OWNER
from gateway.endpoints.responses.route import adopt_responses
from gateway.identity.keys import ApiKey, hash_of, save_keys
from gateway.images.images import Images, RefusedUrlError
from tests.fakes.pipeline import FakeModel, FakePipeline, says
from tests.gateway.answers.reading import BODY, Seen, read
from tests.gateway.endpoints.image_requests import (
    DIALECTS,
    GIF,
    JPEG,
    MAX_FILE_BYTES,
    PNG,
    SEEING,
    SVG,
    chat_image,
    input_image,
    of_file,
    parts_of,
    seeing,
    upload,
    user,
)
from tests.gateway.listening import listening
from tests.gateway.state.servers import new_prefix, working
from tests.gateway.support import FakedGateway, error_of, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from common.types import Subject
    from tests.fakes.redis_process import RedisProcess

ANN, BOB = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))


@pytest.fixture
def owned(tmp_path: Path) -> FakedGateway:
    save_keys(tmp_path / "keys.toml", [ApiKey(name, hash_of(name), "acme") for name in ("ann", "bob")])
    return seeing(keys_file=tmp_path / "keys.toml")


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
@pytest.mark.parametrize("name", DIALECTS)
async def test_an_uploaded_file_is_an_image_for_its_owner_only(owned: FakedGateway, name: str, purpose: str) -> None:
    file_id = await upload(owned, JPEG, ANN, purpose)
    path, body = of_file(file_id)[name]
    assert (await owned.post(path, {"model": "tiny", **body}, ANN)).status_code == 200
    assert [image.data for image in parts_of(owned)[0][1]] == [JPEG]
    missing = of_file("file-" + "0" * 32)[name][1]
    unknown = await owned.post(path, {"model": "tiny", **missing}, BOB)
    others = await owned.post(path, {"model": "tiny", **body}, BOB)
    assert error_of(unknown, 404)["message"] == f"No such File object: {'file-' + '0' * 32}"
    assert error_of(others, 404) == error_of(unknown, 404) | {"message": f"No such File object: {file_id}"}
    assert len(owned.pipeline.submitted) == 1


async def test_files_that_are_no_images_are_refused(owned: FakedGateway) -> None:
    for content, purpose, words in (
        (PNG, "batch", "purpose"),
        (b"hello", "vision", "not an image"),
        (SVG, "vision", "SVG"),
        (PNG + bytes(MAX_FILE_BYTES), "vision", "may have 4096"),
    ):
        path, body = of_file(await upload(owned, content, ANN, purpose))["chat"]
        error = error_of(await owned.post(path, {"model": "tiny", **body}, ANN), 400)
        assert words in error["message"]
        assert error["param"] == "messages[0].content[0].image_file"


async def test_a_deleted_file_is_gone_from_stored_conversations(owned: FakedGateway) -> None:
    file_id = await upload(owned, JPEG, ANN)
    path, body = of_file(file_id)["responses"]
    first = (await owned.post(path, {"model": "tiny", **body}, ANN)).json()
    again = {"model": "tiny", "input": "And?", "previous_response_id": first["id"]}
    assert (await owned.post(path, again, ANN)).status_code == 200
    assert parts_of(owned, 1)[0] == ("user", (ImageFile(JPEG, "low"),))
    async with owned.client() as client:
        await client.delete(f"/v1/files/{file_id}", headers=ANN)
    assert (await owned.post(path, again, ANN)).status_code == 404


async def test_anonymous_requests_own_no_files() -> None:
    gateway = seeing(anonymous="isolated")
    path, body = of_file("file-1")["chat"]
    assert error_of(await gateway.post(path, {"model": "tiny", **body}), 400)["message"] == NO_OWNER


@dataclass
class Fetched:
    """A fetcher whose every image differs."""

    contents: list[bytes] = field(default_factory=lambda: [PNG, JPEG, GIF])
    urls: list[str] = field(default_factory=list)

    async def fetch(self, url: str, subject: Subject, max_bytes: int) -> bytes:
        assert max_bytes == MAX_FILE_BYTES
        self.urls.append(url)
        if "refused" in url:
            raise RefusedUrlError("is refused")
        return self.contents[len(self.urls) - 1]

    async def close(self) -> None:
        pass


def fetching(*words: str, **settings: Any) -> tuple[FakedGateway, Fetched]:
    gateway, fetched = seeing(*words, **settings), Fetched()
    images = Images(gateway.context.files, fetched, 10_000)
    # The context is frozen, and shared with the application.
    object.__setattr__(gateway.context, "images", images)
    return gateway, fetched


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "generate"])
async def test_a_url_is_fetched_once_for_a_request(name: str) -> None:
    gateway, fetched = fetching()
    url = "https://images.example/a.png"
    image = {"type": "image", "source": {"type": "url", "url": url}}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": user(*[{"type": "image_url", "image_url": {"url": url}}] * 2)}),
        "responses": (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}] * 2}]},
        ),
        "messages": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [image] * 2}]}),
        "generate": ("/generate", {"text": "a", "image_data": [url, url]}),
    }
    path, body = bodies[name]
    assert (await gateway.post(path, {"model": "tiny", **body})).status_code == 200
    assert fetched.urls == [url]
    [request] = gateway.pipeline.submitted
    images = request.images or parts_of(gateway)[0][1]
    assert images == (ImageFile(PNG), ImageFile(PNG))


async def test_a_conversation_keeps_what_a_url_had_when_it_was_fetched() -> None:
    gateway, fetched = fetching()
    image = {"type": "input_image", "image_url": "https://images.example/a.png"}
    body = {"model": "tiny", "input": [{"role": "user", "content": [image]}]}
    first = (await gateway.post("/v1/responses", body)).json()
    again = {"model": "tiny", "input": "And?", "previous_response_id": first["id"]}
    assert (await gateway.post("/v1/responses", again)).status_code == 200
    assert parts_of(gateway, 0)[0] == parts_of(gateway, 1)[0] == ("user", (ImageFile(PNG),))
    assert len(fetched.urls) == 1


async def test_a_continued_stream_does_not_fetch_again() -> None:
    gateway, fetched = fetching(*(f" {number}" for number in range(20)))
    gateway.pipeline.pause_s = 0.01
    image = {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}
    async with listening(gateway) as port:
        seen = Seen()
        await read(port, seen, body={**BODY, "messages": user(image)}, events=3)
        await until(lambda: bool(gateway.pipeline.aborted))
        await read(port, seen)
    assert parts_of(gateway, 0) == parts_of(gateway, 1) == [("user", (ImageFile(PNG),))]
    assert len(fetched.urls) == 1


async def ended(gateway: FakedGateway, path: str, statuses: Iterable[str]) -> dict[str, Any]:
    """Wait until an object has one of these statuses, and return it."""
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await gateway.get(path)).json()
            if found["status"] in statuses:
                return found
            await asyncio.sleep(0.02)


async def test_a_response_is_generated_on_at_another_gateway_with_the_images_that_the_first_one_found(
    redis_process: RedisProcess,
) -> None:
    """The first gateway dies after four tokens; the second can fetch nothing, and the file is deleted."""
    shared = {"url": redis_process.url, "prefix": new_prefix()}
    (first, _), (second, fetched) = fetching(state=shared), fetching(state=shared)
    words = [f" {number}" for number in range(8)]
    first.pipeline.script = lambda request: list(says(*words)(request))[:5]
    second.pipeline.script = says(*words)
    async with working(*second.state.background, lambda: adopt_responses(second.context)):
        file_id = await upload(first, JPEG, {})
        url = {"type": "input_image", "image_url": "https://images.example/a.png"}
        parts = [input_image(GIF), url, {"type": "input_image", "file_id": file_id}]
        body = {"model": "tiny", "background": True, "input": [{"role": "user", "content": parts}]}
        created = (await first.post("/v1/responses", body)).json()
        async with first.client() as client:
            await client.delete(f"/v1/files/{file_id}")
        found = await ended(second, f"/v1/responses/{created['id']}", ["completed"])
        assert found["output"][0]["content"][0]["text"] == "".join(words)
        assert parts_of(first) == parts_of(second) == [("user", (ImageFile(GIF), ImageFile(PNG), ImageFile(JPEG)))]
        assert second.pipeline.submitted[0].options.resume is not None
        assert fetched.urls == []
        for gateway in (first, second):
            await gateway.context.answers.close()
            await gateway.state.close()


async def test_lines_of_a_batch_name_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    gateway = seeing()
    path, body = of_file(await upload(gateway, PNG, {}))["chat"]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": {"model": "tiny", **each}}
        for number, each in enumerate((body, of_file("file-none")["chat"][1], {"messages": user(chat_image(GIF))}))
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    batch = {"input_file_id": await upload(gateway, content, {}, "batch"), "endpoint": path, "completion_window": "24h"}
    batch_id = (await gateway.post("/v1/batches", batch)).json()["id"]
    stopping = asyncio.Event()
    runner = build_runner(gateway.app, gateway.context, gateway.settings)
    async with working(lambda: runner.run(stopping)):
        finished = await ended(gateway, f"/v1/batches/{batch_id}", ENDED)
    counts = finished["request_counts"]
    assert (counts["completed"], counts["failed"]) == (2, 1)
    images = [parts_of(gateway, number)[0][1][0].data for number in range(2)]
    assert sorted(images) == sorted([PNG, GIF])


async def test_a_url_that_is_refused_is_named_and_one_too_many_is_not_fetched() -> None:
    gateway, fetched = fetching()
    image = {"type": "image_url", "image_url": {"url": "https://images.example/refused.png"}}
    error = error_of(await gateway.chat(messages=user("x", image)), 400)
    assert error["message"] == "The image 'messages[0].content[1].image_url' is refused."
    assert error["param"] == "messages[0].content[1].image_url"
    many = [{"type": "image_url", "image_url": {"url": f"https://images.example/{n}"}} for n in range(5)]
    assert "at most 4" in error_of(await gateway.chat(messages=user(*many)), 400)["message"]
    assert len(fetched.urls) == 1


async def test_limits_hold_before_a_url_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[default]\nrequests_per_minute = 2\n")
    gateway = FakedGateway(FakePipeline(says("x")), model=FakeModel(SEEING), limits_file=tmp_path / "limits.toml")
    fetched = Fetched()
    object.__setattr__(gateway.context, "images", Images(gateway.context.files, fetched, 10_000))
    image = {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}
    assert [(await gateway.chat(messages=user(image))).status_code for _ in range(3)] == [200, 429, 429]
    assert len(fetched.urls) == 1


async def test_a_model_without_vision_fetches_nothing() -> None:
    gateway, fetched = gateway_saying("x"), Fetched()
    object.__setattr__(gateway.context, "images", Images(gateway.context.files, fetched, 10_000))
    image = {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}
    assert "takes no images" in error_of(await gateway.chat(messages=user(image)), 400)["message"]
    assert fetched.urls == []
