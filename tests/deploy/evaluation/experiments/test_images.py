"""The pictures, the made-up tokenizer, the client and the watched streams of the experiment, without a deployment."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from PIL import Image
from tokenizers import Tokenizer

from deploy.evaluation.bench.partial_results import Deadline, PartialResults
from deploy.evaluation.bench.transport import Response
from deploy.evaluation.experiments import images
from deploy.evaluation.experiments.image_client import (
    ImageClient,
    OtherProcess,
    PreparedRequest,
    RequestError,
    TimedAnswer,
    send_at_rate,
)
from deploy.evaluation.experiments.images import (
    TEXT_IDS,
    ImageMeasurement,
    about,
    picture_url,
    served_directory,
    size_of,
)
from services.tokenizer.images.processor import Detail
from services.tokenizer.images.registry import read_processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deploy.evaluation.bench.client import AnswerReader

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
    client = ImageClient(server, "m", Deadline.after(60))  # type: ignore[arg-type]  # of its one method
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
    client = ImageClient(OneResponse(status, body), "m", Deadline.after(60))  # type: ignore[arg-type]  # as above
    with pytest.raises(RequestError, match=words):
        asyncio.run(client.ask("ann", [about([])], 1))


IMAGE_PROMPT = 37


class PacedClient(ImageClient):
    """Streams without end, and answers other requests at once; keeps those that came while streams ran."""

    def __init__(self) -> None:
        super().__init__(None, "m", Deadline.after(60))  # type: ignore[arg-type]  # nothing is sent
        self.sent: list[PreparedRequest] = []
        self.streams = 0

    async def send(self, request: PreparedRequest, reader: AnswerReader | None = None) -> TimedAnswer:
        if reader is None:
            if self.streams:
                self.sent.append(request)
            return TimedAnswer("abc", 1.0, IMAGE_PROMPT, 0)
        self.streams += 1
        try:
            while True:
                reader.chunks_s.append(time.monotonic())
                await asyncio.sleep(0)
        finally:
            self.streams -= 1


class SameProcess:
    """Stands in for `OtherProcess`, with a client of this process."""

    def __init__(self, client: ImageClient) -> None:
        self._client = client
        self._held: list[PreparedRequest] = []

    async def hold(self, requests: Sequence[PreparedRequest]) -> None:
        self._held = list(requests)

    async def send(self, rate: float, began_at: float) -> list[TimedAnswer]:
        return await send_at_rate(self._client, self._held, rate, began_at)


def measurement_of(arguments: argparse.Namespace, client: ImageClient, file: Path, **pids: int) -> ImageMeasurement:
    other: Any = SameProcess(client)
    return ImageMeasurement(arguments, client, other, PartialResults("images", "m", file), pids)


def test_texts_are_as_many_and_as_long_as_images_and_their_gaps_are_compared(tmp_path: Path) -> None:
    client, file = PacedClient(), tmp_path / "results.json"
    arguments = argparse.Namespace(size=(28, 28), streams=2, rate=400.0, seconds=0.05)
    measurement = measurement_of(arguments, client, file)

    async def measure() -> None:
        await measurement.streams_beside_images()
        client.sent.clear()
        await measurement.streams_beside_texts()
        await measurement.streams_beside_images()

    asyncio.run(measure())
    bodies = [json.loads(request.body) for request in client.sent]
    texts, images = (
        [body for request, body in zip(client.sent, bodies, strict=True) if request.path == path]
        for path in ("/v1/completions", "/v1/chat/completions")
    )
    assert len(texts) == len(images) == 20
    assert {len(body["prompt"]) for body in texts} == {IMAGE_PROMPT}
    assert {number for body in texts for number in body["prompt"]} <= set(TEXT_IDS)
    assert len({tuple(body["prompt"]) for body in texts}) == 20
    assert len({body["user"] for body in bodies}) == 40
    assert {body["max_tokens"] for body in bodies} == {1}
    results = {result["metric"]: result for result in json.loads(file.read_text())}
    ratio = results["ITL p99, 2 streams, beside images / beside texts"]
    # Images that were watched before texts are compared with none.
    assert ratio["repeats"] == 1
    assert results["ITL p99, 2 streams beside 400 images/s"]["repeats"] == 2
    assert results["prompt, text, new, beside 2 streams"]["value"] == IMAGE_PROMPT


def test_processor_time_is_that_of_each_service_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times, file = iter([{"gateway": 1.0, "worker": 20.0}, {"gateway": 1.5, "worker": 24.0}]), tmp_path / "results.json"
    process_ids = {"gateway": 1, "worker": 2}
    monkeypatch.setattr(images, "processor_seconds", lambda pids: next(times) if pids == process_ids else {})
    arguments = argparse.Namespace(size=(28, 28), images=4, concurrency=2)
    asyncio.run(measurement_of(arguments, PacedClient(), file, **process_ids).throughput())
    found = {result["metric"]: (result["value"], result["unit"]) for result in json.loads(file.read_text())}
    assert found["processor time of the gateway, throughput"] == (125.0, "ms/image")
    assert found["processor time of the worker, throughput"] == (1000.0, "ms/image")


class CountingServer(BaseHTTPRequestHandler):
    """Answers each request with one token; keeps when they came, and from which process."""

    protocol_version = "HTTP/1.1"
    came: ClassVar[list[tuple[float, bytes]]] = []
    status = 200

    def do_POST(self) -> None:
        self.came.append((time.monotonic(), self.rfile.read(int(self.headers["content-length"]))))
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})
        body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
        if self.status != 200:
            body = b'{"error": {"message": "made up"}}'
        self.send_response(self.status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    CountingServer.came, CountingServer.status = [], 200
    with ThreadingHTTPServer(("127.0.0.1", 0), CountingServer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


async def test_another_process_sends_what_it_holds_at_a_rate(server: str) -> None:
    requests = [PreparedRequest("/v1/chat/completions", b"x" * size) for size in (1, 2, 3_000_000)]
    async with OtherProcess(server, "m", Deadline.after(60)) as other:
        await other.hold(requests)
        began_at = time.monotonic() + 0.1
        answers = await other.send(10.0, began_at)
        assert [(answer.text, answer.prompt_tokens) for answer in answers] == [("a", 7)] * 3
        came = sorted(CountingServer.came)
        assert [len(body) for _, body in came] == [1, 2, 3_000_000]
        assert all(at >= began_at + number / 10 for number, (at, _) in enumerate(came))
        await other.hold(())
        assert await other.send(10.0, time.monotonic()) == []
        CountingServer.status = 503
        await other.hold(requests[:1])
        with pytest.raises(RequestError, match="HTTP 503: made up"):
            await other.send(10.0, time.monotonic())


async def test_a_failure_ends_the_other_process_and_its_death_is_named() -> None:
    async def fail(other: OtherProcess) -> None:
        async with other:
            process = other._process
            assert process is not None
            os.kill(process, signal.SIGSTOP)
            raise RequestError("made up")

    other = OtherProcess("http://127.0.0.1:9", "m", Deadline.after(60))
    with pytest.raises(RequestError, match="made up"):
        await fail(other)
    with pytest.raises(RuntimeError):
        await other.hold(())
    async with OtherProcess("http://127.0.0.1:9", "m", Deadline.after(60)) as other:
        assert other._process is not None
        os.kill(other._process, signal.SIGKILL)
        with pytest.raises(RequestError, match="has died"):
            await other.send(1.0, time.monotonic())
