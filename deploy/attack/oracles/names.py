"""Names: does anybody get into another's view by what it calls itself, or by having no name at all?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.attack.findings import Finding, Verdict, not_applicable
from deploy.attack.oracles.pairs import report_cached
from deploy.attack.prober import AttackError, Disguise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.attack.oracles.pairs import Pair
    from deploy.attack.prober import Sighting
    from deploy.attack.scene import Scene

TENANT_HEADER, USER_HEADER = "x-pando-tenant", "x-pando-user"


async def probe_names(scene: Scene) -> list[Finding]:
    """Try every disguise on a text that the victim has asked and on one that nobody has.

    The victim's own name, from within its tenant, is no disguise: who holds a tenant's key says who its users are.
    """
    # Who is nameless must not be found by others who are.
    absent = await _try(scene, "absent user id", [(disguise, each) for disguise in nobody() for each in nobody()])
    named = Disguise({"user": "{name}"})
    spoofed = await _try(scene, "spoofed user id", [(named, each) for each in impostors(scene.server.rival_key)])
    return [absent, spoofed]


def nobody() -> list[Disguise]:
    """Return ways to name no user."""
    return [Disguise(), Disguise({"user": ""}), Disguise({"user_id": "", "safety_identifier": ""})]


def impostors(rival_key: str | None) -> list[Disguise]:
    """Return names that are not the victim's, as templates of the victim's, and the victim's own from elsewhere."""
    fields: list[Mapping[str, str]] = [
        {"user": "{name} "},
        {"user": "{NAME}"},
        {"user": "default/{name}"},
        {"user": "{name}\u200b"},
        {"user": "someone-else", "safety_identifier": "{name}"},
        {"user_id": "someone-else", "user": "{name}"},
        {"user": "someone-else", "cache_salt": "{name}"},
    ]
    disguises: list[Disguise] = [Disguise(each) for each in fields]
    disguises.append(Disguise({"user": "someone-else"}, {USER_HEADER: "{name}"}))
    disguises.append(Disguise({}, {USER_HEADER: "{name}", TENANT_HEADER: "default"}))
    if rival_key is not None:
        disguises.append(Disguise({"user": "{name}"}, api_key=rival_key))
        disguises.append(Disguise({"user": "{name}"}, {TENANT_HEADER: "default"}, rival_key))
    return disguises


async def _try(scene: Scene, oracle: str, cases: list[tuple[Disguise, Disguise]]) -> Finding:
    """Let a victim and an attacker each name themselves as one of `cases` says."""
    seen: list[Pair] = []
    refused = 0
    for asking, probing in cases:
        victim = scene.user("victim")
        held, other = scene.texts.document(scene.name()), scene.texts.document(scene.name())
        await scene.prober.ask_as(held, _named(asking, victim))
        worn = _named(probing, victim)
        try:
            seen.append((await scene.prober.ask_as(held, worn), await scene.prober.ask_as(other, worn)))
        except AttackError:
            refused += 1
    if not seen:
        return not_applicable(oracle, f"the server refuses all {refused} disguises")
    found = report_cached(oracle, seen, f"{refused} of {len(cases)} disguises refused" if refused else "")
    hits = sum(_cached(held) > _cached(other) for held, other in seen)
    # One name that opens another's view is one too many, however many do not.
    return replace(found, verdict=Verdict.LEAKS, note=f"{hits} of {len(seen)} disguises see it") if hits else found


def _cached(sighting: Sighting) -> int:
    return sighting.cached_tokens or 0


def _named(disguise: Disguise, victim: str) -> Disguise:
    def fill(values: Mapping[str, str]) -> dict[str, str]:
        return {key: value.format(name=victim, NAME=victim.upper()) for key, value in values.items()}

    return Disguise(fill(disguise.fields), fill(disguise.headers), disguise.api_key)
