"""The pictures, the made-up tokenizer and the client of the experiment, without a deployment."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from tokenizers import Tokenizer

from deploy.evaluation.bench.partial_results import Deadline
from deploy.evaluation.bench.transport import Response
from deploy.evaluation.experiments.images import (
    ImageChatClient,
    RequestError,
    about,
    picture_url,
    served_directory,
    size_of,
)
from services.tokenizer.images.processor import Detail
from services.tokenizer.images.registry import read_processor

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = Path("deploy/evaluation/shapes")


def opened(url: str) -> Image.Image:
    head, coded = url.split(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(coded)))


def test_pictures_have_the_size_that_was_asked_and_differ() -> None:
    first, second = (opened(picture_url(size_of("100x60"))) for _ in range(2))
    assert first.size == second.size == (100, 60)
    assert first.tobytes() != second.tobytes()


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen2.5-vl-tiny"])
def test_a_shape_is_completed_with_a_tokenizer_and_a_processor(name: str, tmp_path: Path) -> None:
    directory = served_directory(SHAPES / name, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.token_to_id("<|image_pad|>") == config["image_token_id"]
    assert tokenizer.encode("Two <|image_pad|>").ids == [*b"Two ", config["image_token_id"]]
    # Streams are watched by their texts, so each random token must have one.
    words = {tokenizer.id_to_token(number) for number in range(config["video_token_id"] + 1)}
    assert len(words) == config["video_token_id"] + 1
    assert None not in words
    grid, _ = read_processor(directory, "<|image_pad|>").cut(opened(picture_url((1024, 768))), Detail.AUTO)
    assert grid == (1, 2 * 27, 2 * 37)


def test_a_directory_with_a_tokenizer_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert served_directory(tmp_path, tmp_path / "unused") == tmp_path


class OneResponse:
    """A server that gives one answer, and keeps the request."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.sent: bytes = b""

    async def request(
        self, method: str, path: str, body: bytes, *, sink: Callable[[bytes], None], timeout_s: float
    ) -> Response:
        assert (method, path) == ("POST", "/v1/chat/completions")
        assert 0 < timeout_s <= 60
        self.sent = body
        if self.status == 200:
            sink(self.body)
        return Response(self.status, self.body)


def test_an_answer_has_its_tokens_and_what_was_cached() -> None:
    usage = {"prompt_tokens": 1030, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1008}}
    events = [{"choices": [{"delta": {"content": "abc"}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    server = OneResponse(200, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))
    client = ImageChatClient(server, "m", Deadline.after(60))  # type: ignore[arg-type]  # of its one method
    message = about(["data:image/png;base64,AA=="])
    answer = asyncio.run(client.ask("ann", [message], 1))
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("abc", 1030, 1008)
    assert answer.first_token_ms > 0
    sent = json.loads(server.sent)
    assert sent["user"] == "ann"
    assert sent["messages"] == [message]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(400, b'{"error": {"message": "too narrow"}}', "HTTP 400: too narrow"), (200, b"", "without a token")],
)
def test_failures_are_named(status: int, body: bytes, words: str) -> None:
    client = ImageChatClient(OneResponse(status, body), "m", Deadline.after(60))  # type: ignore[arg-type]  # as above
    with pytest.raises(RequestError, match=words):
        asyncio.run(client.ask("ann", [about([])], 1))
