"""Images at URLs: no client reaches a server with them that it may not reach, or holds the gateway up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import QueueFullError
from common.types import Subject
from gateway.images import remote as remote_module
from gateway.images.images import RefusedUrlError
from gateway.images.remote import MAX_REDIRECTS, RemoteImages, UrlRules
from tests.examples import examples
from tests.fakes.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from gateway.images.remote import Address

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
ANN, BOB = Subject("acme", "user/ann"), Subject("acme", "user/bob")
PUBLIC, OTHER, PRIVATE = "93.184.216.34", "1.1.1.1", "10.0.0.1"
MAX_BYTES = 1000
URL = "http://images.example/a.png"

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def ok(content: bytes = PNG, *headers: str) -> bytes:
    head = "\r\n".join(["HTTP/1.1 200 OK", f"content-length: {len(content)}", "content-type: text/html", *headers])
    return head.encode() + b"\r\n\r\n" + content


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@dataclass
class World:
    """The Internet: host names with their addresses, one for each time they are looked up, and one server for all."""

    hosts: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    looked_up: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    port: int = 0

    async def resolve(self, host: str, _port: int) -> Sequence[Address]:
        self.looked_up.append(host)
        found = self.hosts.get(host, [()])
        addresses = found.pop(0) if len(found) > 1 else found[0]
        return [ip_address(address) for address in addresses]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            answer = self.answers.get(request.split(" ")[1], b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Wires(httpcore.AsyncNetworkBackend):
    """Leads every connection to the server of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self._world.connected.append((host, port))
        if host in self._world.dead:
            raise httpcore.ConnectError
        return await self._network.connect_tcp("127.0.0.1", self._world.port, timeout, local_address, socket_options)


@asynccontextmanager
async def fetching(
    world: World,
    *hosts: str,
    allows_http: bool = True,
    timeout_s: float = 60.0,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
) -> AsyncIterator[RemoteImages]:
    server = await asyncio.start_server(world.answer, "127.0.0.1", 0, ssl=tls[0] if tls else None)
    world.port = server.sockets[0].getsockname()[1]
    rules = UrlRules(hosts or ("*",), allows_http=allows_http, timeout_s=timeout_s)
    images = RemoteImages(rules, world.resolve, Wires(world), tls[1] if tls else None)
    try:
        yield images
    finally:
        await images.close()
        server.close()


def internet(**answers: Answer) -> World:
    hosts: dict[str, list[Sequence[str]]] = {
        "images.example": [[PUBLIC]],
        "other.example": [[OTHER]],
        "inside.example": [[PRIVATE]],
    }
    return World(hosts, {f"/{path.replace('_', '.')}": answer for path, answer in answers.items()})


async def refusal(images: RemoteImages, url: str = URL, max_bytes: int = MAX_BYTES) -> str:
    with pytest.raises(RefusedUrlError) as caught:
        await images.fetch(url, ANN, max_bytes)
    return str(caught.value)


async def test_an_image_is_fetched_from_the_address_that_was_checked() -> None:
    world = internet(a_png=ok())
    async with fetching(world) as images:
        assert await images.fetch(URL, ANN, MAX_BYTES) == PNG
    assert world.looked_up == ["images.example"]
    assert world.connected == [(PUBLIC, 80)]
    [request] = world.requests
    assert "host: images.example" in request.lower()
    for absent in ("cookie", "authorization", "referer", "gzip"):
        assert absent not in request.lower()


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.1.2.3"], ["192.168.1.1"], ["172.16.0.1"], ["169.254.169.254"], ["100.64.0.1"], ["0.0.0.0"],
        ["224.0.0.1"], ["240.0.0.1"], ["::1"], ["fe80::1"], ["fd00::1"], ["ff02::1"], ["::ffff:127.0.0.1"],
        ["::ffff:8.8.8.8"], ["64:ff9b::7f00:1"], ["2002:7f00:1::"], ["::"], [],
        [PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "::1"],
    ],
)  # fmt: skip
async def test_a_host_with_any_address_that_is_not_public_is_not_connected_to(addresses: list[str]) -> None:
    world = internet(a_png=ok())
    world.hosts["images.example"] = [addresses]
    async with fetching(world) as images:
        # The same words for a host that does not exist: clients learn nothing of the names inside.
        assert await refusal(images) == remote_module.NOT_PUBLIC
    assert world.connected == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.png", "http://2130706433/a.png", "http://0x7f.1/a.png", "http://0177.0.0.1/a.png",
        "http://[::1]/a.png", "http://[::ffff:127.0.0.1]/a.png", "http://127.1/a.png", "http://localhost/a.png",
        "http://127.0.0.1./a.png", "http://0/a.png",
    ],
)  # fmt: skip
async def test_no_notation_of_a_local_address_is_connected_to(url: str) -> None:
    world = World({}, {"/a.png": ok()})
    images = RemoteImages(UrlRules(("*",), allows_http=True), network=Wires(world))
    # Some of them are no URLs at all.
    assert await refusal(images, url)
    await images.close()
    assert world.connected == []


async def test_a_name_that_changes_its_address_is_checked_at_every_connection() -> None:
    world = internet(a_png=redirect("/b.png"), b_png=ok())
    world.hosts["images.example"] = [[PUBLIC], ["127.0.0.1"]]
    async with fetching(world) as images:
        assert await refusal(images) == remote_module.NOT_PUBLIC
    assert world.looked_up == ["images.example"] * 2
    assert world.connected == [(PUBLIC, 80)]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_followed_to_another_public_host(status: int) -> None:
    world = internet(a_png=redirect("http://other.example/b.png", status), b_png=ok())
    async with fetching(world) as images:
        assert await images.fetch(URL, ANN, MAX_BYTES) == PNG
    assert world.connected == [(PUBLIC, 80), (OTHER, 80)]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://inside.example/a.png", "public address"),
        ("http://127.0.0.1/a.png", "public address"),
        ("http://elsewhere.test/a.png", "not among"),
        ("http://images.example:22/a.png", "not among"),
        ("http://ann:secret@other.example/a.png", "credentials"),
        ("file:///etc/passwd", "https"),
        ("gopher://other.example/a.png", "https"),
        ("http://[::1", "valid URL"),
    ],
)
async def test_a_redirect_elsewhere_is_refused(location: str, words: str) -> None:
    world = internet(a_png=redirect(location), b_png=ok())
    async with fetching(world, "*.example", "127.*") as images:
        assert words in await refusal(images)
    assert world.connected == [(PUBLIC, 80)]


async def test_redirects_end() -> None:
    world = internet(a_png=redirect("/a.png"))
    async with fetching(world) as images:
        assert "redirects" in await refusal(images)
    assert len(world.requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://images.example/a.png", "https"),
        ("https://ann:secret@images.example/a.png", "credentials"),
        ("https://ann@images.example/a.png", "credentials"),
        ("https://evil.test/a.png", "not among"),
        ("https://images.example.evil.test/a.png", "not among"),
        ("https://evilimages.example/a.png", "not among"),
        ("https://images.example:8443/a.png", "not among"),
        ("https://images.example:99999/a.png", "not among"),
        ("https://images.example\\@evil.test/a.png", ""),
        ("https:///a.png", "not among"),
    ],
)
async def test_a_url_outside_of_the_rules_is_not_fetched(url: str, words: str) -> None:
    world = internet(a_png=ok())
    async with fetching(world, "images.example", "*.other.example", allows_http=False) as images:
        assert words in await refusal(images, url)
    assert world.connected == []


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "http://IMAGES.example./a.png",
        "http://a.b.cdn.example/a.png",
        "http://ports.example:8080/a.png",
        "http://xn--bcher-kva.example/a.png",
        "http://bücher.example/a.png",
    ],
)
def test_hosts_are_allowed_by_patterns_with_and_without_ports(url: str) -> None:
    hosts = ("images.example", "*.cdn.example", "ports.example:8080", "xn--bcher-kva.example")
    assert UrlRules(hosts, allows_http=True).check(url).path == "/a.png"


async def test_certificates_are_checked_for_the_name_in_the_url(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("server", hosts=["images.example"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(own.certificate, own.key)
    trusting = ssl.create_default_context(cafile=str(authority.path))
    world = internet(a_png=ok())
    async with fetching(world, allows_http=False, tls=(server, trusting)) as images:
        assert await images.fetch("https://images.example/a.png", ANN, MAX_BYTES) == PNG
        assert "connection" in await refusal(images, "https://other.example/a.png")
    async with fetching(world, allows_http=False, tls=(server, ssl.create_default_context())) as images:
        assert "connection" in await refusal(images, "https://images.example/a.png")
    assert world.connected == [(PUBLIC, 443), (OTHER, 443), (PUBLIC, 443)]


async def pour(writer: asyncio.StreamWriter) -> None:
    """Send without an end, and without a length."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(100))
        await writer.drain()


async def drip(writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, so that no read is idle for long."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def drip_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def stay_silent(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ok(bytes(MAX_BYTES + 1)), "larger than 1000"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999999999999\r\n\r\n", "larger than 1000"),
        (pour, "larger than 1000"),
        (ok(PNG, "content-encoding: gzip"), "compressed"),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "answers 500"),
        (b"HTTP/1.1 204 No\r\n\r\n", "answers 204"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", "connection"),
        (b"\x00\xff\x00", "connection"),
        (b"", "connection"),
        (b"HTTP/1.1 302 Found\r\ncontent-length: 0\r\n\r\n", "redirects"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n", "connection"),
    ],
)
async def test_an_answer_that_is_no_image_of_the_size_allowed_is_refused(answer: Answer, words: str) -> None:
    async with fetching(internet(a_png=answer)) as images:
        assert words in await refusal(images)


@pytest.mark.parametrize("answer", [drip, drip_headers, stay_silent])
async def test_a_slow_answer_is_given_up(answer: Answer) -> None:
    async with fetching(internet(a_png=answer), timeout_s=0.3) as images:
        assert "within 0.3 s" in await refusal(images)


async def test_a_slow_resolver_is_given_up() -> None:
    async def never(_host: str, _port: int) -> Sequence[Address]:
        await asyncio.sleep(3600)
        return ()

    images = RemoteImages(UrlRules(("*",), allows_http=True, timeout_s=0.1), never)
    assert "within 0.1 s" in await refusal(images)
    await images.close()


async def test_the_next_address_of_a_host_is_tried() -> None:
    world = internet(a_png=ok())
    world.hosts["images.example"] = [[OTHER, PUBLIC]]
    world.dead = {OTHER}
    async with fetching(world) as images:
        assert await images.fetch(URL, ANN, MAX_BYTES) == PNG
        world.dead = {OTHER, PUBLIC}
        assert "connection" in await refusal(images)
    assert world.connected[:2] == [(OTHER, 80), (PUBLIC, 80)]


async def test_one_user_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MAX_FETCHES", 8)
    world = internet(a_png=stay_silent, b_png=ok())
    async with fetching(world) as images:
        fetches = [asyncio.create_task(images.fetch(URL, ANN, MAX_BYTES)) for _ in range(8)]
        done, waiting = await asyncio.wait(fetches, return_when=asyncio.FIRST_COMPLETED)
        assert done
        assert all(isinstance(each.exception(), QueueFullError) for each in done)
        assert await images.fetch("http://images.example/b.png", BOB, MAX_BYTES) == PNG
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # The places are free again.
        assert await images.fetch("http://images.example/b.png", ANN, MAX_BYTES) == PNG


@examples(300)
@given(
    st.sampled_from(["", "http://", "https://", "http://images.example", "https://images.example:", "http://["]),
    st.text(max_size=30),
)
def test_any_url_is_allowed_or_refused(beginning: str, rest: str) -> None:
    try:
        url = UrlRules(("images.example",), allows_http=True).check(beginning + rest)
    except RefusedUrlError:
        return
    assert url.host.rstrip(".").lower() == "images.example"
    assert not url.userinfo
