"""A real Redis or Valkey server of one's own, on a unix socket."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from tests.waiting import wait_until

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

BINARIES = ("redis-server", "valkey-server")


class RedisProcess:
    """One server, which keeps nothing on disk; `start` after `kill` begins empty."""

    def __init__(self, directory: Path) -> None:
        binary = next((path for name in BINARIES if (path := shutil.which(name))), None)
        if binary is None:
            pytest.skip("no redis-server or valkey-server here: apt-get install redis-server")
        self._binary = binary
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
