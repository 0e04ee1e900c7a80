"""A real Redis or Valkey server, for what gateways share, and time for its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.redis_process import temporary_redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.redis_process import RedisProcess


@pytest.fixture(autouse=True)
def patient_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine that is busy keep a gateway's state server waiting for longer than in production."""
    monkeypatch.setattr("gateway.state.state.TIMEOUT_S", 30.0)


@pytest.fixture(scope="module")
def redis_process() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process
