"""Servers of the APIs of S3 and Google Cloud Storage, and one in front of them.

The one in front records reads, cuts one off, or holds one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from deploy.supervisor.layout import free_port
from tests.waiting import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

STORES = Path(__file__).parents[3] / ".venv-stores" / "bin"
# Headers of one connection, which are not passed on.
_HOPS = {"connection", "content-length", "date", "server", "transfer-encoding"}
_BYTES = {"content-type": "application/octet-stream"}
# Service accounts that the server in front knows; it gives out tokens for any key.
_TOKEN = "google-token"


@dataclass(frozen=True, slots=True)
class Read:
    """A request for a part of an object, or for a listing."""

    path: str
    """`/bucket/key`; of a listing `/bucket`."""
    start: int
    """The first byte of the part."""


class Api(Protocol):
    """An API of stores, by the server that speaks it and the settings of its client."""

    scheme: str

    def serving(self) -> AbstractContextManager[str]:
        """Start the server with objects in memory; return its `host:port`."""

    def put(self, upstream: str, bucket: str, key: str, content: bytes) -> None:
        """Store an object; without a key, make the bucket."""

    def read_path(self, target: str) -> str | None:
        """Return `Read.path` of a GET of `target`; None if it reads neither an object nor a listing."""

    def environment(self, url: str) -> dict[str, str]:
        """Return the settings with which the client connects to `url`, without any from outside."""


@dataclass(slots=True)
class Store:
    """A store without any access control until `refusal`."""

    api: Api
    upstream: str
    """Where the server of the API listens, `host:port`."""
    url: str = ""
    """Where clients connect."""
    reads: list[Read] = field(default_factory=list)
    cut: Read | None = None
    """The read whose answer breaks off after half of its bytes, once."""
    held: Read | None = None
    """The read that is answered only after `release`."""
    holds: threading.Event = field(default_factory=threading.Event)
    """Set once `held` has arrived."""
    release: threading.Event = field(default_factory=threading.Event)
    refusal: tuple[int, str] | None = None
    """Of Google's API: the status and message for requests without a token."""
    tokens: set[str | None] = field(default_factory=set)
    """The values of Authorization that have been sent."""

    def put(self, path: str, content: bytes = b"") -> None:
        """Store an object at `/bucket/key`, or make the bucket `/bucket`."""
        _, bucket, *key = path.split("/", 2)
        self.api.put(self.upstream, bucket, key[0] if key else "", content)

    def starts_of(self, path: str) -> list[int]:
        """Return where the reads of an object began, in their order."""
        return [read.start for read in list(self.reads) if read.path == path]


@contextmanager
def serving(api: Api) -> Iterator[Store]:
    """Start both servers; objects are kept in memory."""
    with api.serving() as upstream:
        store = Store(api, upstream)
        front = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
        front.daemon_threads = True
        store.url = f"http://127.0.0.1:{front.server_port}"
        thread = threading.Thread(target=front.serve_forever, daemon=True)
        thread.start()
        try:
            yield store
        finally:
            store.release.set()
            front.shutdown()
            front.server_close()
            thread.join()


class S3:
    """Moto's server of S3, and s3fs."""

    scheme = "s3"

    @contextmanager
    def serving(self) -> Iterator[str]:
        with ExitStack() as stack:
            process = stack.enter_context(_running("moto_server", "-H", "127.0.0.1", "-p", "0", pipe=True))
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "moto ended"
                found = re.search(r"Running on http://(\S+:\d+)", line)
            # It logs each request.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[1]

    def put(self, upstream: str, bucket: str, key: str, content: bytes) -> None:
        httpx.put(f"http://{upstream}/{bucket}/{key}", content=content, headers=_BYTES).raise_for_status()

    def read_path(self, target: str) -> str | None:
        return urlsplit(target).path.rstrip("/")

    def environment(self, url: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            # Where there are no keys, the client would ask the cloud that it runs in.
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip

    def check_keys(self, store: Store, *, checks: bool) -> None:
        """Refuse requests with unknown access keys, or no longer."""
        content = b"0" if checks else b"inf"
        url = f"http://{store.upstream}/moto-api/reset-auth"
        httpx.post(url, content=content, headers={"content-type": "text/plain"}).raise_for_status()


class Google:
    """An emulator of Google Cloud Storage's JSON API, and gcsfs."""

    scheme = "gs"

    @contextmanager
    def serving(self) -> Iterator[str]:
        port = free_port("127.0.0.1")
        upstream = f"127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"http://{upstream}/").is_success
            except httpx.TransportError:
                assert process.poll() is None, "the emulator ended"
                return False

        arguments = ("start", "--quiet", "--in-memory", "--host", "127.0.0.1", "--port", str(port))
        with _running("gcp-storage-emulator", *arguments, pipe=False) as process:
            wait_until(answers)
            yield upstream

    def put(self, upstream: str, bucket: str, key: str, content: bytes) -> None:
        url = f"http://{upstream}"
        if not key:
            httpx.post(f"{url}/storage/v1/b", json={"name": bucket}).raise_for_status()
            return
        query = {"uploadType": "media", "name": key}
        answer = httpx.post(f"{url}/upload/storage/v1/b/{bucket}/o", params=query, content=content, headers=_BYTES)
        answer.raise_for_status()

    def read_path(self, target: str) -> str | None:
        url = urlsplit(target)
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", url.path)
        if found is None or (found[2] and "media" not in parse_qs(url.query).get("alt", [])):
            return None
        return f"/{found[1]}" + (f"/{unquote(found[2])}" if found[2] else "")

    def environment(self, url: str) -> dict[str, str]:
        # The client would ask the cloud that it runs in, too, and look for the keys of Google's own tools.
        return {"STORAGE_EMULATOR_HOST": url, "NO_GCE_CHECK": "true", "CLOUDSDK_CONFIG": os.devnull}


def service_account(url: str, key: str) -> str:
    """Return a service account's file whose tokens are given out at `url`, with a private key in PEM."""
    account = {
        "type": "service_account", "project_id": "project", "private_key_id": "1", "private_key": key,
        "client_email": "reader@project.iam.gserviceaccount.com", "client_id": "1", "token_uri": f"{url}/token",
    }  # fmt: skip
    return json.dumps(account)


@contextmanager
def _running(program: str, *arguments: str, pipe: bool) -> Iterator[subprocess.Popen[str]]:
    errors = subprocess.PIPE if pipe else subprocess.DEVNULL
    command = [str(STORES / program), *arguments]
    process = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Handler(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        store = self.store
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        path = store.api.read_path(self.path)
        read = None if path is None else Read(path, int(match[1]) if match else 0)
        if read is not None:
            store.reads.append(read)
            store.tokens.add(self.headers.get("authorization"))
        if read is not None and read == store.held:
            store.holds.set()
            store.release.wait(TIMEOUT_S)
        if store.refusal is not None and self.headers.get("authorization") != f"Bearer {_TOKEN}":
            code, message = store.refusal
            self._send_json(code, {"error": {"code": code, "message": message}})
            return
        status, headers, content = self._ask()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if read is not None and read == store.cut:
            store.cut = None
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content)

    def do_HEAD(self) -> None:
        status, headers, _ = self._ask()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def do_POST(self) -> None:
        """Give out a token; nothing else is posted by those who read."""
        assert self.path == "/token"
        self.rfile.read(int(self.headers["content-length"]))
        self._send_json(200, {"access_token": _TOKEN, "expires_in": 3600, "token_type": "Bearer"})

    def _send_json(self, status: int, answer: dict[str, object]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(self.store.upstream, timeout=TIMEOUT_S)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            hops = _HOPS - {"content-length"} if self.command == "HEAD" else _HOPS
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in hops]
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def log_message(self, *_: object) -> None:
        """Print nothing."""
