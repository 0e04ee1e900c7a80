"""Real Redis or Valkey servers of one's own: one on a unix socket, a cluster, or one that a sentinel watches."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from deploy.supervisor.layout import free_port
from tests.waiting import wait_until

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

BINARIES = ("redis-server", "valkey-server")


class RedisProcess:
    """One server, which keeps nothing on disk; `start` after `kill` begins empty."""

    def __init__(self, directory: Path) -> None:
        self._binary = find_binary()
        self._socket = directory / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._binary, "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers, timeout_s=60)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=60)
            self._process = None
            self._socket.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        if self._process is not None:
            self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


def find_binary() -> str:
    """Return the server's program; skip the test if there is none."""
    binary = next((path for name in BINARIES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no redis-server or valkey-server here: apt-get install redis-server")
    return binary


class TcpServers:
    """Servers on loopback ports, each with a folder of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def ports(self) -> list[int]:
        return list(self._processes)

    def start(self, *arguments: str, configuration: str = "") -> int:
        """Start a server that keeps nothing on disk; return its port when it answers."""
        port = free_port("127.0.0.1")
        folder = self._directory / f"{port}"
        folder.mkdir()
        file = folder / "redis.conf"
        file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\n{configuration}")
        command = [find_binary(), str(file), *arguments]
        self._processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(lambda: self._answers(port), timeout_s=60)
        return port

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(port=port)

    def kill(self, port: int) -> None:
        process = self._processes.pop(port)
        process.kill()
        process.wait(timeout=60)

    def stop(self) -> None:
        for port in self.ports:
            self.kill(port)

    def _answers(self, port: int) -> bool:
        try:
            with self.client(port) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False


@contextmanager
def temporary_servers() -> Iterator[TcpServers]:
    """Run servers in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="pando-redis-") as directory:
        servers = TcpServers(Path(directory))
        try:
            yield servers
        finally:
            servers.stop()


def form_cluster(servers: TcpServers, masters: int = 3) -> None:
    """Start a cluster without replicas, which goes on without its lost masters."""
    slots = 16384
    for number in range(masters):
        bus = f"cluster-port {free_port('127.0.0.1')}"
        port = servers.start(configuration=f"cluster-enabled yes\n{bus}\ncluster-require-full-coverage no\nsave ''\n")
        with servers.client(port) as client:
            first, end = (slots * each // masters for each in (number, number + 1))
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            for other in servers.ports[:-1]:
                other_bus = _bus_port(servers, other)
                client.execute_command("CLUSTER MEET", "127.0.0.1", other, other_bus)
    wait_until(lambda: all(_knows_all(servers, port, masters) for port in servers.ports), timeout_s=120)


def _bus_port(servers: TcpServers, port: int) -> int:
    with servers.client(port) as client:
        return int(client.config_get("cluster-port")["cluster-port"])


def _knows_all(servers: TcpServers, port: int, masters: int) -> bool:
    with servers.client(port) as client:
        info = client.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and int(info["cluster_size"]) == masters)


@contextmanager
def temporary_redis() -> Iterator[RedisProcess]:
    """Run a server in a directory of its own: the path of pytest's may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="pando-redis-") as directory:
        process = RedisProcess(Path(directory))
        process.start()
        try:
            yield process
        finally:
            process.kill()
