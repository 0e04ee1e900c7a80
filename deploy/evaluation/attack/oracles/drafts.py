"""Speculative decoding: do the packets of an answer show that somebody else has had the same answer before?

A draft that is right brings several tokens in one packet, and sooner (Remote Timing Attacks on Efficient Language Model
Inference, arXiv 2410.17175). What one's own earlier answers show is the control.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, Group, judge, not_applicable, pooled
from deploy.evaluation.attack.prober import Disguise

if TYPE_CHECKING:
    from deploy.evaluation.attack.prober import Sighting
    from deploy.evaluation.attack.scene import Scene
    from deploy.evaluation.bench.records import Segment

PACKETS, TIMES = "packets of drafted answers", "time of drafted answers"
CONTROL = "packets of one's own drafted answers (control)"
# Whole pages of the answer are drafted to whom may read them.
TOKENS = 48


async def probe_drafts(scene: Scene) -> list[Finding]:
    """Ask what a victim has just asked, and what no user has, and compare packets and times of the answers."""
    victim, attacker = scene.user("victim"), scene.user("attacker")
    packets: list[Group] = []
    times: list[Group] = []
    own: list[Group] = []
    for _ in range(scene.effort.pairs):
        held, other = (scene.texts.document(scene.name()) for _ in range(2))
        first = await _answer(scene, held, victim)
        asked = [(held, True), (other, False)]
        scene.chance.shuffle(asked)
        seen = {is_held: await _answer(scene, text, attacker) for text, is_held in asked}
        again = await _answer(scene, held, victim)
        packets.append(Group((-seen[True].packets,), (-seen[False].packets,)))
        times.append(Group((-_seconds(seen[True]),), (-_seconds(seen[False]),)))
        own.append(Group((-again.packets,), (-first.packets,)))
    control = replace(judge(CONTROL, pooled(own)), is_control=True)
    if not control.succeeded:
        return [not_applicable(PACKETS, "the server drafts nothing")]
    findings = [judge(PACKETS, pooled(packets)), control]
    if scene.effort.times:
        separation = pooled(times)
        findings.append(judge(TIMES, separation, f"KS p = {separation.ks:.2g}"))
    return findings


async def _answer(scene: Scene, text: tuple[Segment, ...], user: str) -> Sighting:
    # The same seed gives the same answer, whoever asks.
    fields = {"user": user, "seed": 1, "temperature": 0, "ignore_eos": True}
    return await scene.prober.ask_exactly(text, Disguise(fields), output_tokens=TOKENS)


def _seconds(seen: Sighting) -> float:
    return seen.ended_at - seen.first_token_at
