"""Probes of a server: its model's name, whether prompts may be token ids, and the tokens per word."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import orjson

from deploy.evaluation.bench.client import error_message
from deploy.evaluation.bench.prompts import WORDS
from deploy.evaluation.bench.transport import HttpClient, TransportError

if TYPE_CHECKING:
    from deploy.evaluation.bench.transport import Response

PROBE_TIMEOUT_S = 120.0


class TargetError(Exception):
    """The server cannot be measured; the message states the reason for users."""


def base_url(url: str) -> str:
    """Return `url` without the /v1 that OpenAI clients append or expect."""
    url = url.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url.removesuffix("/v1")


def open_client(url: str, api_key: str | None) -> HttpClient:
    """Return a client for the server at `url`.

    Raises:
        TargetError: the URL is malformed.
    """
    try:
        return HttpClient(base_url(url), {"authorization": f"Bearer {api_key}"} if api_key else {})
    except ValueError as error:
        raise TargetError(str(error)) from None


async def find_model(http: HttpClient) -> str:
    """Return the name of the first generative model in /v1/models.

    Raises:
        TargetError: the server is unreachable, refuses the request, or lists no model.
    """
    body = await _ask(http, "GET", "/v1/models")
    try:
        listed = body["data"]
        return str(next((model for model in listed if model.get("kind") != "embed"), listed[0])["id"])
    except (KeyError, IndexError, TypeError, AttributeError):
        raise TargetError("the server lists no model; choose one with --model") from None


async def accepts_ids(http: HttpClient, model: str) -> bool:
    """Whether the completions endpoint accepts a prompt of token ids.

    Raises:
        TargetError: the server is unreachable or refuses the credential.
    """
    body = {"model": model, "prompt": [300, 301, 302, 303], "max_tokens": 1, "temperature": 0}
    try:
        response = await _exchange(http, "POST", "/v1/completions", body)
    except TransportError as error:
        raise TargetError(str(error)) from None
    if response.status in (401, 403):
        raise TargetError(f"the server refused the request: {_message(response)}")
    return response.status == 200


async def measure_tokens_per_word(http: HttpClient, model: str) -> float:
    """Return the average tokens of a word in `WORDS`, from the server's /tokenize; 1 if it has no such endpoint."""
    text = "".join(" " + word for word in WORDS)
    # vLLM and SGLang read `prompt`, llama-server `content`; each ignores the other.
    body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    with contextlib.suppress(TransportError, orjson.JSONDecodeError, AttributeError):
        response = await _exchange(http, "POST", "/tokenize", body)
        if response.status == 200:
            answer = orjson.loads(response.body)
            count = answer.get("count") or len(answer.get("tokens") or ())
            return count / len(WORDS) if count else 1.0
    return 1.0


async def _ask(http: HttpClient, method: str, path: str) -> Any:
    try:
        response = await _exchange(http, method, path)
    except TransportError as error:
        raise TargetError(f"no server answers: {error}") from None
    if response.status != 200:
        raise TargetError(f"{path} answered {response.status}: {_message(response)}")
    try:
        return orjson.loads(response.body)
    except orjson.JSONDecodeError:
        raise TargetError(f"the answer of {path} is not JSON; is this an OpenAI-compatible server?") from None


async def _exchange(http: HttpClient, method: str, path: str, body: dict[str, Any] | None = None) -> Response:
    payload = orjson.dumps(body) if body is not None else b""
    return await http.request(method, path, payload, timeout_s=PROBE_TIMEOUT_S)


def _message(response: Response) -> str:
    try:
        return error_message(orjson.loads(response.body))
    except orjson.JSONDecodeError:
        return response.body[:200].decode(errors="replace")
