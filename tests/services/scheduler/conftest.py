from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.services.scheduler.ring import Ring

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def ring(tmp_path: Path) -> AsyncIterator[Ring]:
    ring = Ring(tmp_path)
    await ring.start()
    await ring.ready()
    yield ring
    await ring.stop()
