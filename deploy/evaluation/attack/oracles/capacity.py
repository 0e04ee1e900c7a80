"""Capacity: can one user, or one key under many names (claim B5), push out what another one holds?

Not claimed to be invisible, but bounded by quotas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.inventions import Invention, Power, colleagues, rivals
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

FLOOD = "flood"
FLOOD_TOKENS = 1000
HOLDERS = 4
# What users within their shares keep at least, for the flood to count as bounded.
KEPT_SHARE = 0.9
PUSHING = "made-up names: pushing out"
PUSHING_CONTROL = "pushing out by as many real people (control)"
NAMES = 64
# Whole pages, and within the share that every user has.
VICTIM_TOKENS = 624


async def probe_flood(scene: Scene) -> list[Finding]:
    """Let one user ask more distinct text than fits, then see what the others still have."""
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return [not_applicable(FLOOD, "the capacity is not known: --capacity-tokens")]
    held = [(scene.texts.document(scene.name()), scene.user("holder")) for _ in range(HOLDERS)]
    before = 0
    for text, user in held:
        await scene.prober.ask(text, user)
        before += (await scene.prober.ask(text, user)).cached_tokens or 0
    if not before:
        return [not_applicable(FLOOD, "users do not find even their own text again")]
    flooder = scene.user("flooder")
    requests = int(capacity * scene.effort.flood_capacities / FLOOD_TOKENS) + 1
    for _ in range(requests):
        await scene.prober.ask((Segment(f"flood/{scene.name()}", FLOOD_TOKENS),), flooder)
    after = sum([(await scene.prober.ask(text, user)).cached_tokens or 0 for text, user in held])
    kept = after / before
    verdict = OracleVerdict.BOUNDED if kept >= KEPT_SHARE else OracleVerdict.UNBOUNDED
    note = f"others keep {kept:.0%} while one user asks {requests * FLOOD_TOKENS / capacity:.2f} × the capacity"
    return [Finding(FLOOD, verdict, len(held), note=note)]


async def probe_pushing(scene: Scene) -> list[Finding]:
    """Let 64 made-up users of one key ask more distinct text than fits, then see what the victim still has."""
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return [not_applicable(PUSHING, "the capacity is not known: --capacity-tokens")]
    credentials = scene.server.credentials
    powers = [*rivals(credentials), *colleagues(credentials)[1:]]
    if not powers:
        return [not_applicable(PUSHING, "no key but the victims' own: --rival-key, --plain-key")]
    text, victim = (Segment(f"document/{scene.name()}", VICTIM_TOKENS),), scene.user("victim")
    kept: dict[str, tuple[int, int]] = {}
    for power in powers:
        kept[power.name] = await _flood(scene, text, victim, Invention(power, "user"), capacity)
    lost = {name: pair for name, pair in kept.items() if pair[1] < pair[0]}
    before = max(pair[0] for pair in kept.values())
    if not before:
        return [not_applicable(PUSHING, "users do not even find their own text again")]
    if lost:
        name, (had, has) = next(iter(lost.items()))
        note = f"{has} of a victim's {had} tokens are left after {NAMES} names under the {name}"
        found = Finding(PUSHING, OracleVerdict.UNBOUNDED, len(powers) * NAMES, note=note)
    else:
        note = f"a victim keeps {before} tokens; {NAMES} names under the {', the '.join(kept)}"
        found = Finding(PUSHING, OracleVerdict.BOUNDED, len(powers) * NAMES, note=note)
    if scene.server.mode == "shared":
        return [found]
    had, has = await _flood(scene, text, victim, Invention(Power("vouching key"), "user"), capacity)
    verdict = OracleVerdict.UNBOUNDED if has < had else OracleVerdict.BOUNDED
    control = Finding(PUSHING_CONTROL, verdict, NAMES, note=f"{has} of {had} tokens are left after {NAMES} users")
    return [found, replace(control, is_control=True)]


async def _flood(
    scene: Scene, text: tuple[Segment, ...], victim: str, way: Invention, capacity: int
) -> tuple[int, int]:
    """Return the cached tokens of the victim's text before and after the flood."""
    await scene.prober.ask(text, victim)
    before = (await scene.prober.ask(text, victim)).cached_tokens or 0
    tokens = int(capacity * scene.effort.flood_capacities / NAMES)
    await scene.prober.ask_at_once_as(
        [((Segment(f"flood/{scene.name()}", tokens),), way.worn(scene.user("flood"))) for _ in range(NAMES)]
    )
    return before, (await scene.prober.ask(text, victim)).cached_tokens or 0
