"""Made-up people (claim B5): one credential that passes for k people, to read off what others hold or to publish it.

Guessing: a victim holds a text, the attacker asks for it under k - 1 names and looks with another one, so that a hit
shows that somebody else holds it. Publishing: one credential asks for a text k times under different names, or none,
and others look whether they find it. Each look is compared with one at a text that has not been asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from deploy.evaluation.attack.findings import Finding, Group, OracleVerdict, judge, not_applicable, pooled
from deploy.evaluation.attack.inventions import (
    CONVERSATION_FIELDS,
    PERSON_FIELDS,
    REMOTE,
    UNNAMED,
    Invention,
    Power,
    colleagues,
    inventions,
    person,
    rivals,
)
from deploy.evaluation.attack.oracles.pairs import report_cached
from deploy.evaluation.attack.prober import NO_KEY, AttackError, Disguise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.prober import Sighting
    from deploy.evaluation.attack.scene import Scene
    from deploy.evaluation.bench.records import Segment

# Pairs whose copies fit into a small cache at the same time.
TIMED_BATCH = 16
TIMES = "rival key: time to first token"
NO_RIVAL = "no key of another tenant: --rival-key"

Text = tuple["Segment", ...]
# From a new name and an endpoint to the identity of a request.
Looker: TypeAlias = "Callable[[str, str], Disguise]"


@dataclass(frozen=True, slots=True)
class Look:
    """A look still to be taken at a text and at another one that has not been asked."""

    way: str
    held: Text
    other: Text
    disguise: Disguise


async def probe_inventions(scene: Scene) -> list[Finding]:
    """Let keys of another tenant, and single keys of the victims' own, invent people."""
    credentials = scene.server.credentials
    rival, own = rivals(credentials), colleagues(credentials)
    neighbour: dict[str, Looker] = {"a neighbour in the tenant": person}
    strangers: dict[str, Looker] = {}
    if credentials.third is not None:
        strangers["a third tenant"] = partial(person, api_key=credentials.third)
    # A tenant publishes to itself; the victims' tenant and a third one must see nothing of it.
    prepared = {
        "rival key: guessing": await _guess(scene, inventions(rival)),
        "rival key: tenant's shared text": await _share(scene, rival),
        "rival key: publishing": await _publish(scene, inventions(rival), neighbour | strangers),
    }
    if credentials.rival is not None:
        strangers["another tenant"] = partial(person, api_key=credentials.rival)
    prepared["one key: guessing"] = await _guess(scene, inventions(own[1:]))
    prepared["one key: publishing"] = await _publish(scene, inventions(own), neighbour | strangers)
    control = await _guess(scene, [Invention(Power("vouching key"), "user")]) if scene.server.promotes else []
    await scene.pass_epoch()
    findings = [await _looked(scene, oracle, looks) for oracle, looks in prepared.items()]
    if control:
        found = await _looked(scene, "people named by a vouching key (control)", control)
        findings.append(replace(found, is_control=True))
    return findings


async def probe_rival_times(scene: Scene) -> list[Finding]:
    """Guess under a rival key as before, but compare times to first token instead of cached tokens."""
    powers = rivals(scene.server.credentials)
    if not powers:
        return [not_applicable(TIMES, NO_RIVAL)]
    if not scene.effort.times:
        return []
    groups: list[Group] = []
    while len(groups) < scene.effort.pairs:
        looks = await _guess(scene, [Invention(powers[0], "user")] * TIMED_BATCH)
        if scene.server.promotes:
            await scene.pass_epoch()
        groups += [await _timed(scene, look) for look in looks]
    separation = pooled(groups)
    return [judge(TIMES, separation, f"KS p = {separation.ks:.2g}")]


async def probe_keyless(scene: Scene) -> list[Finding]:
    """Let clients without a credential, from elsewhere, look for each other's text and for that of a local person."""
    clients = Power("remote client", NO_KEY, REMOTE)
    local = Power("local person", NO_KEY, fields=(*PERSON_FIELDS[:1], *CONVERSATION_FIELDS, UNNAMED))
    elsewhere: dict[str, Looker] = {"a remote client": _remote}
    here: dict[str, Looker] = {"the local person": _local}
    try:
        guesses = await _guess(scene, inventions([clients]), _remote)
        guesses += await _guess(scene, inventions([clients]), _local)
        # Everybody on this machine is one person, who finds its own text again; clients elsewhere find nothing.
        published = await _publish(scene, inventions([clients]), elsewhere | here)
        published += await _publish(scene, inventions([local]), elsewhere)
        await scene.pass_epoch()
    except AttackError as error:
        if "401" in str(error):
            return [not_applicable("keyless", "the server refuses requests without a credential")]
        raise
    guessing = await _looked(scene, "keyless: guessing", guesses)
    return [guessing, await _looked(scene, "keyless: publishing", published)]


async def _guess(scene: Scene, ways: Iterable[Invention], victim: Looker = person) -> list[Look]:
    """Let victims hold texts, and an attacker ask for each of them k - 1 times by each of `ways`.

    In a cache that all share, the attacker's own copy would be found, so that it looks at once.
    """
    names = 0 if scene.server.mode == "shared" else scene.server.promotion_subjects - 1

    async def guess(way: Invention) -> Look:
        held, other = _two_texts(scene)
        await scene.prober.ask_as(held, victim(scene.user("victim"), way.endpoint))
        for text in (held, other):
            for _ in range(names):
                await scene.prober.ask_as(text, way.worn(scene.user("made-up")))
        return Look(way.label, held, other, way.worn(scene.user("made-up")))

    return await scene.at_once(guess(way) for way in ways)


async def _share(scene: Scene, powers: Iterable[Power]) -> list[Look]:
    """Let k users of the victims' tenant share a text, for other tenants' keys to look at under invented names."""

    async def share(way: Invention) -> Look:
        held, other = _two_texts(scene)
        for _ in range(scene.server.promotion_subjects):
            await scene.prober.ask(held, scene.user("victim"))
        return Look(way.label, held, other, way.worn(scene.user("made-up")))

    return await scene.at_once(share(Invention(power, "user")) for power in powers)


async def _publish(scene: Scene, ways: Iterable[Invention], lookers: Mapping[str, Looker]) -> list[Look]:
    """Let one credential ask for a text k times by each of `ways`; each looker has its own, being evidence too."""

    async def publish(way: Invention, who: str, looker: Looker) -> Look:
        held, other = _two_texts(scene)
        for _ in range(scene.server.promotion_subjects):
            await scene.prober.ask_as(held, way.worn(scene.user("made-up")))
        return Look(f"{way.label}, seen by {who}", held, other, looker(scene.user("looker"), way.endpoint))

    return await scene.at_once(publish(way, *looker) for way in ways for looker in lookers.items())


async def _looked(scene: Scene, oracle: str, looks: Sequence[Look]) -> Finding:
    if not looks:
        return not_applicable(oracle, NO_RIVAL)
    seen = await scene.at_once(_look(scene, look) for look in looks)
    found = report_cached(oracle, seen)
    if found.verdict is OracleVerdict.NOT_APPLICABLE:
        return found
    ways = {look.way: None for look, pair in zip(looks, seen, strict=True) if _is_hit(*pair)}
    # One way that works is one too many, however many do not.
    if ways:
        return replace(found, verdict=OracleVerdict.LEAKS, note=f"{len(ways)} ways, such as: {next(iter(ways))}")
    return replace(found, verdict=OracleVerdict.CLOSED, note=f"{len({look.way for look in looks})} ways")


async def _look(scene: Scene, look: Look) -> Pair:
    other = await scene.prober.ask_as(look.other, look.disguise)
    held = await scene.prober.ask_as(look.held, look.disguise)
    if _is_hit(held, other):
        # What every prompt begins with, a chat template, may have become shared between the two.
        again = await scene.prober.ask_as(scene.texts.document(scene.name()), look.disguise)
        other = max(other, again, key=_cached)
    return held, other


def _is_hit(held: Sighting, other: Sighting) -> bool:
    return _cached(held) > _cached(other)


def _two_texts(scene: Scene) -> tuple[Text, Text]:
    return scene.texts.document(scene.name()), scene.texts.document(scene.name())


async def _timed(scene: Scene, look: Look) -> Group:
    texts = [(look.held, True), (look.other, False)]
    scene.chance.shuffle(texts)
    times = {is_held: (await scene.prober.ask_as(text, look.disguise)).first_token_s for text, is_held in texts}
    return Group((-times[True],), (-times[False],))


def _remote(name: str, endpoint: str) -> Disguise:
    return replace(person(name, endpoint, NO_KEY), headers=REMOTE)


def _local(_name: str, endpoint: str) -> Disguise:
    return Disguise(api_key=NO_KEY, endpoint=endpoint)


def _cached(sighting: Sighting) -> int:
    return sighting.cached_tokens or 0
