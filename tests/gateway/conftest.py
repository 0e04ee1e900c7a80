"""A real Redis or Valkey server, for what gateways share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.redis_process import temporary_redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.redis_process import RedisProcess


@pytest.fixture(scope="module")
def redis_process() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process
