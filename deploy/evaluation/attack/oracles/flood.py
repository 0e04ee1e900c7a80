"""Capacity: can one user push out what another one holds? Not claimed to be invisible, but bounded by quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

ORACLE = "flood"
FLOOD_TOKENS = 1000
HOLDERS = 4
# What users within their shares keep at least, for the flood to count as bounded.
KEPT_SHARE = 0.9


async def probe_flood(scene: Scene) -> list[Finding]:
    """Let one user ask more distinct text than fits, then see what the others still have."""
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return [not_applicable(ORACLE, "the capacity is not known: --capacity-tokens")]
    held = [(scene.texts.document(scene.name()), scene.user("holder")) for _ in range(HOLDERS)]
    before = 0
    for text, user in held:
        await scene.prober.ask(text, user)
        before += (await scene.prober.ask(text, user)).cached_tokens or 0
    if not before:
        return [not_applicable(ORACLE, "nobody finds even the own text again")]
    flooder = scene.user("flooder")
    requests = int(capacity * scene.effort.flood_capacities / FLOOD_TOKENS) + 1
    for _ in range(requests):
        await scene.prober.ask((Segment(f"flood/{scene.name()}", FLOOD_TOKENS),), flooder)
    after = sum([(await scene.prober.ask(text, user)).cached_tokens or 0 for text, user in held])
    kept = after / before
    verdict = OracleVerdict.BOUNDED if kept >= KEPT_SHARE else OracleVerdict.UNBOUNDED
    note = f"others keep {kept:.0%} while one user asks {requests * FLOOD_TOKENS / capacity:.2f} × the capacity"
    return [Finding(ORACLE, verdict, len(held), note=note)]
