from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.openai_server import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.openai_server import FakeOpenAIServer


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    with running_server() as fake:
        yield fake
