"""Names: can a request get into another's view by the name it gives, or by giving none?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.oracles.pairs import report_cached
from deploy.evaluation.attack.prober import AttackError, Disguise

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.prober import Sighting
    from deploy.evaluation.attack.scene import Scene, VictimKeys

TENANT_HEADER, USER_HEADER = "x-pando-tenant", "x-pando-user"


async def probe_names(scene: Scene) -> list[Finding]:
    """Try every disguise on a text that the victim has sent and on one that no user has.

    The victim's own name under a key that vouches for its users is no disguise: the key's holder says who they are.
    """
    credentials = scene.server.credentials
    unnamed = [(asking, probing) for asking in no_credential() for probing in strangers(credentials)]
    absent = await _try(scene, "absent user id", unnamed)
    named = Disguise({"user": "{name}"})
    spoofed = await _try(scene, "spoofed user id", [(named, each) for each in impostors(credentials)])
    return [absent, spoofed]


def no_credential() -> list[Disguise]:
    """Return ways to name no user: all of them are their credential itself."""
    return [Disguise(), Disguise({"user": ""}), Disguise({"user_id": "", "safety_identifier": ""})]


def strangers(credentials: VictimKeys) -> list[Disguise]:
    """Return identities that are not those of unnamed requests under the prober's own key."""
    disguises = [Disguise({"user": name}) for name in ("someone-else", "local", "anonymous")]
    keys = [credentials.plain, credentials.personal, credentials.rival]
    return [*disguises, *(Disguise(api_key=key) for key in keys if key is not None)]


def impostors(credentials: VictimKeys) -> list[Disguise]:
    """Return names that are not the victim's, as templates of the victim's, and the victim's own under other keys."""
    fields: list[Mapping[str, str]] = [
        {"user": "{name} "},
        {"user": "{NAME}"},
        {"user": "user/{name}"},
        {"user": "default/{name}"},
        {"user": "{name}\u200b"},
        {"user": "someone-else", "safety_identifier": "{name}"},
        {"user_id": "someone-else", "user": "{name}"},
        {"user": "someone-else", "cache_salt": "{name}"},
        {"session_id": "{name}"},
    ]
    disguises: list[Disguise] = [Disguise(each) for each in fields]
    disguises.append(Disguise({"user": "someone-else"}, {USER_HEADER: "{name}"}))
    disguises.append(Disguise({}, {USER_HEADER: "{name}", TENANT_HEADER: "default"}))
    # Under a key that does not vouch for its users, a name stands for the key's own subject only.
    for key in (credentials.plain, credentials.personal):
        if key is not None:
            disguises += [Disguise({"user": "{name}"}, api_key=key), Disguise({"cache_salt": "{name}"}, api_key=key)]
    for key in (credentials.rival, credentials.rival_app):
        if key is not None:
            disguises.append(Disguise({"user": "{name}"}, api_key=key))
            disguises.append(Disguise({"user": "{name}"}, {TENANT_HEADER: "default"}, key))
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
    return (
        replace(found, verdict=OracleVerdict.LEAKS, note=f"{hits} of {len(seen)} disguises see it") if hits else found
    )


def _cached(sighting: Sighting) -> int:
    return sighting.cached_tokens or 0


def _named(disguise: Disguise, victim: str) -> Disguise:
    def fill(values: Mapping[str, str]) -> dict[str, str]:
        return {key: value.format(name=victim, NAME=victim.upper()) for key, value in values.items()}

    return Disguise(fill(disguise.fields), fill(disguise.headers), disguise.api_key)
