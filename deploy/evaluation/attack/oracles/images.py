"""Pictures: does the server show that somebody else has sent one, or take one for another by what is said of it?

Peers key caches of images by short hashes, by clients' identifiers or by metadata of files, and were seen to serve the
pictures of other users. A picture shows in cached_tokens and in time, as text does, and in the time of another question
about it, where it need not be encoded again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, Group, judge, not_applicable, pooled
from deploy.evaluation.attack.inventions import MESSAGE_USER, colleagues, inventions, rivals
from deploy.evaluation.attack.oracles.pairs import report_cached
from deploy.evaluation.attack.pictures import Picture
from deploy.evaluation.attack.prober import Disguise

if TYPE_CHECKING:
    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.prober import Sighting
    from deploy.evaluation.attack.scene import Scene

CACHED, TIMES = "pictures: cached_tokens", "pictures: time to first token"
ENCODED = "pictures: time of another question"
ENCODED_CONTROL = "time of another question about one's own picture (control)"
NAMED = "pictures of one file name and EXIF id"
SHORT = "pictures of one short hash"
SAME_CONTROL = "one's own picture again (control)"
INVENTED = "pictures: made-up names"


async def probe_images(scene: Scene) -> list[Finding]:
    """Return the findings of all observables; they do not apply to a server whose model takes no pictures."""
    if not await scene.prober.sees_pictures(_picture(scene)):
        return [not_applicable(CACHED, "the model takes no pictures")]
    seen = await _probe_others(scene)
    findings = [report_cached(CACHED, seen)]
    if scene.effort.times:
        separation = pooled([_times(held, other) for held, other in seen])
        findings.append(judge(TIMES, separation, f"KS p = {separation.ks:.2g}"))
        findings += await _probe_encoder(scene)
    findings += await _probe_aliases(scene)
    findings.append(await _probe_inventions(scene))
    return findings


async def _probe_others(scene: Scene) -> list[Pair]:
    """Ask what a victim has just asked, and what no user has."""
    victim, attacker = (_user(scene, role) for role in ("victim", "attacker"))
    seen = []
    for _ in range(scene.effort.pairs):
        held, other = _picture(scene), _picture(scene)
        await scene.prober.ask_about(held, victim)
        seen.append(await _in_some_order(scene, held, other, attacker))
    return seen


async def _probe_encoder(scene: Scene) -> list[Finding]:
    """Ask another question than the victim, whose text comes before the picture: only its encoding can be saved."""
    victim, attacker = (_user(scene, role) for role in ("victim", "attacker"))
    groups: list[Group] = []
    own: list[Group] = []
    for _ in range(scene.effort.pairs):
        held, other = _picture(scene), _picture(scene)
        first = await scene.prober.ask_about(held, victim, before=_question(scene))
        groups.append(_times(*await _in_some_order(scene, held, other, attacker, asks_before=True)))
        own.append(_times(await scene.prober.ask_about(held, victim, before=_question(scene)), first))
    separation = pooled(groups)
    control = replace(judge(ENCODED_CONTROL, pooled(own)), is_control=True)
    if not control.succeeded:
        return [not_applicable(ENCODED, "time does not show whether a picture was encoded")]
    return [judge(ENCODED, separation, f"KS p = {separation.ks:.2g}"), control]


async def _probe_aliases(scene: Scene) -> list[Finding]:
    """Send pictures that share a name, or a short hash, with one that the same user has sent: a mistake shows there."""
    named: list[Pair] = []
    short: list[Pair] = []
    same: list[Pair] = []
    for _ in range(scene.effort.pairs):
        user, first = _user(scene, "user"), _picture(scene)
        await scene.prober.ask_about(first, user)
        stranger = await scene.prober.ask_about(_picture(scene), user)
        alike = replace(_picture(scene), name=first.name, unique_id=first.unique_id)
        named.append((await scene.prober.ask_about(alike, user), stranger))
        twin = replace(_picture(scene), seed=first.seed, is_twin=True)
        short.append((await scene.prober.ask_about(twin, user), stranger))
        same.append((await scene.prober.ask_about(first, user), stranger))
    control = replace(report_cached(SAME_CONTROL, same), is_control=True)
    if not control.succeeded:
        return [not_applicable(NAMED, "no picture is found again")]
    return [report_cached(NAMED, named), report_cached(SHORT, short), control]


async def _probe_inventions(scene: Scene) -> Finding:
    """Ask under all names that credentials beside the victim's can make up."""
    credentials, victim = scene.server.credentials, _user(scene, "victim")
    powers = [*rivals(credentials), *colleagues(credentials)] if scene.server.has_keys else []
    seen, found = [], []
    for invention in inventions(powers):
        if invention.field == MESSAGE_USER:  # a field of another API
            continue
        held, other = _picture(scene), _picture(scene)
        await scene.prober.ask_about(held, victim)
        pair = await _in_some_order(scene, held, other, invention.worn(scene.name()))
        seen.append(pair)
        if (pair[0].cached_tokens or 0) > (pair[1].cached_tokens or 0):
            found.append(invention.label)
    if not seen:
        return not_applicable(INVENTED, "no keys are known")
    return report_cached(INVENTED, seen, f"{len(found)} of {len(seen)} ways")


async def _in_some_order(
    scene: Scene, held: Picture, other: Picture, disguise: Disguise, *, asks_before: bool = False
) -> Pair:
    seen: dict[bool, Sighting] = {}
    asked = [(held, True), (other, False)]
    scene.chance.shuffle(asked)
    for picture, is_held in asked:
        before = _question(scene) if asks_before else ""
        seen[is_held] = await scene.prober.ask_about(picture, disguise, before=before)
    return seen[True], seen[False]


def _picture(scene: Scene) -> Picture:
    number = scene.name()
    return Picture(scene.chance.getrandbits(63), f"{number}.png", f"{int(number):032x}")


def _question(scene: Scene) -> str:
    return f"{scene.name()}: what can be seen in the picture below?"


def _user(scene: Scene, role: str) -> Disguise:
    return Disguise({"user": scene.user(role)})


def _times(held: Sighting, other: Sighting) -> Group:
    return Group((-held.first_token_s,), (-other.first_token_s,))
