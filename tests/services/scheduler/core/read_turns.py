"""Lookups of stored prompts with recurrent layers that wait for their turns, beside a row that is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.types import RequestId
from tests.services.scheduler.core.harness import make_request, with_options
from tests.services.scheduler.core.test_storage import PROMPT
from tests.services.scheduler.core.test_stored_snapshots import hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.tiers.storage_reads import Fetch
    from tests.fakes.storing_worker import Objects
    from tests.services.scheduler.core.test_storage import Server


def host_of(server: Server) -> HostTier:
    assert server.cache.host is not None
    return server.cache.host


def submitted(
    server: Server,
    user: str,
    prompt: list[int] = PROMPT,
    name: str | None = None,
    *,
    tenant: str = "tenant",
    is_batch: bool = False,
    timeout_ms: int | None = None,
) -> Fetch:
    core, name = server.harness.core, name or user
    request = make_request(name, prompt, user=user, tenant=tenant, max_tokens=2, timeout_ms=timeout_ms)
    core.submit(with_options(request, is_batch=is_batch), server.harness.now)
    sequence = core.leader_of(RequestId(name))
    assert sequence is not None
    assert sequence.fetch is not None
    return sequence.fetch


def advance(server: Server, steps: int = 12) -> None:
    """Go on for so many steps, more than a prompt needs that need not wait."""
    for _ in range(steps):
        server.harness.plan()
        server.harness.result()
        server.harness.complete_all()


def with_no_row(keyring: Path, *stored: tuple[str, list[int]], **options: int) -> Server:
    """Return a server whose one row is taken, above storage with these prompts of users, with room for one turn.

    With `options`, it has the room that these say.
    """
    objects: Objects = {}
    for user, prompt in stored:
        hybrid(keyring, objects).serve(user, prompt, user=user)
    server = hybrid(keyring, objects, **{"host_pages": 20, "max_rows": 1, **options})
    server.harness.core.submit(make_request("long", [1, 2, 3], user="carol", max_tokens=100), 0.0)
    advance(server, 2)
    return server
