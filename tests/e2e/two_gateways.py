"""Two gateway processes behind a proxy that takes turns, over a pipeline that answers at once."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, cast

import httpx
import orjson

from deploy.supervisor.layout import free_port
from tests.e2e.processes import Processes
from tests.fakes.pipeline_servers import DETOKENIZER, TOKENIZER, FakeServices, pipeline_servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

# Reads settings as `python -m gateway` does; its limits do not refill.
GATEWAY = "tests.e2e.gateway_without_refill"


class _End(asyncio.Protocol):
    """One end of a forwarded connection: passes on what it receives."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # of TCP

    def join(self, other: asyncio.Transport) -> None:
        self.other = other
        other.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


@asynccontextmanager
async def round_robin(ports: Sequence[int]) -> AsyncIterator[int]:
    """Forward each new TCP connection to the next of `ports`, and yield the port of the proxy."""
    turns = itertools.cycle(ports)
    joining: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    async def join(front: _End) -> None:
        _, back = await loop.create_connection(_End, "127.0.0.1", next(turns))
        back.join(front.transport)
        front.join(back.transport)

    class Front(_End):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            task = asyncio.create_task(join(self))
            joining.add(task)
            task.add_done_callback(joining.discard)

    server = await loop.create_server(Front, "127.0.0.1", 0, backlog=1024)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class TwoGateways:
    """Their ports and those of their metrics, the proxy's port, and the pipeline."""

    def __init__(
        self,
        services: FakeServices,
        processes: Processes,
        ports: Sequence[int],
        metrics_ports: Sequence[int],
        proxy_port: int,
    ) -> None:
        self.services = services
        self.ports = ports
        self._processes = processes
        self.metrics_ports = metrics_ports
        self.proxy_port = proxy_port

    def kill(self, number: int) -> None:
        """End a gateway by SIGKILL."""
        self._processes.end(f"gateway-{number}", signal.SIGKILL)

    def client(self) -> httpx.AsyncClient:
        """Return a client that opens a connection for each request: each goes to the next gateway."""
        limits = httpx.Limits(max_keepalive_connections=0)
        base_url = f"http://127.0.0.1:{self.proxy_port}"
        return httpx.AsyncClient(base_url=base_url, limits=limits, timeout=30, trust_env=False)

    async def metric(self, port: int, name: str) -> float:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def flood(self, requests: int, key: str, connections: int = 32) -> Counter[int]:
        """Ask for `requests` chats over connections that stay open; return how often each status came.

        Each connection asks for its share, so both gateways get half, however much faster one of them answers.
        """
        body = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        message, statuses = head.encode() + body, Counter[int]()

        async def ask(share: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy_port)
            for _ in range(share):
                writer.write(message)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                statuses[int(answer.split(maxsplit=2)[1])] += 1
            writer.close()

        await asyncio.gather(*(ask(len(range(number, requests, connections))) for number in range(connections)))
        return statuses


@asynccontextmanager
async def two_gateways(directory: Path, limits_file: Path, **settings: object) -> AsyncIterator[TwoGateways]:
    """Run everything; `settings` are those of the section `gateway`. Both gateways are ready."""
    ports, metrics_ports = ([free_port("127.0.0.1") for _ in range(2)] for _ in range(2))
    processes = Processes(directory)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(pipeline_servers(directory))
        stack.callback(processes.stop)
        addresses = {"tokenizer": services.address(TOKENIZER), "detokenizer": services.address(DETOKENIZER)}
        for number, (port, metrics_port) in enumerate(zip(ports, metrics_ports, strict=True)):
            own = {"port": port, "metrics_port": metrics_port, **addresses, **settings}
            named = {f"gateway.{name}": value for name, value in own.items()}
            processes.start(f"gateway-{number}", GATEWAY, {**named, "limits.file": limits_file, "log.level": "warning"})
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for port in ports:
                await _until_ready(client, port, processes)
        proxy_port = await stack.enter_async_context(round_robin(ports))
        yield TwoGateways(services, processes, ports, metrics_ports, proxy_port)


async def _until_ready(client: httpx.AsyncClient, port: int, processes: Processes) -> None:
    for _ in range(600):
        try:
            if (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(processes.logs())
