"""Sessions in a harness, and the first turn of one."""

from __future__ import annotations

from common.types import SessionWish, Subject, View
from services.scheduler.core.session import SessionRules
from tests.services.scheduler.core.harness import Harness

ALICE = View(Subject("tenant", "alice"))
RULES = SessionRules(
    per_subject=2, total=3, subject_tokens=96, tenant_tokens=128, total_tokens=128, timeout_s=10.0, max_timeout_s=60.0
)
FIRST = list(range(100, 122))


def harness_with(rules: SessionRules = RULES, **options: object) -> Harness:
    return Harness(sessions=rules, **options)  # type: ignore[arg-type]  # the harness's own


def open_session(harness: Harness, name: str = "chat", view: View = ALICE, capacity: int | None = None) -> None:
    harness.core.sessions.open(SessionWish(view, name, capacity))


def whole(harness: Harness, name: str, prompt: list[int]) -> list[int]:
    return [*prompt, *harness.outputs[name, 0]]
