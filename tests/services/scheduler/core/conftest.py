from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    return tmp_path / "keyring.db"
