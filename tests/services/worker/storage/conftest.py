"""A Redis server for the tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fakes.redis_process import RedisProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def redis_process() -> Iterator[RedisProcess]:
    # Pytest's own directories have paths that can be too long for sockets.
    directory = Path(tempfile.mkdtemp(prefix="pando-redis-"))
    process = RedisProcess(directory)
    process.start()
    yield process
    process.kill()
    shutil.rmtree(directory)
