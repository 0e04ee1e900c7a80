"""The process of one supervised service, across restarts: settings file, start, log lines, health, signals, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from common.child_process import import_variables
from common.rpc.options import CHANNEL_OPTIONS
from common.settings import CONFIG_VARIABLE, PREFIX, Settings
from deploy.supervisor.layout import command_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from deploy.supervisor.layout import ServiceSpec

KEPT_LINES = 200
READ_BYTES = 1 << 16


class ServiceProcess:
    """Runs the process of one service; it can be started again after it has ended."""

    def __init__(self, spec: ServiceSpec, run_directory: Path, on_line: Callable[[str, str], None]) -> None:
        """Prepare the service; `on_line(name, line)` is called for each line of its output."""
        self.spec = spec
        self.restarts = 0
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._config = run_directory / f"{spec.name.replace('/', '.')}.toml"
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """The process id; None while it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def lived_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    async def start(self) -> None:
        """Start the process in a new process group, so that Ctrl-C in a terminal only reaches the supervisor."""
        self._config.touch(mode=0o600)
        self._config.write_text(dump_settings(self.spec.settings))
        self._started_at = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *command_of(self.spec, sys.executable, self._config, os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(os.environ),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._forward(self._process.stdout))

    async def wait(self) -> int:
        """Wait for the process and the end of its output; return its exit status, negative for a signal."""
        assert self._process is not None
        assert self._pump is not None
        status = await self._process.wait()
        # A grandchild may keep the pipe open after the service has ended.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, timeout=1.0)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the service's whole process group; no effect if the service is not running."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def stop(self) -> None:
        """Send SIGINT to the service, and kill it if it has not ended within its grace period."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), timeout=self.spec.stop_s)
        except TimeoutError:
            self._on_line(self.spec.name, f"did not end within {self.spec.stop_s:g} s: killed")
            self.signal(signal.SIGKILL)
            await process.wait()

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        async for line in lines_of(stream):
            self.last_lines.append(line)
            self._on_line(self.spec.name, line)


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the non-empty lines of `stream`, of any length; a carriage return, used by progress bars, ends a line."""
    rest = b""
    while chunk := await stream.read(READ_BYTES):
        *complete, rest = (rest + chunk.replace(b"\r", b"\n")).split(b"\n")
        for line in complete:
            if line.strip():
                yield line.decode(errors="replace")
    if rest.strip():
        yield rest.decode(errors="replace")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without settings: the service reads those from its file, with this deployment's addresses.

    The service imports what this process does, whatever the working directory has.
    """
    sections = {name.upper() for name in Settings.model_fields}
    kept = {
        name: value
        for name, value in environ.items()
        if name != CONFIG_VARIABLE
        and not (name.startswith(PREFIX) and name.removeprefix(PREFIX).split("__")[0].upper() in sections)
    }
    return kept | import_variables(environ) | {"PYTHONUNBUFFERED": "1"}


def dump_settings(settings: Settings) -> str:
    """Return TOML that parses to `settings`, with secrets in plain text and without absent optional values."""
    lines: list[str] = []
    for section, values in settings.model_dump(exclude_none=True).items():
        lines.append(f"[{_string(section)}]")
        lines.extend(f"{_string(name)} = {_value(value)}" for name, value in values.items())
        lines.append("")
    return "\n".join(lines)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str() | Path():
            return _string(str(value))
        case SecretStr():
            return _string(value.get_secret_value())
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{_string(str(name))} = {_value(item)}" for name, item in value.items()) + "}"
        case _:
            raise TypeError(f"TOML has no form for {type(value).__name__}")


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, except that TOML requires DEL to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Probes:
    """Checks the health of services; a service that does not answer within `timeout_s` counts as unhealthy.

    It uses the blocking gRPC client in threads, not `grpc.aio`: the supervisor also runs in a thread of tests and
    benchmarks, and all aio objects of a process must belong to one event loop.
    """

    def __init__(self, timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s

    async def is_alive(self, address: str) -> bool:
        """Whether the process at `address` (gRPC target or HTTP base URL) answers at all."""
        if address.startswith(("http://", "https://")):
            return await self._answers(f"{address}/health")
        return await asyncio.to_thread(self._check, address)

    async def is_ready(self, url: str) -> bool:
        """Whether the gateway at `url` reports that it can serve requests for all its models now."""
        answer = await self._ask(f"{url}/ready")
        try:
            return answer is not None and answer.json().get("status") == "ready"
        except (ValueError, AttributeError):
            return False

    async def _answers(self, url: str) -> bool:
        answer = await self._ask(url)
        return answer is not None and answer.status_code == httpx.codes.OK

    async def _ask(self, url: str) -> httpx.Response | None:
        try:
            # A new connection each time, because the check is whether one can be opened; no proxies. The certificate is
            # not verified: it need not name this address, and nothing confidential is sent.
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, verify=False) as client:
                return await client.get(url)
        except httpx.HTTPError:
            return None

    def _check(self, address: str) -> bool:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # Any: its type stubs lack the methods
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=self._timeout_s)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
