"""Fair shares (claim B5): how long do made-up people, or none, keep a victim waiting?

Places in a queue are counted, not seconds: how many of the flood's requests are served before the victim's last one.
With equal requests and two tenants, fair shares serve about as many as the victim has.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.attack.findings import Finding, Verdict, not_applicable
from deploy.attack.inventions import PERSON_FIELDS, UNNAMED, Invention, Power, rivals
from deploy.attack.oracles.inventions import NO_RIVAL
from deploy.bench.records import Segment

if TYPE_CHECKING:
    from deploy.attack.prober import Disguise, Sighting
    from deploy.attack.scene import Scene

ORACLE = "rival key: delay"
CONTROL = "delay by as many real people (control)"
FLOOD = 64
REQUESTS = 8
TOKENS = 240
# After its first answer, the flood is in the queue by then, and most of it has not been served.
AHEAD_S = 0.3
# Requests by which shares may differ at any time: `scheduler.fair_slack_tokens`, and what is fetched ahead.
SLACK = 6


async def probe_delay(scene: Scene) -> list[Finding]:
    """Queue a flood of another tenant's key, then a few requests of a victim."""
    if scene.server.policy != "fair":
        return [not_applicable(ORACLE, "the server does not serve by fair shares, or it is not known: --policy fair")]
    powers = rivals(scene.server.credentials)
    if not powers:
        return [not_applicable(ORACLE, NO_RIVAL)]
    ways = [Invention(power, name) for power in powers for name in (UNNAMED, PERSON_FIELDS[0])]
    most = 2 * REQUESTS + scene.server.rows + SLACK
    passed = {way.label: await _overtaken(scene, way) for way in ways}
    worst = max(passed, key=lambda label: passed[label])
    is_bounded = passed[worst] <= most
    note = f"{passed[worst]} of {FLOOD} requests before a victim's {REQUESTS}, fair are at most {most}: {worst}"
    verdict = Verdict.BOUNDED if is_bounded else Verdict.UNBOUNDED
    found = Finding(ORACLE, verdict, len(ways) * FLOOD, note=note)
    count = await _overtaken(scene, Invention(Power("vouching key"), "user"))
    control = Finding(CONTROL, Verdict.UNBOUNDED if count > most else Verdict.BOUNDED, FLOOD)
    return [found, replace(control, is_control=True, note=f"{count} of {FLOOD} requests before a victim's {REQUESTS}")]


async def _overtaken(scene: Scene, way: Invention) -> int:
    """Return how many requests of a flood are served between the victim's sending and its last answer."""
    victim = scene.user("victim")
    flood = [(_text(scene), way.worn(scene.user("flood"))) for _ in range(FLOOD)]
    asked = [(_text(scene), victim) for _ in range(REQUESTS)]
    is_served = asyncio.Event()

    async def flood_with(text: tuple[Segment, ...], disguise: Disguise) -> Sighting:
        try:
            return await scene.prober.ask_as(text, disguise)
        finally:
            is_served.set()

    async def wait_beside() -> tuple[float, list[Sighting]]:
        await is_served.wait()
        await scene.prober.clock.sleep(AHEAD_S)
        return scene.prober.clock.now(), await scene.prober.ask_at_once(asked)

    flooding = asyncio.gather(*(flood_with(*each) for each in flood))
    try:
        sent_at, waiting = await wait_beside()
        return count_between(await flooding, sent_at, max(each.first_token_at for each in waiting))
    finally:
        flooding.cancel()


def count_between(sightings: list[Sighting], start: float, end: float) -> int:
    """Return how many were served between two times."""
    return sum(start < each.first_token_at <= end for each in sightings)


def _text(scene: Scene) -> tuple[Segment, ...]:
    return (Segment(f"queue/{scene.name()}", TOKENS),)
