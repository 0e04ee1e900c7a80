"""A server of S3's API (moto), and a server in front of it that records reads, cuts one off, or holds one."""

from __future__ import annotations

import re
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from tests.waiting import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

STORES = Path(__file__).parents[3] / ".venv-stores" / "bin"
# Headers of one connection, which are not passed on.
_HOPS = {"connection", "content-length", "date", "server", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Read:
    """A request for a part of an object, or for a listing."""

    path: str
    """`/bucket/key`; of a listing `/bucket`."""
    start: int
    """The first byte of the part."""


@dataclass(slots=True)
class S3:
    """A store without any access control until `check_keys`."""

    upstream: str
    """Where moto listens, `host:port`."""
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

    def put(self, path: str, content: bytes = b"") -> None:
        """Store an object at `/bucket/key`, or make the bucket `/bucket`."""
        headers = {"content-type": "application/octet-stream"}
        httpx.put(f"http://{self.upstream}{path}", content=content, headers=headers).raise_for_status()

    def check_keys(self, *, checks: bool) -> None:
        """Refuse requests with unknown access keys, or no longer."""
        content = b"0" if checks else b"inf"
        url = f"http://{self.upstream}/moto-api/reset-auth"
        httpx.post(url, content=content, headers={"content-type": "text/plain"}).raise_for_status()

    def starts_of(self, path: str) -> list[int]:
        """Return where the reads of an object began, in their order."""
        return [read.start for read in list(self.reads) if read.path == path]


@contextmanager
def serving_s3() -> Iterator[S3]:
    """Start both servers; objects are kept in memory."""
    with _moto() as upstream:
        store = S3(upstream)
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


@contextmanager
def _moto() -> Iterator[str]:
    command = [str(STORES / "moto_server"), "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "moto ended"
            found = re.search(r"Running on http://(\S+:\d+)", line)
        # It logs each request.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        process.kill()
        process.wait()


class _Handler(BaseHTTPRequestHandler):
    store: S3
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        store, url = self.store, urlsplit(self.path)
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        read = Read(url.path.rstrip("/"), int(match[1]) if match else 0)
        store.reads.append(read)
        if read == store.held:
            store.holds.set()
            store.release.wait(TIMEOUT_S)
        status, headers, content = self._ask()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if read == store.cut:
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
