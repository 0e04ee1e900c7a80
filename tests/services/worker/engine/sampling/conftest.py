from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of one operator wait for each other; with tests beside tests that costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
