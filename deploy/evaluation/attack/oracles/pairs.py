"""Paired probes: a text that the victim has just asked about, and one of equal length that no user has.

`cached_tokens` is what the server says outright, time to first token what it cannot hide (EarlyBird, arXiv 2409.20002).
Both probes of a pair meet the same load, in a random order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, Group, judge, not_applicable, pooled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.attack.prober import Sighting
    from deploy.evaluation.attack.scene import Scene
    from deploy.evaluation.bench.records import Segment

Pair = tuple["Sighting", "Sighting"]


async def probe_pairs(scene: Scene) -> list[Finding]:
    """Return the findings of both observables."""
    seen = await _collect(scene)
    cached = report_cached("cached_tokens", seen)
    if not scene.effort.times:
        return [cached]
    groups = [Group((-held.first_token_s,), (-other.first_token_s,)) for held, other in seen]
    separation = pooled(groups)
    timing = judge("time to first token", separation, f"KS p = {separation.ks:.2g}")
    return [cached, timing]


def report_cached(oracle: str, seen: Sequence[Pair], note: str = "") -> Finding:
    """Return the finding of `cached_tokens` in paired sightings."""
    groups = []
    for held, other in seen:
        if held.cached_tokens is None or other.cached_tokens is None:
            return not_applicable(oracle, "the server does not report cached_tokens")
        groups.append(Group((held.cached_tokens,), (other.cached_tokens,)))
    return judge(oracle, pooled(groups), note)


async def _collect(scene: Scene) -> list[Pair]:
    victim, attacker, template = scene.user("victim"), scene.user("attacker"), scene.name()
    # The attacker knows the template, so it has it in its own cache: only the secret is at stake.
    await scene.prober.ask(scene.texts.filled(template, scene.name()), attacker)
    seen: list[Pair] = []
    for number in range(scene.effort.pairs):
        held, other = (_text(scene, template, is_document=number % 2 == 0) for _ in range(2))
        await scene.prober.ask(held, victim)
        if scene.chance.random() < 0.5:
            first = await scene.prober.ask(held, attacker)
            seen.append((first, await scene.prober.ask(other, attacker)))
        else:
            first = await scene.prober.ask(other, attacker)
            seen.append((await scene.prober.ask(held, attacker), first))
    return seen


def _text(scene: Scene, template: str, *, is_document: bool) -> tuple[Segment, ...]:
    return scene.texts.document(scene.name()) if is_document else scene.texts.filled(template, scene.name())
