"""The proxies of the fault campaign do to connections what their faults are named after."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.chaos.links import EPHEMERAL_RANGE, HOST, Link, PortRange, Weather, delayed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEXT = b"a line of text\n"


@asynccontextmanager
async def echo_link() -> AsyncIterator[Link]:
    """A link to a server that returns all that it receives."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    randomness = random.Random(0)
    ports = PortRange(randomness)
    server = await asyncio.start_server(echo, HOST, port := ports.take())
    link = Link("echo", ports.take(), f"{HOST}:{port}", randomness)
    await link.open()
    try:
        yield link
    finally:
        await link.close()
        server.close()


async def test_a_clear_link_passes_everything_on() -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        writer.write(TEXT * 1000)
        assert await reader.readexactly(len(TEXT) * 1000) == TEXT * 1000
        writer.close()


async def test_a_reset_link_breaks_connections_and_accepts_others() -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        writer.write(TEXT)
        assert await reader.readline() == TEXT
        await link.reset()
        with pytest.raises(ConnectionResetError):
            await reader.readline()
        reader, writer = await asyncio.open_connection(HOST, link.port)
        writer.write(TEXT)
        assert await reader.readline() == TEXT
        assert link.accepted == 2
        writer.close()


async def test_a_refusing_link_accepts_connections_afterwards() -> None:
    async with echo_link() as link:
        async with link.refusing():
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, link.port)
        _, writer = await asyncio.open_connection(HOST, link.port)
        writer.close()


@pytest.mark.parametrize("lost", ["requests", "answers"])
async def test_a_black_hole_loses_bytes_without_breaking_the_connection(lost: str) -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        weather = Weather(drops_requests=True) if lost == "requests" else Weather(drops_answers=True)
        async with link.under(weather):
            writer.write(b"lost\n")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.readline()
        writer.write(TEXT)
        assert await reader.readline() == TEXT
        writer.close()


async def test_a_stalled_link_loses_nothing() -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        async with link.under(Weather(is_stalled=True)):
            writer.write(TEXT)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.readline()
        assert await reader.readline() == TEXT
        writer.close()


async def test_a_delayed_link_keeps_the_order() -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        loop = asyncio.get_running_loop()
        async with link.under(delayed(0.1)):
            started = loop.time()
            writer.write(b"first\n")
            writer.write(b"second\n")
            assert [await reader.readline(), await reader.readline()] == [b"first\n", b"second\n"]
            assert loop.time() - started >= 0.2
        writer.close()


async def test_flipped_bits_are_rare_and_single() -> None:
    async with echo_link() as link:
        reader, writer = await asyncio.open_connection(HOST, link.port)
        sent = bytes(100_000)
        async with link.under(Weather(flip_bytes=1000)):
            writer.write(sent)
            received = await reader.readexactly(len(sent))
        changed = [byte for byte in received if byte]
        assert 100 < len(changed) < 400, "each direction flips about one bit in 1,000 bytes"
        assert sum(byte.bit_count() == 1 for byte in changed) > 0.95 * len(changed)
        writer.close()


def test_ports_are_below_those_that_the_system_gives_to_clients() -> None:
    ports = PortRange(random.Random(1))
    taken = {ports.take() for _ in range(50)}
    assert len(taken) == 50
    assert max(taken) < int(EPHEMERAL_RANGE.read_text().split()[0])


async def test_a_branch_has_the_connections_of_its_clients_and_a_weather_of_its_own() -> None:
    async with echo_link() as link:
        ours: set[int] = set()
        branch = Link("branch", PortRange(random.Random(2)).take(), link._target, random.Random(0))
        link.branches.append((ours.__contains__, branch))
        await branch.open()
        with socket.socket() as chosen:
            chosen.bind((HOST, 0))
            ours.add(port := chosen.getsockname()[1])
        others = await asyncio.open_connection(HOST, link.port)
        reader, writer = await asyncio.open_connection(HOST, link.port, local_addr=(HOST, port))
        writer.write(TEXT)
        assert await reader.readline() == TEXT
        assert (branch.accepted, branch.answered_bytes) == (1, len(TEXT))
        async with branch.refusing():
            with pytest.raises(ConnectionResetError):
                await reader.readline()
            others[1].write(TEXT)
            assert await others[0].readline() == TEXT
        await branch.close()
        others[1].close()
