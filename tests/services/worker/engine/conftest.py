from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.services.worker.engine.parallel.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for tensor-parallel ranks."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
