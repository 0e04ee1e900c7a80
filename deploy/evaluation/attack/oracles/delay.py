"""Fair shares (claim B5): how long do made-up people, or none, keep a victim waiting?

Places in a queue are counted, not seconds: how many of the flood's requests are served before the victim's last one.
With equal requests and two tenants, fair shares serve about as many as the victim has. Where the flood's outputs are
long, what is counted are those that end before the victim's first token: with fair shares, rows make way for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.inventions import PERSON_FIELDS, UNNAMED, Invention, Power, rivals
from deploy.evaluation.attack.oracles.inventions import NO_RIVAL
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from deploy.evaluation.attack.prober import Disguise, Sighting
    from deploy.evaluation.attack.scene import Scene

ORACLE = "rival key: delay"
CONTROL = "delay by as many real people (control)"
FLOOD = 64
REQUESTS = 8
TOKENS = 240
LONG_ORACLE = "rival key: long outputs"
LONG_CONTROL = "long outputs of as many real people (control)"
# Far more than a row generates before it makes way.
LONG_OUTPUT = 320
# After its first answer, the flood is in the queue by then, and most of it has not been served.
AHEAD_S = 0.3
# Requests by which shares may differ at any time: `slack_tokens` of the fair policy, and what is fetched ahead.
SLACK = 6


async def probe_delay(scene: Scene) -> list[Finding]:
    """Queue a flood of another tenant's key, then a few requests of a victim."""
    reason = _not_tested(scene)
    if reason is not None:
        return [not_applicable(ORACLE, reason)]
    ways = _ways(scene)
    most = 2 * REQUESTS + scene.server.rows + SLACK
    passed = {way.label: await _overtaken(scene, way) for way in ways}
    worst = max(passed, key=lambda label: passed[label])
    is_bounded = passed[worst] <= most
    note = f"{passed[worst]} of {FLOOD} requests before a victim's {REQUESTS}, fair are at most {most}: {worst}"
    verdict = OracleVerdict.BOUNDED if is_bounded else OracleVerdict.UNBOUNDED
    found = Finding(ORACLE, verdict, len(ways) * FLOOD, note=note)
    count = await _overtaken(scene, Invention(Power("vouching key"), "user"))
    control = Finding(CONTROL, OracleVerdict.UNBOUNDED if count > most else OracleVerdict.BOUNDED, FLOOD)
    return [found, replace(control, is_control=True, note=f"{count} of {FLOOD} requests before a victim's {REQUESTS}")]


async def probe_long_outputs(scene: Scene) -> list[Finding]:
    """Hold all rows by long outputs of another tenant's key, and have as many wait; then send a victim's request."""
    reason = _not_tested(scene)
    if reason is not None:
        return [not_applicable(LONG_ORACLE, reason)]
    ways, rows = _ways(scene), scene.server.rows
    most = rows // 4
    ended = {way.label: await _ended_before(scene, way) for way in ways}
    worst = max(ended, key=lambda label: ended[label])
    verdict = OracleVerdict.BOUNDED if ended[worst] <= most else OracleVerdict.UNBOUNDED
    note = f"{ended[worst]} of {2 * rows} long outputs end before a victim's first token, at most {most} may: {worst}"
    count = await _ended_before(scene, Invention(Power("vouching key"), "user"))
    control = Finding(LONG_CONTROL, OracleVerdict.UNBOUNDED if count > most else OracleVerdict.BOUNDED, 2 * rows)
    return [
        Finding(LONG_ORACLE, verdict, len(ways) * 2 * rows, note=note),
        replace(control, is_control=True, note=f"{count} of {2 * rows} long outputs end before a victim's first token"),
    ]


def _not_tested(scene: Scene) -> str | None:
    if scene.server.policy != "fair":
        return "the server does not serve by fair shares, or it is not known: --policy fair"
    return None if rivals(scene.server.credentials) else NO_RIVAL


def _ways(scene: Scene) -> list[Invention]:
    powers = rivals(scene.server.credentials)
    return [Invention(power, name) for power in powers for name in (UNNAMED, PERSON_FIELDS[0])]


async def _ended_before(scene: Scene, way: Invention) -> int:
    """Count a flood's long outputs that end after a victim's request is sent and before its first token."""
    prober = scene.prober
    first = asyncio.ensure_future(prober.ask_as(_text(scene), way.worn(scene.user("flood"))))
    flood = [
        asyncio.ensure_future(prober.ask_as(_text(scene), way.worn(scene.user("flood")), output_tokens=LONG_OUTPUT))
        for _ in range(2 * scene.server.rows)
    ]
    try:
        await first
        await prober.clock.sleep(AHEAD_S)
        sent_at = prober.clock.now()
        victim = await prober.ask(_text(scene), scene.user("victim"))
        done = [each.result() for each in flood if each.done()]
        return sum(sent_at < each.ended_at <= victim.first_token_at for each in done)
    finally:
        for each in (first, *flood):
            each.cancel()
        await asyncio.gather(first, *flood, return_exceptions=True)


async def _overtaken(scene: Scene, way: Invention) -> int:
    """Count a flood's requests that are served after the victim sends its own and before its last answer."""
    victim = scene.user("victim")
    flood = [(_text(scene), way.worn(scene.user("flood"))) for _ in range(FLOOD)]
    asked = [(_text(scene), victim) for _ in range(REQUESTS)]
    is_served = asyncio.Event()

    async def flood_with(text: tuple[Segment, ...], disguise: Disguise) -> Sighting:
        try:
            return await scene.prober.ask_as(text, disguise)
        finally:
            is_served.set()

    async def wait_meanwhile() -> tuple[float, list[Sighting]]:
        await is_served.wait()
        await scene.prober.clock.sleep(AHEAD_S)
        return scene.prober.clock.now(), await scene.prober.ask_at_once(asked)

    flooding = asyncio.gather(*(flood_with(*each) for each in flood))
    try:
        sent_at, waiting = await wait_meanwhile()
        return count_between(await flooding, sent_at, max(each.first_token_at for each in waiting))
    finally:
        flooding.cancel()


def count_between(sightings: list[Sighting], start: float, end: float) -> int:
    """Count requests that were served between two times."""
    return sum(start < each.first_token_at <= end for each in sightings)


def _text(scene: Scene) -> tuple[Segment, ...]:
    return (Segment(f"queue/{scene.name()}", TOKENS),)
