"""Requests that nobody should send, made from good ones by a seeded generator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# Path to a good body.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 2,
        "stop": ["a"],
        "logit_bias": {"1": 2},
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "/v1/completions": {
        "model": "tiny",
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "n": 2,
        "logprobs": 1,
        "stop_regex": "a+",
        "echo": True,
        "prompt_logprobs": 1,
        "bad_words": ["b"],
        "allowed_token_ids": [97, 98, 99],
    },
    "/v1/responses": {
        "model": "tiny",
        "input": [{"role": "user", "content": "x"}],
        "metadata": {"a": "b"},
        "stream": True,
    },
    "/v1/messages": {"model": "tiny", "max_tokens": 2, "messages": HELLO, "tools": [{"name": "f", "input_schema": {}}]},
    "/generate": {
        "text": "a",
        "sampling_params": {"max_new_tokens": 2, "stop": "a"},
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "/v1/embeddings": {
        "model": "tiny",
        "input": ["a", "b"],
        "encoding_format": "base64",
        "dimensions": 2,
        "pooling": "mean",
    },
    "/v1/score": {"model": "tiny", "text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {
        "model": "tiny",
        "query": "a",
        "documents": ["b", {"text": "c"}],
        "top_n": 1,
        "return_documents": True,
    },
    "/tokenize": {"model": "tiny", "prompt": "a"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
    "/abort_request": {"rid": "nothing"},
}
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 1e-320,
    "", "\x00", "\ud800", "\u2028", "a" * 10_000, "null", "NaN", "1", "auto", "../..", "\r\nx-injected: 1",
    [], {}, [[]], [None], {"type": "text"}, {"": ""}, [{"role": "user"}],
]  # fmt: skip
RAW_BODIES = [b"", b"null", b"[]", b"{", b'{"model":', b"\xff\xfe", b"NaN", b'{"a": NaN}', b"{}" * 3, b"\x00" * 50]
CONTENT_TYPES = [
    b"text/plain",
    b"application/x-www-form-urlencoded",
    b"multipart/form-data; boundary=x",
    b"",
    b"a\x01b",
]
# The only answers that may come; 503 is declared, with Retry-After.
ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 429, 431, 503})


@dataclass
class Tally:
    """What has come back."""

    sent: int = 0
    # Answers that were not waited for.
    left: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    unexpected: list[tuple[bytes, bytes]] = field(default_factory=list)


def mutated(generator: random.Random, value: Any) -> Any:
    """Return `value` with something wrong somewhere in it."""
    if isinstance(value, dict) and value and generator.random() < 0.8:
        key = generator.choice(list(value))
        match generator.randrange(4):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {
                    **value,
                    generator.choice(["user", "seed", "best_of", "temperature", "x"]): generator.choice(NASTY),
                }
            case _:
                return {**value, key: mutated(generator, value[key])}
    if isinstance(value, list) and value and generator.random() < 0.7:
        place = generator.randrange(len(value))
        changed = mutated(generator, value[place])
        return [*value[:place], changed, *value[place + 1 :]] * generator.choice([1, 1, 1, 50])
    return generator.choice(NASTY)


def nested(generator: random.Random) -> bytes:
    """Return JSON that is nested as deep as nobody needs it."""
    depth = generator.choice([50, 500, 5_000, 100_000])
    opening, closing = generator.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return b'{"model": "tiny", "messages": ' + opening * depth + b"1" + closing * depth + b"}"


def request(generator: random.Random, model: str = "tiny") -> bytes:
    """Return one request as bytes, to the server of `model`."""
    path = generator.choice(list(GOOD))
    body = dump(GOOD[path])
    headers = [b"content-type: application/json"]
    surplus = 0
    match generator.randrange(12):
        case 0:
            body = generator.choice(RAW_BODIES)
        case 1:
            body = nested(generator)
        case 2:
            body = body[: generator.randrange(len(body))]
        case 3:
            headers = [b"content-type: " + generator.choice(CONTENT_TYPES)]
        case 4:
            headers.append(
                generator.choice([b"x-request-id: a\x01", b"authorization: Bearer \xff\xfe", b"content-encoding: gzip"])
            )
        case 5:
            headers.append(b"x-pando-tenant: a\x0bb\r\n x-folded: 1")
        case 6:
            place = generator.randrange(len(body))
            body = body[:place] + bytes([generator.randrange(256)]) + body[place + 1 :]
        case 7:
            surplus = generator.choice([-1, 1])
        case _:
            body = dump(mutated(generator, GOOD[path]))
    body = body.replace(b'"tiny"', dump(model))
    # Who is refused for the method alone may find the connection closed before a large body is sent.
    method = generator.choice([b"POST"] * 9 + [b"DELETE" if len(body) < 10_000 else b"POST"])
    lines = [method + b" " + path.encode() + b" HTTP/1.1", b"host: localhost", b"connection: close", *headers]
    lines.append(b"content-length: %d" % (len(body) + surplus))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def dump(value: Any) -> bytes:
    """Return JSON, lone surrogates as escapes."""
    return json.dumps(value).encode()


async def send(port: int, content: bytes, *, is_short: bool = False, patience_s: float = 60.0) -> bytes:
    """Send one request on a connection of its own, and return all that comes back.

    Raises:
        TimeoutError: that takes longer than `patience_s`; the connection has been closed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        await writer.drain()
        if is_short:
            writer.write_eof()
        async with asyncio.timeout(patience_s):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def loiter(port: int, seed: int, until: asyncio.Event, *, lanes: int = 8) -> int:
    """Open connections as bad clients do, until an event; return how many there were.

    Some say nothing, some send a byte now and then, some close one direction in the middle, some never read.
    """
    opened = 0

    async def run(lane: int) -> None:
        nonlocal opened
        generator = random.Random(seed * 1000 + lane)
        while not until.is_set():
            try:
                await _loiter_once(port, generator, until)
            except OSError:
                await asyncio.sleep(0.1)
            opened += 1

    async with asyncio.TaskGroup() as tasks:
        for lane in range(lanes):
            tasks.create_task(run(lane))
    return opened


async def _loiter_once(port: int, generator: random.Random, until: asyncio.Event) -> None:
    body = dump({**GOOD["/v1/completions"], "stream": True, "max_tokens": 500, "ignore_eos": True})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        patience = generator.uniform(0.5, 6.0)
        match generator.randrange(5):
            case 0:
                pass
            case 1:
                for place in range(generator.randrange(5, 60)):
                    writer.write(whole[place : place + 1])
                    await asyncio.sleep(0.05)
            case 2:
                writer.write(whole[: generator.randrange(len(whole))])
                writer.write_eof()
            case 3:
                # Nothing is ever read of the stream.
                writer.write(whole)
            case _:
                writer.write(whole)
                await asyncio.sleep(generator.uniform(0.0, 0.3))
                writer.transport.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await until.wait()
    finally:
        writer.transport.abort()


async def fuzz(
    port: int,
    count: int,
    seed: int,
    *,
    lanes: int = 16,
    make: Callable[[random.Random], bytes] = request,
    leave_after_s: float | None = None,
) -> Tally:
    """Send `count` requests in `lanes` lanes; a defect shows as a status that is not allowed, or as none at all.

    Answers that take longer than `leave_after_s` are not waited for: real models write at length if nobody stops them.
    """
    tally = Tally()

    async def ask(content: bytes) -> bytes | None:
        try:
            return await send(port, content, is_short=is_cut(content), patience_s=leave_after_s or 60.0)
        except TimeoutError:
            if leave_after_s is None:
                raise
            return None

    async def run(lane: int) -> None:
        generator = random.Random(seed * 1000 + lane)
        for _ in range(count // lanes):
            content = make(generator)
            # More is announced than comes: the end of the connection says so.
            answer = await ask(content)
            tally.sent += 1
            if answer is None:
                tally.left += 1
                continue
            status = int(answer[9:12]) if answer[:9] == b"HTTP/1.1 " else 0
            tally.statuses[status] = tally.statuses.get(status, 0) + 1
            # A request that was cut short may be left without an answer.
            if status not in ALLOWED and not (status == 0 and is_cut(content)):
                tally.unexpected.append((content[:2000], answer[:500]))

    async with asyncio.TaskGroup() as tasks:
        for lane in range(lanes):
            tasks.create_task(run(lane))
    return tally


def is_cut(content: bytes) -> bool:
    """Whether a request announces more than it has."""
    head, _, body = content.partition(b"\r\n\r\n")
    return int(head.rpartition(b"content-length: ")[2]) > len(body)
