"""Videos in requests: their frames reach the tokenizer in order, and what is no video is refused by name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from common.requests import ChatPrompt, ImageFile, ImageLimits
from common.room import SharedRoom
from common.settings import GatewaySettings
from common.types import ReplyTo, Subject, SubscriberId
from gateway.images.references import from_video_url
from gateway.pipeline.wire import generate_to_wire
from gateway.quotas.quotas import TOKENS_PER_IMAGE, announced_tokens
from services.tokenizer.wire import submission_from_wire
from tests.fakes.pipeline import CARD, FakeModel, FakePipeline, says
from tests.gateway.endpoints.image_requests import CALL, GIF, JPEG, MAX_FILE_BYTES, PNG, coded, data_url, user
from tests.gateway.support import FakedGateway, error_of, gateway_saying

MAX_FRAMES = 5
MP4 = b"\x00\x00\x00\x18ftypmp42" + bytes(12)
WEBM = b"\x1a\x45\xdf\xa3\x9f" + bytes(20)
VIDEO = "messages[0].content[0].video_url"


def watching(max_frames: int = MAX_FRAMES, *, files: bool = True) -> FakedGateway:
    card = replace(CARD, images=ImageLimits(4, MAX_FILE_BYTES, 10**7, max_frames, files))
    return FakedGateway(FakePipeline(says("x")), GatewaySettings(), FakeModel(card))


def frames_url(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(map(coded, frames))


def file_url(data: bytes, media_type: str = "video/mp4") -> str:
    return f"data:{media_type};base64,{coded(data)}"


def part(url: object, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **fields}}


async def test_the_frames_of_a_chat_reach_the_tokenizer_in_order() -> None:
    gateway = watching()
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    clips = part(frames_url(JPEG, GIF), fps=4, detail="low"), part(frames_url(*[PNG] * 5))
    assert (await gateway.chat(messages=user("a", clips[0], image, clips[1]))).status_code == 200
    (request,) = gateway.pipeline.submitted
    assert isinstance(request.prompt, ChatPrompt)
    found = (
        ImageFile(b"", "low", (JPEG, GIF), 4.0),
        ImageFile(PNG),
        ImageFile(b"", "auto", (PNG,) * 5),
    )
    assert request.prompt.messages[0].parts == ("a", *found)
    assert announced_tokens(replace(request, options=replace(request.options, n=1))) >= 4 * TOKENS_PER_IMAGE
    read = submission_from_wire(generate_to_wire(request, ReplyTo(SubscriberId("test")))).request.prompt
    assert isinstance(read, ChatPrompt)
    assert read.images == found


async def test_generate_takes_videos_beside_images() -> None:
    gateway = watching()
    url = frames_url(JPEG, JPEG)
    body = {"text": ["a", "b", "c"], "image_data": [data_url(PNG), None, None], "video_data": [url, [url, url], None]}
    assert (await gateway.post("/generate", body)).status_code == 200
    clip = ImageFile(b"", frames=(JPEG, JPEG))
    assert [request.images for request in gateway.pipeline.submitted] == [(ImageFile(PNG), clip), (clip, clip), ()]
    one = watching()
    assert (await one.post("/generate", {"text": "a", "video_data": {"url": url, "fps": 1}})).status_code == 200
    assert one.pipeline.submitted[0].images == (replace(clip, frames_per_second=1.0),)


async def test_files_of_videos_reach_the_tokenizer() -> None:
    gateway = watching()
    clips = (
        part(file_url(MP4), fps=0.5, detail="high"),
        part(file_url(WEBM, "video/webm")),
        {"type": "video_url", "video_url": file_url(MP4, "")},
        # As browsers name what they record.
        part(file_url(WEBM, "video/webm;codecs=vp8,opus")),
    )
    assert (await gateway.chat(messages=user(*clips))).status_code == 200
    (request,) = gateway.pipeline.submitted
    found = (
        ImageFile(MP4, "high", frames_per_second=0.5, is_video_file=True),
        ImageFile(WEBM, is_video_file=True),
        ImageFile(MP4, is_video_file=True),
        ImageFile(WEBM, is_video_file=True),
    )
    assert request.image_files == found
    assert announced_tokens(replace(request, options=replace(request.options, n=1))) >= 4 * 8 * TOKENS_PER_IMAGE
    read = submission_from_wire(generate_to_wire(request, ReplyTo(SubscriberId("test")))).request.prompt
    assert isinstance(read, ChatPrompt)
    assert read.images == found


async def test_generate_takes_files_of_videos_as_data_urls_and_in_base64() -> None:
    gateway = watching()
    videos = [file_url(MP4), coded(WEBM), {"url": coded(MP4), "fps": 3}]
    assert (await gateway.post("/generate", {"text": "a", "video_data": videos})).status_code == 200
    assert gateway.pipeline.submitted[0].images == (
        ImageFile(MP4, is_video_file=True),
        ImageFile(WEBM, is_video_file=True),
        ImageFile(MP4, frames_per_second=3.0, is_video_file=True),
    )


@pytest.mark.parametrize(("name", "content"), [("clip.mp4", MP4), ("clip.webm", WEBM)])
async def test_uploaded_files_of_videos_are_found(name: str, content: bytes) -> None:
    gateway = watching()
    async with gateway.client() as client:
        uploaded = await client.post("/v1/files", data={"purpose": "vision"}, files={"file": (name, content)})
    assert uploaded.status_code == 200, uploaded.text
    file = {"file_id": uploaded.json()["id"], "fps": 4}
    assert (await gateway.chat(messages=user({"type": "video_file", "video_file": file}))).status_code == 200
    (video,) = gateway.pipeline.submitted[0].image_files
    assert video == ImageFile(content, frames_per_second=4.0, is_video_file=True)
    missing = {"type": "video_file", "video_file": {"file_id": "file-none"}}
    assert (await gateway.chat(messages=user(missing))).status_code == 404


async def test_videos_at_urls_are_fetched_where_these_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = watching()
    fetched = []

    class Fetcher:
        async def fetch(self, url: str, subject: Subject, max_bytes: int) -> bytes:
            fetched.append((url, max_bytes))
            return WEBM

        async def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(gateway.context.images, "_fetcher", Fetcher())
    address = "https://videos.example/clip.webm"
    assert (await gateway.chat(messages=user(part(address, fps=1)))).status_code == 200
    (video,) = gateway.pipeline.submitted[0].image_files
    assert video == ImageFile(WEBM, frames_per_second=1.0, is_video_file=True)
    assert fetched == [(address, MAX_FILE_BYTES)]


async def test_files_of_videos_are_refused_where_none_are_decoded() -> None:
    gateway = watching(files=False)
    error = error_of(await gateway.chat(messages=user(part(file_url(MP4)))), 400)
    assert (error["param"], "Pando's extra 'video', is not installed" in error["message"]) == (VIDEO, True)
    assert (await gateway.chat(messages=user(part(frames_url(JPEG, JPEG))))).status_code == 200


@pytest.mark.parametrize(
    ("video", "words"),
    [
        (part("data:video/mp4;base64,AAAA"), "is not a video; send MP4 or WebM"),
        (part("https://example.org/a.mp4"), "fetches no URLs"),
        (part("file:///etc/passwd"), "frames of the video"),
        (part("data:video/avi;base64,AAAA"), "send video/mp4, video/webm"),
        (part("data:video/mp4,AAAA;base64,AAAA"), "'video/mp4,aaaa'"),
        (part(data_url(PNG)), "send video/mp4, video/webm"),
        (part(file_url(b"")), "is empty"),
        (part(file_url(b"RIFF0000AVI LIST")), "is AVI, which is not supported; send MP4 or WebM"),
        (part(file_url(b"#EXTM3U")), "is a playlist, which is not supported"),
        (part(file_url(JPEG)), "is an image, which is not supported"),
        (part(file_url(MP4)[:-1]), "not valid base64"),
        (part(file_url(MP4 + bytes(MAX_FILE_BYTES))), "may have 4096"),
        (part(file_url(MP4), fps=0), "fps"),
        (part(None), "frames of the video"),
        ({"type": "video_url"}, "frames of the video"),
        (part("data:video/jpeg," + coded(JPEG)), "base64"),
        (part("data:video/jpeg;base64,"), "empty"),
        (part(frames_url(JPEG) + ","), "has a frame that is empty"),
        (part(frames_url(JPEG) + ",!!!!"), "not valid base64"),
        (part(frames_url(JPEG, b"\x00\x00\x00 ftypisom")), "has a frame that is video"),
        (part(frames_url(JPEG, b"%PDF-1.7")), "has a frame that is PDF"),
        (part(frames_url(*[GIF] * (MAX_FRAMES + 1))), f"has {MAX_FRAMES + 1} frames; the model takes at most 5"),
        (part(frames_url(*[b"\xff\xd8\xff" + bytes(MAX_FILE_BYTES // 4)] * 5)), "may have 4096"),
        (part(frames_url(JPEG, JPEG), fps=0), "fps"),
        (part(frames_url(JPEG, JPEG), fps=1e-9), "fps"),
        (part(frames_url(JPEG, JPEG), fps="2"), "fps"),
        (part(frames_url(JPEG, JPEG), fps=True), "fps"),
        (part(frames_url(JPEG, JPEG), fps=float("1e9")), "fps"),
        (part(frames_url(JPEG, JPEG), fps=-2), "fps"),
        (part(frames_url(JPEG, JPEG), fps=[2]), "fps"),
        (part(data_url(GIF, "image/gif")), "send video/mp4, video/webm"),
        ({"type": "video_file", "video_file": {"file_id": 1}}, "id of an uploaded file"),
        ({"type": "video_file", "video_file": {"file_id": "file-1", "fps": 0}}, "fps"),
        (part([frames_url(JPEG, JPEG)]), "frames of the video"),
        (part(frames_url(JPEG) + "," * 1_000_000), "has 1000001 frames; the model takes at most 5"),
        (part("data:video/jpeg;base64" + coded(JPEG) * 9), "base64"),
        (part(frames_url(JPEG, JPEG), detail="fine"), "detail"),
    ],
)
async def test_what_is_no_video_is_refused_by_name(video: dict[str, Any], words: str) -> None:
    gateway = watching()
    error = error_of(await gateway.chat(messages=user(video)), 400)
    assert error["param"] == VIDEO.replace("video_url", video["type"])
    assert words in error["message"]
    assert gateway.pipeline.submitted == []


@pytest.mark.parametrize("rate", [b"NaN", b"Infinity", b"1" + b"0" * 400])
async def test_rates_that_are_no_numbers_are_refused(rate: bytes) -> None:
    gateway = watching()
    body = json.dumps({"model": "tiny", "messages": user(part(frames_url(JPEG, JPEG), fps="RATE"))}).encode()
    async with gateway.client() as client:
        response = await client.post("/v1/chat/completions", content=body.replace(b'"RATE"', rate))
    assert response.status_code == 400, response.text
    assert gateway.pipeline.submitted == []


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/responses", {"type": "input_video", "video_url": frames_url(JPEG, JPEG)}),
        ("/v1/responses", part(frames_url(JPEG, JPEG))),
        ("/v1/messages", {"type": "video", "source": {"type": "base64", "data": coded(JPEG)}}),
        ("/v1/messages", part(frames_url(JPEG, JPEG))),
    ],
)
async def test_other_apis_say_where_videos_are_taken(path: str, content: dict[str, Any]) -> None:
    gateway, messages = watching(), [{"role": "user", "content": [content]}]
    given = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 1}
    response = await gateway.post(path, {"model": "tiny", **given})
    assert response.status_code == 400
    assert "videos are taken by /v1/chat/completions, in parts of the type video_url" in response.text
    assert gateway.pipeline.submitted == []


async def test_endpoints_that_read_text_only_refuse_videos() -> None:
    error = error_of(await watching().post("/pooling", {"messages": user(part(frames_url(JPEG, JPEG)))}), 400)
    assert error["param"] == VIDEO


async def test_a_video_is_in_messages_of_any_role_in_every_choice_and_counted_by_the_tokenizer() -> None:
    gateway, clip = watching(), part(frames_url(JPEG, JPEG))
    messages = [
        {"role": "system", "content": [clip]},
        *user("Look", clip),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}, clip]},
    ]
    assert (await gateway.chat(messages=messages, n=2)).status_code == 200
    (request,) = gateway.pipeline.submitted
    assert request.image_files == (ImageFile(b"", frames=(JPEG, JPEG)),) * 3
    assert request.options.n == 2
    assert (await gateway.post("/tokenize", {"model": "tiny", "messages": user(clip)})).status_code == 200
    error = error_of(await gateway.chat(messages=user(*[clip] * 5)), 400)
    assert "has 5 images; the model takes at most 4" in error["message"]


async def test_frames_of_open_requests_take_their_subject_s_room_as_images_do() -> None:
    gateway = watching()
    gateway.generations._image_room = SharedRoom(800, "open with images", 2000)
    clip = part(frames_url(*[b"\xff\xd8\xff" + bytes(297)] * 3))
    error = error_of(await gateway.chat(messages=user(clip)), 429)
    assert "images" in error["message"]
    assert (await gateway.chat(messages=user(part(frames_url(JPEG, JPEG))))).status_code == 200


async def test_frames_are_decoded_with_turns_for_other_requests_between_them() -> None:
    url = frames_url(*[PNG] * 100)
    reference, turns = from_video_url(url, None, None, VIDEO), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    card = replace(CARD, images=ImageLimits(4, 10**6, 10**7, 100))
    (video,) = await watching().context.images.read(card, [reference], {})
    other.cancel()
    assert (video.frames, turns >= 99) == ((PNG,) * 100, True)


async def test_models_that_see_no_images_refuse_videos_by_name() -> None:
    error = error_of(await gateway_saying("x").chat(messages=user(part(frames_url(JPEG, JPEG)))), 400)
    assert (error["param"], "reads text only" in error["message"]) == (VIDEO, True)


async def test_models_that_see_images_only_refuse_videos_by_name() -> None:
    gateway = watching(max_frames=0)
    error = error_of(await gateway.chat(messages=user(part(frames_url(JPEG, JPEG)))), 400)
    assert (error["param"], error["message"]) == (VIDEO, f"The model '{CARD.name}' takes no videos.")
    error = error_of(await gateway.post("/generate", {"text": "a", "video_data": frames_url(JPEG, JPEG)}), 400)
    assert (error["param"], "takes no videos" in error["message"]) == ("video_data", True)
