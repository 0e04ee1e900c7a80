"""An OpenAI-compatible server that misbehaves on request: the model's name says how."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.supervisor.layout import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

MODELS = (
    "good",
    "no-usage",
    "no-done",
    "stalls",
    "error-midway",
    "breaks-off",
    "not-json",
    "overloaded",
    "text-only",
    "llama-timings",
    "opens-with-empty-chunk",
)

# What an answer ends with in its middle.
MIDWAY = {
    "error-midway": b'data: {"error": {"message": "the worker died", "code": "unavailable"}}\n\n',
    "breaks-off": b"",
    "no-done": b": nothing more\n\n",
    "not-json": b"data: {oh\n\ndata: [DONE]\n\n",
}


@dataclass
class FakeOpenAIServer:
    """Keeps what it was asked; `cached` maps a user to the prompt tokens that a second question finds."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    disconnects: int = 0
    chunk_interval_s: float = 0.0
    listed: list[str] = field(default_factory=lambda: ["good"])
    cached: dict[str, int] = field(default_factory=dict)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.listed]})

    async def _tokenize(self, request: Request) -> Response:
        words = (await request.json())["prompt"].split()
        return JSONResponse({"count": 2 * len(words)})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        model = body["model"]
        if model == "overloaded":
            return JSONResponse({"error": {"message": "come back later", "type": "overloaded"}}, 429)
        if model == "text-only" and not isinstance(body.get("prompt", ""), str):
            return JSONResponse({"error": {"message": "prompt must be a string"}}, 400)
        if model not in MODELS:
            return JSONResponse({"error": {"message": f"no model {model}"}}, 404)
        if not body.get("stream"):
            return JSONResponse({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
        return StreamingResponse(self._stream(model, body), media_type="text/event-stream")

    async def _stream(self, model: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        finished = False
        try:
            async for chunk in self._chunks(model, body):
                yield chunk
            finished = True
        finally:
            self.disconnects += not finished

    async def _chunks(self, model: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        is_chat, count = "messages" in body, body.get("max_tokens") or 8

        def event(text: str, finish: str | None = None) -> bytes:
            content = {"delta": {"content": text}} if is_chat else {"text": text}
            return encode({"choices": [{"index": 0, **content, "finish_reason": finish}]})

        if is_chat:
            yield encode({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        elif model == "opens-with-empty-chunk":
            yield event("")
        for i in range(count):
            await asyncio.sleep(60 if model == "stalls" and i else self.chunk_interval_s)
            if i == count // 2 and model in MIDWAY:
                if model == "breaks-off":
                    raise ConnectionAbortedError
                yield MIDWAY[model]
                return
            yield event(f" w{i}", None)
        yield event("", "length")
        if model == "llama-timings":
            yield encode({"choices": [], "timings": {"cache_n": 5, "prompt_n": 7, "predicted_n": count}})
        elif model != "no-usage" and (body.get("stream_options") or {}).get("include_usage"):
            yield encode({"choices": [], "usage": self._usage(body, count)})
        yield b"data: [DONE]\n\n"

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        prompt = body.get("prompt")
        tokens = len(prompt) if prompt is not None else sum(len(str(m["content"]).split()) for m in body["messages"])
        user = body.get("user", "")
        cached, self.cached[user] = min(self.cached.get(user, 0), tokens), tokens
        details = {"cached_tokens": cached if user else 0}
        return {"prompt_tokens": tokens, "completion_tokens": count, "prompt_tokens_details": details}


def encode(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


@contextlib.contextmanager
def running_server(fake: FakeOpenAIServer | None = None) -> Iterator[FakeOpenAIServer]:
    """Serve from a thread, on a free port."""
    fake = fake or FakeOpenAIServer()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the fake server does not start"
        time.sleep(0.001)
    try:
        yield fake
    finally:
        server.force_exit = server.should_exit = True
        thread.join(10)


def free_url() -> str:
    """Return a URL at which nothing listens."""
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"
