"""A server whose answers tell what its prefix cache held, with one view for all users or one for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.openai_server import FakeOpenAIServer, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 16


@dataclass
class CachingServer(FakeOpenAIServer):
    is_shared: bool = False
    asked: dict[str, list[list[int]]] = field(default_factory=dict)

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        prompt = body["prompt"]
        # Nameless users are nobody's.
        user = body.get("user_id") or body.get("user") or f"nobody-{len(self.bodies)}"
        known = self.asked.setdefault("all" if self.is_shared else user, [])
        cached = max((common(prompt, other) // PAGE * PAGE for other in known), default=0)
        known.append(prompt)
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def common(lhs: list[int], rhs: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(lhs, rhs, strict=False)))


@pytest.fixture(autouse=True)
def punctual_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers here look at their clocks with every request."""
    monkeypatch.setattr("deploy.evaluation.attack.scene.MARGIN_S", 0.02)


@pytest.fixture
def caching_server() -> Iterator[CachingServer]:
    fake = CachingServer()
    with running_server(fake):
        yield fake
