"""Requests with images: the same conversation in each API, and the parts that the pipeline gets of it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

from common.requests import ChatPrompt, ImageFile, ImageLimits
from common.settings import GatewaySettings
from tests.fakes.pipeline import CARD, FakeModel, FakePipeline, says
from tests.gateway.support import FakedGateway

MAX_FILE_BYTES = 4096
SEEING = replace(CARD, images=ImageLimits(4, MAX_FILE_BYTES, 10**7))
# What the gateway looks at are the first bytes; the tokenizer decodes.
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(100))
GIF, WEBP = b"GIF89a" + bytes(40), b"RIFF\x10\x00\x00\x00WEBPVP8 "
SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{coded(content)}"


def seeing(*words: str, **settings: Any) -> FakedGateway:
    return FakedGateway(FakePipeline(says(*words or ("x",))), GatewaySettings(**settings), FakeModel(SEEING))


def chat_image(content: bytes, detail: str | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content), **({"detail": detail} if detail else {})}}


def user(*parts: dict[str, Any] | str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


@dataclass(frozen=True)
class Dialect:
    """The same conversation in one API: two turns of the user, a call, and its result, with four images."""

    path: str
    body: dict[str, Any]


def block(content: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": coded(content)}}


def input_image(content: bytes) -> dict[str, Any]:
    return {"type": "input_image", "detail": "auto", "image_url": data_url(content)}


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {
            "messages": [
                *user("One", chat_image(PNG), "two", chat_image(JPEG)),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}, chat_image(GIF)]},
                *user(chat_image(WEBP), "last"),
            ]
        },
    ),
    "responses": Dialect(
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "One"},
                        input_image(PNG),
                        {"type": "input_text", "text": "two"},
                        input_image(JPEG),
                    ],
                },
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_text", "text": "r"}, input_image(GIF)],
                },
                {"role": "user", "content": [input_image(WEBP), {"type": "input_text", "text": "last"}]},
            ]
        },
    ),
    "messages": Dialect(
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "One"},
                        block(PNG),
                        {"type": "text", "text": "two"},
                        block(JPEG, "image/jpeg"),
                    ],
                },
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [{"type": "text", "text": "r"}, block(GIF, "image/gif")],
                        },
                        block(WEBP, "image/webp"),
                        {"type": "text", "text": "last"},
                    ],
                },
            ],
        },
    ),
}
PARTS = [
    ("user", ("One", ImageFile(PNG), "two", ImageFile(JPEG))),
    ("assistant", ()),
    ("tool", ("r", ImageFile(GIF))),
    ("user", (ImageFile(WEBP), "last")),
]


def parts_of(gateway: FakedGateway, number: int = 0) -> list[tuple[str, tuple[Any, ...]]]:
    prompt = gateway.pipeline.submitted[number].prompt
    assert isinstance(prompt, ChatPrompt)
    for message in prompt.messages:
        assert message.content is None or not message.parts
    return [(message.role, message.parts) for message in prompt.messages]


async def upload(gateway: FakedGateway, content: bytes, headers: dict[str, str], purpose: str = "vision") -> str:
    async with gateway.client() as client:
        files = {"file": ("a.png", content, "text/plain")}
        response = await client.post("/v1/files", files=files, data={"purpose": purpose}, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def of_file(file_id: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "chat": (
            "/v1/chat/completions",
            {"messages": user({"type": "image_file", "image_file": {"file_id": file_id, "detail": "low"}})},
        ),
        "responses": (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": file_id, "detail": "low"}]}]},
        ),
        "messages": (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": file_id}}]}
                ],
            },
        ),
    }
