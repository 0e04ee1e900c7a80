"""Redis servers for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.redis_process import temporary_redis, temporary_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.redis_process import RedisProcess, TcpServers


@pytest.fixture
def redis_process() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


@pytest.fixture
def redis_servers() -> Iterator[TcpServers]:
    with temporary_servers() as servers:
        yield servers
