"""A small model of a user-aware server, in which each rule can be broken: what oracles must tell apart."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
import zlib
from collections import defaultdict
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any

from PIL import Image
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.openai_server import FakeOpenAIServer, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from starlette.requests import Request

PAGE = 16
EPOCH_S = 0.3
# What a hostile grammar takes to compile: longer than a busy machine keeps a request waiting.
HOSTILE_S = 4.0
# What a picture takes to encode.
ENCODING_S = 0.03
# An adapter of the first tenant, and what refusals, other services' answers about it and its own answers take: whole
# seconds of a clock that measures nothing else, so that sums and differences of equal times are equal.
ADAPTER = "confidential"
REFUSAL_S, LOOK_UP_S, ADAPTER_S = 1, 1, 20
K = 3
NAMES = ("user_id", "user", "safety_identifier", "cache_salt", "session_id", "prompt_cache_key")
# Enough hits by somebody who has not computed the text.
PROBING_HITS = 8

Chain = bytes


@dataclass(frozen=True)
class Key:
    tenant: str
    subject: str
    vouches: bool = False
    admin: bool = False


KEYS = {
    "app": Key("default", "key/app", vouches=True),
    "plain": Key("default", "key/plain"),
    "personal": Key("default", "user/somebody"),
    "rival": Key("rival", "key/rival"),
    "rival-app": Key("rival", "key/rival-app", vouches=True),
    "third": Key("third", "key/third"),
    "isolated": Key("isolated", "key/isolated", vouches=True),
    "admin": Key("default", "key/admin", admin=True),
}
FLAGS = [
    *("--api-key", "app", "--plain-key", "plain", "--personal-key", "personal", "--rival-key", "rival"),
    *("--rival-vouching-key", "rival-app", "--third-key", "third", "--admin-key", "admin"),
    *("--isolated-key", "isolated"),
]


@dataclass(frozen=True)
class Who:
    tenant: str
    subject: str
    view: str


@dataclass
class Chains:
    """What has been asked, by prefix of whole pages."""

    views: dict[Chain, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    evidence: dict[tuple[str, Chain], set[str]] = field(default_factory=lambda: defaultdict(set))
    shared: set[tuple[str, Chain]] = field(default_factory=set)
    hits: dict[tuple[str, Chain], dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    order: dict[tuple[str, str, Chain], float] = field(default_factory=dict)


@dataclass
class AwareServer(FakeOpenAIServer):
    """Each flag breaks one rule."""

    has_keys: bool = True
    believes_names: bool = False
    shares_across_tenants: bool = False
    isolates_tenants: bool = True
    evicts_others: bool = False
    serves_in_order: bool = False
    shows_metrics: bool = False
    shares_grammars: bool = False
    compiles_in_order: bool = False
    drafts: bool = False
    shares_drafts: bool = False
    sees: bool = False
    # What pictures are known by: their pixels, their file's name, or a short hash.
    knows_by: str = "pixels"
    shares_encodings: bool = False
    shares_views: bool = False
    # By what others learn of an adapter: its refusal's status or time, or the list of models.
    shows_adapter: str = ""
    # Time of all answers that concern adapters.
    worked_s: int = 0
    storage: Path | None = None
    authenticates: bool = True
    capacity_pages: int = 512
    step_s: float = 0.0
    chains: Chains = field(default_factory=Chains)
    tokens: int = 0
    grammars: set[tuple[str, str]] = field(default_factory=set)
    answers: set[tuple[str, bytes]] = field(default_factory=set)
    encoded: set[tuple[str, str]] = field(default_factory=set)
    _fresh: count[int] = field(default_factory=count)
    _epoch: int = 0
    _served: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _waiting: list[tuple[float, int, str, asyncio.Event]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _compiling: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._listed),
                Route("/v1/models/{name}", self._listed),
                Route("/v1/lora_adapters", self._adapters),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/messages", self._answer, methods=["POST"]),
                Route("/v1/chat/completions", self._look, methods=["POST"]),
                Route("/metrics", self._metrics),
            ]
        )

    async def _metrics(self, request: Request) -> Response:
        key = KEYS.get(_secret(request))
        if not self.shows_metrics and (key is None or not key.admin):
            return JSONResponse({"error": {"message": "no"}}, 401)
        return PlainTextResponse(f'# HELP tokens all\ntokens_total{{model="good"}} {float(self.tokens)}\n')

    async def _adapters(self, request: Request) -> Response:
        key = KEYS.get(_secret(request))
        if key is None or not key.admin:
            return JSONResponse({"error": {"message": "no"}}, 403)
        return JSONResponse({"data": [{"lora_name": ADAPTER}]})

    async def _listed(self, request: Request) -> Response:
        key = KEYS.get(_secret(request))
        may_see = self.shows_adapter == "list" or (key is not None and key.tenant == "default")
        names = [*self.listed, *([f"{self.listed[0]}:{ADAPTER}"] if may_see else [])]
        name = request.path_params.get("name")
        if name is not None and name not in names:
            return JSONResponse({"error": {"message": f"no model {name}"}}, 404)
        return JSONResponse({"data": [{"id": each, "object": "model"} for each in names if name in (None, each)]})

    def _refuse(self, who: Who, body: dict[str, Any]) -> Response | None:
        """Refuse a name of an adapter that does not exist for this tenant."""
        _, is_named, name = body["model"].partition(":")
        name = name if is_named else body.get("lora_path")
        if name is None:
            return None
        self.worked_s += REFUSAL_S
        if name == ADAPTER and who.tenant == "default":
            self.worked_s += ADAPTER_S
            return None
        exists = name == ADAPTER
        if exists and self.shows_adapter == "time":
            self.worked_s += LOOK_UP_S
        status = 403 if exists and self.shows_adapter == "status" else 404
        return JSONResponse({"error": {"message": f"no model {name}"}}, status)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        who = self._who(request, body)
        if who is None:
            return JSONResponse({"error": {"message": "no key"}}, 401)
        refusal = self._refuse(who, body) or await self._compile(who, body)
        if refusal is not None:
            return refusal
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"].split()
        self._advance()
        number = next(self._fresh)
        await self._wait(who, number)
        found, answer = self._ask(who, [str(word) for word in text])
        self.tokens += len(text)
        usage = {"prompt_tokens": len(text), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": found}}
        if "messages" in body:
            return JSONResponse({"content": [], "usage": {"cache_read_input_tokens": found}})
        if not body.get("stream"):
            return JSONResponse({"choices": [{"index": 0, "text": answer}], "usage": usage})
        further = self._take_turns(who, number, body["max_tokens"] - 1)
        packets = body["max_tokens"] if self.drafts and not self._has_answered(who, text) else 1
        return StreamingResponse(_stream(usage, further, packets), media_type="text/event-stream")

    async def _look(self, request: Request) -> Response:
        """Answer about pictures: each is two pages, and takes some time unless the view has sent it before."""
        body = await request.json()
        who = self._who(request, body)
        if who is None or not self.sees:
            return JSONResponse({"error": {"message": "no"}}, 400 if who else 401)
        words: list[str] = []
        for part in body["messages"][0]["content"]:
            if part["type"] == "text":
                words += part["text"].split()
                continue
            picture = self._name_of(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
            words += [f"{picture}/{number}" for number in range(2 * PAGE)]
            encoding = "" if self.shares_encodings else who.view, picture
            if encoding not in self.encoded:
                await asyncio.sleep(ENCODING_S)
            self.encoded.add(encoding)
        self._advance()
        found, answer = self._ask(replace(who, tenant="all", view="all") if self.shares_views else who, words)
        usage = {"prompt_tokens": len(words), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": found}}
        return JSONResponse({"choices": [{"index": 0, "message": {"content": answer}}], "usage": usage})

    def _name_of(self, data: bytes) -> str:
        picture = Image.open(BytesIO(data))
        if self.knows_by == "name":
            return str(picture.info["Title"])
        if self.knows_by == "EXIF id":
            return str(picture.getexif().get_ifd(0x8769)[0xA420])
        pixels = picture.convert("RGB").tobytes()
        return str(zlib.crc32(pixels)) if self.knows_by == "short hash" else hashlib.sha256(pixels).hexdigest()

    def _has_answered(self, who: Who, text: list[object]) -> bool:
        """Return whether an answer is drafted: the same view has had it, or anybody."""
        answer = ("" if self.shares_drafts else who.view, _digest([str(word) for word in text]))
        is_known = answer in self.answers
        self.answers.add(answer)
        return is_known

    def _who(self, request: Request, body: dict[str, Any]) -> Who | None:
        name = next((body[each] for each in NAMES if body.get(each)), (body.get("metadata") or {}).get("user_id"))
        if not self.has_keys:
            if "x-forwarded-for" in request.headers and not self.believes_names:
                return Who("default", "anonymous", f"request-{next(self._fresh)}")
            key = Key("default", "local")
        else:
            found = KEYS.get(_secret(request))
            if found is None:
                return None
            key = found
        if self.believes_names:
            subject = f"{key.subject}/{name or next(self._fresh)}"
            return Who(key.tenant, subject, subject)
        person = next((body[each] for each in NAMES[:3] if body.get(each)), (body.get("metadata") or {}).get("user_id"))
        if key.vouches and person:
            return Who(key.tenant, f"user/{person}", f"user/{person}/{body.get('cache_salt', '')}")
        return Who(key.tenant, key.subject, f"{key.subject}/{person}/{body.get('cache_salt', '')}")

    def _ask(self, who: Who, text: list[str]) -> tuple[int, str]:
        chains = [_digest(text[: end * PAGE]) for end in range(1, len(text) // PAGE + 1)]
        place = "all" if self.shares_across_tenants else who.tenant
        found, store = 0, self.chains
        for chain in chains:
            is_own = (who.tenant, who.view) in store.views[chain]
            if not is_own and (place, chain) in store.shared:
                store.hits[place, chain][who.subject] += 1
            if not is_own and (place, chain) not in store.shared:
                break
            found += 1
        answer = _digest(text).hex()[:8]
        if self.storage is not None:
            found, answer = self._stored(who, chains, found, answer)
        for chain in chains[found:] if chains else []:
            store.views[chain].add((who.tenant, who.view))
            if who.subject != "anonymous" and not (who.tenant == "isolated" and self.isolates_tenants):
                store.evidence[place, chain].add(f"{who.tenant}/{who.subject}")
        for chain in chains:
            store.order[who.tenant, who.view, chain] = time.monotonic()
        self._evict(who)
        return found * PAGE, answer

    def _stored(self, who: Who, chains: list[Chain], found: int, answer: str) -> tuple[int, str]:
        """Read and write one file per page: a tag, and the page's part of the answer."""
        assert self.storage is not None
        for index, chain in enumerate(chains):
            path = self.storage / chain.hex()[:2] / chain.hex()
            tag = _digest([chain.hex(), who.view])
            if path.exists():
                data = path.read_bytes()
                if self.authenticates and data != tag:
                    break
                found = max(found, index + 1)
                answer = answer if data == tag else data.hex()[:8]
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(tag)
        return found, answer

    def _advance(self) -> None:
        epoch = int(time.monotonic() / EPOCH_S)
        if epoch == self._epoch:
            return
        self._epoch = epoch
        store = self.chains
        for (place, chain), subjects in store.hits.items():
            if sum(hits >= PROBING_HITS for hits in subjects.values()) >= 2:
                store.shared.discard((place, chain))
                store.evidence[place, chain].clear()
        store.shared |= {place for place, subjects in store.evidence.items() if len(subjects) >= K}

    def _evict(self, who: Who) -> None:
        """Evict the oldest of all, or of the tenant that has most."""
        order = self.chains.order
        while len(order) > self.capacity_pages:
            candidates = list(order)
            if not self.evicts_others and who.tenant != "default":
                candidates = [each for each in order if each[0] == who.tenant]
            elif not self.evicts_others and who.subject.startswith(("key/", "user/somebody")):
                candidates = [each for each in order if each[:1] == (who.tenant,) and each[1].startswith(who.subject)]
            oldest = min(candidates, key=lambda each: order[each])
            del order[oldest]
            self.chains.views[oldest[2]].discard(oldest[:2])

    async def _take_turns(self, who: Who, number: int, tokens: int) -> None:
        for _ in range(tokens):
            await self._wait(who, number)

    async def _wait(self, who: Who, number: int) -> None:
        """Generate one token at a time: of the oldest request, or of the oldest of the tenant that has had least."""
        if not self.step_s:
            return
        turn = asyncio.Event()
        entry = (time.monotonic(), number, who.tenant, turn)
        self._waiting.append(entry)
        # A busy machine may send its requests slowly: none is served until they are all there.
        self._serve_later()
        try:
            await turn.wait()
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def _serve(self) -> None:
        if not self._waiting:
            return

        def share(entry: tuple[float, int, str, asyncio.Event]) -> tuple[float, ...]:
            return (0 if self.serves_in_order else self._served[entry[2]], entry[1])

        chosen = min(self._waiting, key=share)
        self._waiting.remove(chosen)
        self._served[chosen[2]] += 1
        chosen[3].set()
        if self._waiting:
            self._serve_later()

    def _serve_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.step_s, self._serve)

    async def _compile(self, who: Who, body: dict[str, Any]) -> Response | None:
        form = body.get("response_format") or body.get("guided_regex")
        if form is None:
            return None
        text = json.dumps(form)
        if "no such type" in text:
            return JSONResponse({"error": {"message": "not a schema"}}, 400)
        place = "all" if self.shares_grammars else f"{who.tenant} {who.subject}"
        is_hostile = "guided_regex" in body
        if (place, text) not in self.grammars:
            async with self._compiling["all" if self.compiles_in_order else f"{who.tenant} {who.subject}"]:
                await asyncio.sleep(HOSTILE_S if is_hostile else 0.02)
            self.grammars.add((place, text))
        return None


async def _stream(usage: dict[str, Any], further: Awaitable[None], packets: int) -> AsyncIterator[bytes]:
    for _ in range(packets):
        yield encode({"choices": [{"index": 0, "text": " w", "finish_reason": None}]})
    await further
    yield encode({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    yield encode({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _secret(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _digest(words: list[str]) -> bytes:
    return hashlib.sha256(" ".join(words).encode()).digest()
