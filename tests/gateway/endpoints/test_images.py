"""Images in requests: every API says the same to the model, and what cannot be read is refused by name."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.requests import ImageFile, ImageLimits
from common.room import SharedRoom
from common.settings import GatewaySettings
from common.types import ErrorCode, ReplyTo, RequestFailure, SubscriberId
from gateway.pipeline.wire import generate_to_wire
from gateway.quotas.quotas import TOKENS_PER_IMAGE, announced_tokens
from tests.examples import examples
from tests.fakes.pipeline import CARD, FakeModel, FakePipeline, says
from tests.gateway.answers.reading import BODY, Seen, read
from tests.gateway.endpoints.image_requests import (
    DIALECTS,
    GIF,
    JPEG,
    MAX_FILE_BYTES,
    PARTS,
    PNG,
    SEEING,
    SVG,
    block,
    chat_image,
    coded,
    data_url,
    input_image,
    of_file,
    parts_of,
    seeing,
    user,
)
from tests.gateway.fuzzing import mutated
from tests.gateway.listening import listening
from tests.gateway.support import FakedGateway, error_of, gateway_saying
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx


@pytest.mark.parametrize("name", DIALECTS)
async def test_each_api_gives_the_model_the_same_texts_and_images_in_their_order(name: str) -> None:
    gateway, dialect = seeing(), DIALECTS[name]
    response = await gateway.post(dialect.path, {"model": "tiny", **dialect.body})
    assert response.status_code == 200, response.text
    assert parts_of(gateway) == PARTS
    [request] = gateway.pipeline.submitted
    # What limits count until the prompt's length is known.
    assert announced_tokens(replace(request, options=replace(request.options, n=1))) >= 4 * TOKENS_PER_IMAGE
    prompt = response.json()["usage"]
    # Then the admission says it, images included.
    assert prompt.get("prompt_tokens", prompt.get("input_tokens", 0)) + prompt.get("cache_read_input_tokens", 0) == 7


async def test_generate_takes_images_beside_its_text() -> None:
    gateway = seeing()
    for sent in (data_url(PNG), coded(PNG), [data_url(PNG)], [{"url": data_url(PNG), "detail": "low"}]):
        response = await gateway.post("/generate", {"text": "<image> what?", "image_data": sent})
        assert response.status_code == 200, response.text
    assert [[image.data for image in request.images] for request in gateway.pipeline.submitted] == [[PNG]] * 4
    assert [request.prompt for request in gateway.pipeline.submitted] == ["<image> what?"] * 4
    assert gateway.pipeline.submitted[3].images[0].detail == "low"


async def test_a_turn_of_a_session_takes_images() -> None:
    gateway = seeing()
    body = {"text": "<image> what?", "image_data": coded(PNG), "session_params": {"id": "s", "rid": "one"}}
    assert (await gateway.post("/generate", body)).status_code == 200
    (request,) = gateway.pipeline.submitted
    assert [image.data for image in request.images] == [PNG]
    assert request.options.turn is not None
    assert request.options.turn.after == "one"


async def test_generate_gives_each_text_of_a_list_its_own_images() -> None:
    gateway = seeing()
    body = {"text": ["a", "b", "c"], "image_data": [coded(PNG), None, [coded(GIF), coded(JPEG)]]}
    assert (await gateway.post("/generate", body)).status_code == 200
    assert [[image.data for image in request.images] for request in gateway.pipeline.submitted] == [
        [PNG],
        [],
        [GIF, JPEG],
    ]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": ["a", "b"], "image_data": ["x"]}, "image_data", "each of the 2 texts"),
        ({"input_ids": [1], "image_data": "x"}, "image_data", "needs 'text'"),
        ({"text": "a", "image_data": "not base64!"}, "image_data", "not valid base64"),
        ({"text": "a", "image_data": [{"processor_output": 1}]}, "image_data[0]", "base64"),
        ({"text": "a", "image_data": "/etc/passwd"}, "image_data", "base64"),
        ({"text": "a", "video_data": "x"}, "video_data", "takes no videos"),
        ({"input_ids": [1], "video_data": "x"}, "video_data", "needs 'text'"),
        ({"text": "a", "audio_data": "x"}, "audio_data", "not supported"),
    ],
)
async def test_generate_refuses_other_images_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(await seeing().post("/generate", fields), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(("given", "read"), [(None, "auto"), ("low", "low"), ("high", "high"), ("original", "high")])
async def test_the_detail_of_an_image_reaches_the_tokenizer(given: str | None, read: str) -> None:
    gateway = seeing()
    assert (await gateway.chat(messages=user(chat_image(PNG, given)))).status_code == 200
    assert parts_of(gateway) == [("user", (ImageFile(PNG, read),))]


async def test_an_image_url_may_be_a_text_as_well_as_an_object() -> None:
    gateway = seeing()
    assert (await gateway.chat(messages=user({"type": "image_url", "image_url": data_url(PNG)}))).status_code == 200
    assert parts_of(gateway) == [("user", (ImageFile(PNG),))]


IMAGE = "messages[0].content[0].image_url"


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": 7}}, IMAGE, "data URL"),
        ({"type": "image_url", "image_url": {}}, IMAGE, "data URL"),
        ({"type": "image_url"}, IMAGE, "data URL"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, IMAGE, "data URL"),
        ({"type": "image_url", "image_url": {"url": "ftp://example.org/a.png"}}, IMAGE, "data URL"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, IMAGE, "data URL"),
        ({"type": "image_url", "image_url": {"url": "https://e/" + "a" * 9000}}, IMAGE, "characters"),
        ({"type": "image_url", "image_url": {"url": data_url(SVG, "image/svg+xml")}}, IMAGE, "image/svg+xml"),
        ({"type": "image_url", "image_url": {"url": data_url(SVG)}}, IMAGE, "SVG"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG, "text/plain")}}, IMAGE, "text/plain"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG, "video/jpeg")}}, IMAGE, "video/jpeg"),
        ({"type": "image_url", "image_url": {"url": data_url(b"hello")}}, IMAGE, "not an image"),
        ({"type": "image_url", "image_url": {"url": data_url(b"%PDF-1.7")}}, IMAGE, "PDF"),
        ({"type": "image_url", "image_url": {"url": data_url(b"")}}, IMAGE, "empty"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG) + "="}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG)[:-1]}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG)[:-4] + "\n\n\n\n"}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG)[:-4] + "äöüß"}}, IMAGE, "base64"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG + bytes(MAX_FILE_BYTES))}}, IMAGE, "may have 4096"),
        ({"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "fine"}}, IMAGE, "detail"),
        ({"type": "image_file"}, "messages[0].content[0].image_file", "id"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "messages[0].content", "audio"),
        ({"type": "input_video", "video": "x"}, "messages[0].content", "parts of the type video_url"),
        ({"type": "file", "file": {"file_id": "x"}}, "messages[0].content", "documents"),
        ({"type": "hologram"}, "messages[0].content", "text part"),
    ],
)
async def test_what_is_no_image_is_refused_by_name(part: dict[str, Any], param: str, words: str) -> None:
    gateway = seeing()
    error = error_of(await gateway.chat(messages=user(part)), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert gateway.pipeline.submitted == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [input_image(SVG)]}]},
            "input[0].output[0].image_url",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [block(PNG, "image/bmp")]}]},
            "messages[0].content[0].source.data",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0]",
        ),
    ],
)
async def test_other_apis_name_their_own_fields(path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(await seeing().post(path, {"model": "tiny", **body}), 400)["param"] == param


AUDIO = coded(b"RIFF")


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        ("/v1/chat/completions", "messages", "messages[0].content"),
        ("/v1/responses", "input", "input[0].content"),
        ("/v1/messages", "messages", "messages[0]"),
    ],
)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": AUDIO, "format": "wav"}},
        {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": AUDIO}},
        {"type": "audio_url", "audio_url": {"url": data_url(b"RIFF", "audio/wav")}},
    ],
    ids=lambda part: str(part["type"]),
)
async def test_audio_is_refused_by_name_in_every_api(path: str, field: str, param: str, part: dict[str, Any]) -> None:
    gateway = seeing()
    error = error_of(await gateway.post(path, {"model": "tiny", "max_tokens": 1, field: user(part)}), 400)
    assert error["param"] == param
    assert "audio is not supported" in error["message"]
    assert gateway.pipeline.submitted == []


@pytest.mark.parametrize("name", [*DIALECTS, "generate"])
async def test_a_model_without_vision_refuses_images_in_a_sentence(name: str) -> None:
    gateway = gateway_saying("x")
    path, body = (
        ("/generate", {"text": "a", "image_data": coded(PNG)})
        if name == "generate"
        else (DIALECTS[name].path, {"model": "tiny", **DIALECTS[name].body})
    )
    error = error_of(await gateway.post(path, body), 400)
    assert "takes no images" in error["message"]
    assert gateway.pipeline.submitted == []


async def test_one_image_too_many_is_named() -> None:
    error = error_of(await seeing().chat(messages=user(*[chat_image(PNG)] * 5)), 400)
    assert error["param"] == "messages[0].content[4].image_url"
    assert "at most 4" in error["message"]


async def test_all_images_together_have_a_limit_too() -> None:
    gateway = seeing(images={"max_total_bytes": 1024})
    error = error_of(await gateway.chat(messages=user(*[chat_image(PNG + bytes(300))] * 3)), 400)
    assert error["param"] == "messages[0].content[2].image_url"
    assert "1024 bytes together" in error["message"]


async def test_images_of_open_requests_are_bounded_and_leave_room_for_texts() -> None:
    gateway = FakedGateway(FakePipeline(lambda _request: ()), GatewaySettings(), FakeModel(SEEING))
    gateway.generations._image_room = SharedRoom(4 * len(PNG), "open with images", 2000)
    opened = []
    for number in range(2):
        opened.append(asyncio.create_task(gateway.chat(messages=user(chat_image(PNG), str(number)))))
        await until(lambda: gateway.generations.open_requests == len(opened))
    refused = await gateway.chat(messages=user(chat_image(PNG), chat_image(PNG)))
    assert "open with images" in error_of(refused, 429)["message"]
    assert refused.headers["retry-after"] == "2"
    opened.append(asyncio.create_task(gateway.chat()))
    await until(lambda: gateway.generations.open_requests == 3)
    for task in opened:
        task.cancel()
    await asyncio.gather(*opened, return_exceptions=True)
    await until(lambda: gateway.generations.open_requests == 0)
    opened = [asyncio.create_task(gateway.chat(messages=user(chat_image(PNG), chat_image(PNG))))]
    await until(lambda: gateway.generations.open_requests == 1)
    opened[0].cancel()
    await asyncio.gather(*opened, return_exceptions=True)


@pytest.mark.parametrize("announces", [True, False], ids=["with its length", "without"])
async def test_a_body_may_exceed_the_limit_of_texts_only_for_a_model_that_sees(announces: bool) -> None:
    large = replace(SEEING, images=ImageLimits(4, 100_000, 10**7))
    body = json.dumps({"model": "tiny", "messages": user(chat_image(PNG + bytes(60_000)))}).encode()

    async def content() -> Any:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    headers = {"content-type": "application/json"}
    for card, status in ((CARD, 413), (large, 200)):
        gateway = seeing(max_body_bytes=20_000, images={"max_total_bytes": 90_000})
        gateway.model.card = card
        async with gateway.client() as client:
            sent = body if announces else content()
            response = await client.post("/v1/chat/completions", content=sent, headers=headers)
        assert response.status_code == status, response.text
    gateway = seeing(max_body_bytes=20_000, images={"max_total_bytes": 30_000})
    gateway.model.card = large
    assert (await gateway.post("/v1/chat/completions", json.loads(body))).status_code == 413
    # Endpoints that take no images keep their limit.
    assert (await gateway.post("/v1/completions", {"prompt": "x" * 30_000})).status_code == 413


async def test_an_image_of_the_largest_size_arrives_whole() -> None:
    content = PNG + random.Random(0).randbytes(1_000_003)
    gateway = seeing()
    gateway.model.card = replace(CARD, images=ImageLimits(1, len(content), 10**7))
    assert (await gateway.chat(messages=user(chat_image(content)))).status_code == 200
    assert parts_of(gateway) == [("user", (ImageFile(content),))]
    larger = error_of(await gateway.chat(messages=user(chat_image(content + b"1"))), 400)
    assert f"may have {len(content)}" in larger["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_tokens_of_images_are_counted_by_the_tokenizer(path: str) -> None:
    gateway = seeing()
    body = {"messages": user(chat_image(PNG))} if path == "/tokenize" else DIALECTS["messages"].body
    assert (await gateway.post(path, {"model": "tiny", **body})).status_code == 200
    assert any(message.parts for message in gateway.model.rendered[0].messages)
    refused = error_of(await gateway_saying("x").post(path, {"model": "tiny", **body}), 400)
    assert "takes no images" in refused["message"]


async def test_endpoints_that_read_text_only_refuse_images() -> None:
    gateway = seeing()
    error = error_of(await gateway.post("/pooling", {"messages": user(chat_image(PNG))}), 400)
    assert error["param"] == IMAGE


async def test_a_model_says_whether_it_takes_images() -> None:
    limits = {
        "max_images": 4, "max_file_bytes": MAX_FILE_BYTES, "max_pixels": 10**7, "max_frames": 0, "video_files": False,
    }  # fmt: skip
    assert (await seeing().get("/v1/models")).json()["data"][0]["images"] == limits
    assert (await gateway_saying("x").get("/v1/models/tiny")).json()["images"] is None
    for gateway, sees in ((seeing(), True), (gateway_saying("x"), False)):
        assert (await gateway.get("/get_model_info")).json()["has_image_understanding"] is sees


# --- conversations ----------------------------------------------------------------------------------------------------


async def test_a_stored_response_keeps_its_images_for_the_next_one() -> None:
    gateway = seeing()
    body = {"model": "tiny", **DIALECTS["responses"].body}
    first = (await gateway.post("/v1/responses", body)).json()
    again = {"model": "tiny", "input": "And?", "previous_response_id": first["id"]}
    second = (await gateway.post("/v1/responses", again)).json()
    third = {"model": "tiny", "input": "More?", "previous_response_id": second["id"]}
    assert (await gateway.post("/v1/responses", third)).status_code == 200
    assert parts_of(gateway, 1)[:4] == parts_of(gateway, 2)[:4] == PARTS
    items = (await gateway.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"][1] == input_image(PNG)


async def test_a_broken_stream_continues_with_the_same_images() -> None:
    gateway = seeing(*(f" {number}" for number in range(20)))
    gateway.pipeline.pause_s = 0.01
    body = {**BODY, "messages": user("What?", chat_image(PNG))}
    async with listening(gateway) as port:
        seen = Seen()
        await read(port, seen, body=body, events=3)
        await until(lambda: bool(gateway.pipeline.aborted))
        await read(port, seen)
    assert seen.text == "".join(f" {number}" for number in range(20))
    assert len(gateway.pipeline.submitted) == 2
    assert parts_of(gateway, 0) == parts_of(gateway, 1) == [("user", ("What?", ImageFile(PNG)))]


async def test_a_request_that_a_service_lost_is_submitted_again_with_its_images() -> None:
    gateway = seeing("one")
    gateway.pipeline.script = None
    path, body = DIALECTS["messages"].path, DIALECTS["messages"].body
    answer = asyncio.create_task(gateway.post(path, {"model": "tiny", **body}))
    [lost] = await gateway.pipeline.submissions(1)
    gateway.pipeline.script = says("one")
    gateway.pipeline.lose(lost.request_id, RequestFailure(ErrorCode.UNAVAILABLE, "away", retryable=True))
    assert (await answer).status_code == 200
    assert parts_of(gateway, 0) == parts_of(gateway, 1) == PARTS


async def test_an_idempotency_key_covers_the_images() -> None:
    gateway = seeing()
    headers = {"idempotency-key": "k"}

    async def post(content: bytes) -> httpx.Response:
        body = {"model": "tiny", "messages": user(chat_image(content))}
        return await gateway.post("/v1/chat/completions", body, headers)

    first = await post(PNG)
    assert first.json() == (await post(PNG)).json()
    assert (await post(GIF)).status_code == 422
    assert len(gateway.pipeline.submitted) == 1


# --- anything else ----------------------------------------------------------------------------------------------------

VIDEO = f"data:video/jpeg;base64,{coded(JPEG)},{coded(GIF)}"
BODIES = [(dialect.path, {"model": "tiny", **dialect.body}) for dialect in DIALECTS.values()] + [
    ("/generate", {"text": ["a", "b"], "image_data": [coded(PNG), [data_url(GIF), {"url": data_url(JPEG)}]]}),
    ("/generate", {"text": ["a", "b"], "video_data": [VIDEO, [{"url": VIDEO, "fps": 2}, VIDEO]]}),
    (
        "/v1/chat/completions",
        {"model": "tiny", "messages": user("a", {"type": "video_url", "video_url": {"url": VIDEO, "fps": 4}})},
    ),
    *((path, {"model": "tiny", **body}) for path, body in of_file("file-1").values()),
]


async def check_mutations(gateway: FakedGateway, seeds: Sequence[int]) -> dict[int, int]:
    """Send mutated bodies; return how many answers had each status."""
    statuses: dict[int, int] = {}
    async with gateway.client() as client:
        for seed in seeds:
            generator = random.Random(seed)
            path, body = generator.choice(BODIES)
            content = json.dumps(corrupted(generator, mutated(generator, body)))
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (seed, response.text)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            for request in gateway.pipeline.submitted:
                generate_to_wire(request, ReplyTo(SubscriberId("test")))
            gateway.pipeline.submitted.clear()
    return statuses


def corrupted(generator: random.Random, value: Any) -> Any:
    """Return `value`, in half of the cases with a change in one of its long texts."""
    if isinstance(value, dict):
        return {key: corrupted(generator, part) for key, part in value.items()}
    if isinstance(value, list):
        return [corrupted(generator, part) for part in value]
    if isinstance(value, str) and 20 < len(value) < 5_000 and generator.random() < 0.2:
        place = generator.randrange(len(value))
        inserted = generator.choice(["", "=", "\n", "é", "\x00", "%", ",", ";", ":", "AAAA", value[:place]])
        return value[:place] + inserted + value[place + generator.randrange(4) :]
    return value


@pytest.fixture(scope="module")
def gateway() -> FakedGateway:
    card = replace(SEEING, images=ImageLimits(4, MAX_FILE_BYTES, 10**7, max_frames=3))
    return FakedGateway(FakePipeline(says("x")), GatewaySettings(), FakeModel(card))


@examples(40)
@given(seed=st.integers(0, 2**32))
async def test_no_body_with_images_is_a_server_error(gateway: FakedGateway, seed: int) -> None:
    await check_mutations(gateway, [seed * 10 + number for number in range(10)])


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_no_body_of_many_with_images_is_a_server_error(gateway: FakedGateway) -> None:
    statuses = await check_mutations(gateway, range(20_000))
    assert sum(statuses.values()) == 20_000
    assert statuses[200] > 100
    assert statuses[400] > 1000
