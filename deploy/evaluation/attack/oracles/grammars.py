"""Grammars: does the time of a first compilation show that somebody else has used exactly this schema?

And do the expensive grammars of one subject delay everybody's?
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deploy.evaluation.attack.findings import Finding, Group, OracleVerdict, judge, not_applicable, pooled
from deploy.evaluation.attack.inventions import UNNAMED, Invention, rivals
from deploy.evaluation.attack.prober import AttackError, Disguise
from deploy.evaluation.bench.records import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.attack.scene import Scene

TIMING, TIMING_CONTROL = "grammar timing", "grammar timing of one's own (control)"
DELAY, DELAY_CONTROL = "grammar delay", "grammar delay by the victim's own (control)"
NO_GRAMMARS = "the server follows no grammars"
# Enough that compiling (0.1 s) takes longer than the noise of a request, and so few that an asker's schemas stay within
# its compile budget (`worker.grammars.seconds_per_minute`).
PROPERTIES = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Pairs by which it is seen that a second use of one's own schema is faster.
CONTROL_PAIRS = 40
# Seconds to compile, each of them, in a compiler that tries all of it.
HOSTILE = r"[\u0000-\uffff]{0,%d}"
HOSTILE_GRAMMARS = 4
# By which a victim's small grammar may come later beside hostile ones.
MOST_DELAY_S = 6.0
AHEAD_S = 0.5


async def probe_grammar_times(scene: Scene) -> list[Finding]:
    """Compare schemas that a victim has used with others, as a neighbour in the tenant and as another tenant's key."""
    if not scene.effort.times:
        return []
    if not await _follows_grammars(scene):
        return [not_applicable(TIMING, NO_GRAMMARS)]
    askers = [Disguise({"user": scene.user("attacker")})]
    askers += [Invention(power, UNNAMED).worn("") for power in rivals(scene.server.credentials)]
    groups: list[Group] = []
    own: list[Group] = []
    for number in range(scene.effort.pairs):
        asker = askers[number % len(askers)]
        held, other = _schema(scene), _schema(scene)
        await _time(scene, held, Disguise({"user": scene.user("victim")}))
        schemas = [(held, True), (other, False)]
        scene.chance.shuffle(schemas)
        times = {is_held: await _time(scene, schema, asker) for schema, is_held in schemas}
        groups.append(Group((-times[True],), (-times[False],)))
        if number < CONTROL_PAIRS:
            own.append(Group((-(await _time(scene, other, asker)),), (-times[False],)))
    separation = pooled(groups)
    found = judge(TIMING, separation, f"KS p = {separation.ks:.2g}")
    return [found, replace(judge(TIMING_CONTROL, pooled(own)), is_control=True)]


async def probe_grammar_delay(scene: Scene) -> list[Finding]:
    """Let another tenant's key have expensive grammars compiled, and time a victim's small one."""
    powers = rivals(scene.server.credentials)
    if not powers or not await _follows_grammars(scene):
        return [not_applicable(DELAY, NO_GRAMMARS if powers else "no key of another tenant: --rival-key")]
    alone = await _time(scene, _schema(scene), Disguise({"user": scene.user("victim")}))
    rival = Invention(powers[0], "user")
    beside = [rival.worn(scene.user("made-up")) for _ in range(HOSTILE_GRAMMARS)]
    found = await _delayed(scene, alone, beside, Disguise({"user": scene.user("victim")}))
    victim = Disguise({"user": scene.user("victim")})
    control = await _delayed(scene, alone, [victim] * HOSTILE_GRAMMARS, victim)
    return [found, replace(control, oracle=DELAY_CONTROL, is_control=True)]


async def _delayed(scene: Scene, alone_s: float, hostile: Sequence[Disguise], victim: Disguise) -> Finding:
    """Time a victim's small grammar beside expensive ones; `alone_s` is how long it takes without them."""
    asked = [asyncio.create_task(_ask_hostile(scene, number, each)) for number, each in enumerate(hostile)]
    most_s = alone_s + MOST_DELAY_S
    what = f"instead of {alone_s:.1f} s beside {len(hostile)} expensive grammars"
    try:
        await scene.prober.clock.sleep(AHEAD_S)
        async with asyncio.timeout(most_s):
            beside_s = await _time(scene, _schema(scene), victim)
    except TimeoutError:
        return Finding(DELAY, OracleVerdict.UNBOUNDED, len(hostile), note=f"more than {most_s:.1f} s {what}")
    except AttackError as error:
        return Finding(DELAY, OracleVerdict.UNBOUNDED, len(hostile), note=str(error))
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return Finding(DELAY, OracleVerdict.BOUNDED, len(hostile), note=f"{beside_s:.1f} s {what}")


async def _follows_grammars(scene: Scene) -> bool:
    """Whether the server refuses a schema that is none."""
    with contextlib.suppress(AttackError):
        await _time(scene, {"type": "no such type"}, Disguise({"user": scene.user("victim")}))
        return False
    return True


async def _ask_hostile(scene: Scene, number: int, disguise: Disguise) -> None:
    fields = {**disguise.fields, "guided_regex": HOSTILE % (90_000 + scene.chance.randrange(10_000) + number)}
    with contextlib.suppress(AttackError):
        await scene.prober.ask_as(scene.texts.document(scene.name()), replace(disguise, fields=fields))


async def _time(scene: Scene, schema: dict[str, Any], disguise: Disguise) -> float:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    asked = replace(disguise, fields={**disguise.fields, "response_format": form})
    # A prompt of one page, as its computation is noise here.
    text = (Segment(f"document/{scene.name()}", scene.texts.page_tokens),)
    return (await scene.prober.ask_as(text, asked)).first_token_s


def _schema(scene: Scene) -> dict[str, Any]:
    """Return a schema like no other, of the same size as all others."""
    names = ["".join(scene.chance.choices(LETTERS, k=12)) for _ in range(PROPERTIES)]
    properties = {name: {"type": "string", "pattern": "^[a-z]{3,9}-[0-9]{2,4}$"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
