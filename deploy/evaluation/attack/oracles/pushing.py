"""Capacity under made-up names (claim B5): can one key push a victim's text out by passing for many users?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.inventions import Invention, Power, colleagues, rivals
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

ORACLE = "made-up names: pushing out"
CONTROL = "pushing out by as many real people (control)"
NAMES = 64
# Whole pages, and within the share that every user has.
VICTIM_TOKENS = 624


async def probe_pushing(scene: Scene) -> list[Finding]:
    """Let 64 made-up users of one key ask more distinct text than fits, then see what the victim still has."""
    capacity = scene.server.capacity_tokens
    if capacity is None:
        return [not_applicable(ORACLE, "the capacity is not known: --capacity-tokens")]
    credentials = scene.server.credentials
    powers = [*rivals(credentials), *colleagues(credentials)[1:]]
    if not powers:
        return [not_applicable(ORACLE, "no key but the victims' own: --rival-key, --plain-key")]
    text, victim = (Segment(f"document/{scene.name()}", VICTIM_TOKENS),), scene.user("victim")
    kept: dict[str, tuple[int, int]] = {}
    for power in powers:
        kept[power.name] = await _flood(scene, text, victim, Invention(power, "user"), capacity)
    lost = {name: pair for name, pair in kept.items() if pair[1] < pair[0]}
    before = max(pair[0] for pair in kept.values())
    if not before:
        return [not_applicable(ORACLE, "users do not even find their own text again")]
    if lost:
        name, (had, has) = next(iter(lost.items()))
        note = f"{has} of a victim's {had} tokens are left after {NAMES} names under the {name}"
        found = Finding(ORACLE, OracleVerdict.UNBOUNDED, len(powers) * NAMES, note=note)
    else:
        note = f"a victim keeps {before} tokens; {NAMES} names under the {', the '.join(kept)}"
        found = Finding(ORACLE, OracleVerdict.BOUNDED, len(powers) * NAMES, note=note)
    if scene.server.mode == "shared":
        return [found]
    had, has = await _flood(scene, text, victim, Invention(Power("vouching key"), "user"), capacity)
    verdict = OracleVerdict.UNBOUNDED if has < had else OracleVerdict.BOUNDED
    control = Finding(CONTROL, verdict, NAMES, note=f"{has} of {had} tokens are left after {NAMES} users")
    return [found, replace(control, is_control=True)]


async def _flood(
    scene: Scene, text: tuple[Segment, ...], victim: str, way: Invention, capacity: int
) -> tuple[int, int]:
    """Return what the victim finds of its text before and after the flood."""
    await scene.prober.ask(text, victim)
    before = (await scene.prober.ask(text, victim)).cached_tokens or 0
    tokens = int(capacity * scene.effort.flood_capacities / NAMES)
    await scene.prober.ask_at_once_as(
        [((Segment(f"flood/{scene.name()}", tokens),), way.worn(scene.user("flood"))) for _ in range(NAMES)]
    )
    return before, (await scene.prober.ask(text, victim)).cached_tokens or 0
