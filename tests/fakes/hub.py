"""A hub on this machine: as much of the Hugging Face hub's HTTP interface as its client uses for downloads."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_right"
LARGE = (".safetensors", ".gguf", ".bin")
_BLOCK = 1 << 14


@dataclass
class Repository:
    """A repository of one commit, and how the hub treats requests for it."""

    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    private: bool = False
    refs: tuple[str, ...] = ("main",)
    # What the hub says of the repository besides its files.
    about: dict[str, Any] = field(default_factory=dict)
    # Sizes of files that are listed, and not there.
    listed_sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class FakeHub:
    """What is served, what goes wrong, and what has been asked for."""

    url: str = ""
    # Large files are there; the client takes a redirection to the hub's own name for that of a renamed repository.
    storage_host: str = "localhost"
    repositories: dict[str, Repository] = field(default_factory=dict)
    # Present names of renamed repositories by their earlier ones, which may have no organisation.
    renamed: dict[str, str] = field(default_factory=dict)
    # Connections of large files that are cut after so many bytes each.
    cut_after: list[int] = field(default_factory=list)
    # Large files that are answered with 429 before the next one is sent.
    refused_files: int = 0
    # Status of every answer; 0: as it should be.
    status: int = 0
    ignores_ranges: bool = False
    bytes_per_s: float = 0.0
    corrupted: set[str] = field(default_factory=set)
    # SHA-256 of large files as listed, where it is not that of their content.
    listed_digests: dict[str, str] = field(default_factory=dict)
    # Of large files: bytes sent, and requests, by name.
    sent: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)
    authorizations: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, name: str, directory: Path, **options: Any) -> Repository:
        """Serve the files of a directory."""
        files = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        self.repositories[name] = Repository(files, **options)
        return self.repositories[name]


@contextmanager
def serve_hub(host: str = "127.0.0.1", storage_host: str = "localhost") -> Iterator[FakeHub]:
    """Run a hub, which clients reach as `host` and its storage as `storage_host`, another name of this machine."""
    hub = FakeHub(storage_host=storage_host)

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer((host if host == "127.0.0.1" else "0.0.0.0", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.state, unquote(urlsplit(self.path).path)
        hub.paths.append(f"{self.command} {path}")
        hub.authorizations.append((path, self.headers.get("Authorization")))
        if hub.status:
            self._send(hub.status, b"out of order")
        elif (present := self._present_path(path)) is not None:
            self._send(307, b"", {"Location": quote(present)})
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._large(hub.repositories[found[1]], found[2])
        elif found := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)(?:/(revision|tree)/(.+))?", path):
            self._api(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        else:
            self._send(404, b"no such page")

    def _present_path(self, path: str) -> str | None:
        """Return where a path of a renamed repository is now."""
        for earlier, present in self.state.renamed.items():
            found = re.fullmatch(rf"(/(?:api/models/)?){re.escape(earlier)}(/.*)?", path)
            if found:
                return f"{found[1]}{present}{found[2] or ''}"
        return None

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        repository = self._find(name, revision)
        if repository is None:
            return
        if kind == "tree":
            body: Any = [
                _entry(path, content, repository.listed_sizes.get(path), self.state.listed_digests.get(path))
                for path, content in repository.files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in repository.files]
            gated = "auto" if repository.gated else False
            body = {
                "id": name, "modelId": name, "sha": repository.commit, "private": repository.private, "gated": gated,
                "siblings": siblings, "tags": [], "downloads": 0, **repository.about,
            }  # fmt: skip
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._find(name, revision)
        if repository is None:
            return
        token = self._token()
        if repository.gated and token != TOKEN:
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted."}
            self._send(401 if token is None else 403, b"", code)
            return
        if path not in repository.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
            return
        content = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            digest = hashlib.sha256(content).hexdigest()
            port = self.connection.getsockname()[1]
            headers |= {
                "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "ETag": f'"{digest[:32]}"',
                "Location": f"http://{self.state.storage_host}:{port}/cdn/{name}/{path}",
            }  # fmt: skip
            self._send(302, b"", headers)
        else:
            self._send(200, content, {**headers, "ETag": f'"{_blob_id(content)}"'})

    def _large(self, repository: Repository, path: str) -> None:
        hub, content = self.state, repository.files[path]
        if path in hub.corrupted:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_part = wanted is not None and not hub.ignores_ranges
        if wanted is not None and is_part:
            start = int(wanted[1])
        if hub.refused_files > 0:
            hub.refused_files -= 1
            self._send(429, b"slow down", {"Retry-After": "1"})
            return
        hub.requests[path] += 1
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        limit = hub.cut_after.pop(0) if hub.cut_after else None
        for at in range(start, len(content), _BLOCK):
            block = content[at : at + _BLOCK]
            if limit is not None and at - start + len(block) > limit:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            try:
                self.wfile.write(block)
            except OSError:
                self.close_connection = True
                return
            hub.sent[path] += len(block)
            if hub.bytes_per_s:
                time.sleep(len(block) / hub.bytes_per_s)

    def _find(self, name: str, revision: str) -> Repository | None:
        """Return a repository that the caller may see and that has the revision, or answer why there is none."""
        token = self._token()
        if token is not None and token not in (TOKEN, "hf_other"):
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
            return None
        repository = self.state.repositories.get(name)
        if repository is None or (repository.private and token != TOKEN):
            code = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._send(401 if token is None else 404, b"", code)
            return None
        if revision not in (*repository.refs, repository.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
            return None
        return repository

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: str, content: bytes, size: int | None, digest: str | None) -> dict[str, Any]:
    count = len(content) if size is None else size
    entry: dict[str, Any] = {"type": "file", "path": path, "size": count, "oid": _blob_id(content)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": digest or hashlib.sha256(content).hexdigest(), "size": count, "pointerSize": 130}
    return entry


def _blob_id(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
