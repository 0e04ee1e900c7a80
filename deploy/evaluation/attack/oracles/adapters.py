"""Adapters: can a tenant learn that another's adapter exists, is loaded, or was used?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from deploy.evaluation.attack.findings import Finding, Group, OracleVerdict, judge, not_applicable, pooled
from deploy.evaluation.attack.prober import AttackError, Disguise

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

ORACLE, CONTROL = "adapter names", "adapter names under an entitled key (control)"
TIMES, TIMES_CONTROL = "adapter refusal times", "adapter refusal times under an entitled key (control)"
LISTING = "/v1/lora_adapters"
STAND_IN = "NAME"
OK = 200
# Pairs by which it is seen that the times of an answer and of a refusal differ.
CONTROL_PAIRS = 40
# (status, body) of each way to ask for an adapter, its name replaced.
Answers = list[tuple[int, bytes]]


async def probe_adapters(scene: Scene) -> list[Finding]:
    """Ask for adapters of another tenant and for such as do not exist, while the former are used and are not.

    What the entitled tenant's key gets must differ, as otherwise nothing was there to be found.
    """
    credentials = scene.server.credentials
    if credentials.admin is None or credentials.rival is None:
        return [not_applicable(ORACLE, "needs --admin-key and --rival-key")]
    names = await _adapters(scene, Disguise(api_key=credentials.admin))
    if not names:
        return [not_applicable(ORACLE, "no adapters are loaded")]
    rival, entitled = Disguise(api_key=credentials.rival), Disguise({"user": scene.user("victim")})
    differing, asked = [], 0
    control: list[bool] = []
    for number in range(scene.effort.pairs):
        name = names[number % len(names)]
        is_used = number % 2 == 0
        if is_used:
            await _post(scene, name, entitled)
        absent = _absent(scene, name)
        existing, missing = await _answers(scene, name, rival), await _answers(scene, absent, rival)
        asked += len(existing) + len(missing)
        if existing != missing:
            differing.append(f"{name}{' in use' if is_used else ''}")
        control.append(await _answers(scene, name, entitled) != await _answers(scene, absent, entitled))
    verdict = OracleVerdict.LEAKS if differing else OracleVerdict.CLOSED
    note = f"{len(differing)} of {scene.effort.pairs} differ: {differing[0]}" if differing else "all answers are equal"
    findings = [Finding(ORACLE, verdict, asked, note=note)]
    verdict = OracleVerdict.LEAKS if all(control) else OracleVerdict.CLOSED
    findings.append(Finding(CONTROL, verdict, len(control), is_control=True))
    if scene.effort.times:
        findings += await _times(scene, names, rival, entitled)
    return findings


async def _times(scene: Scene, names: list[str], rival: Disguise, entitled: Disguise) -> list[Finding]:
    """Compare the times of refusals of names that exist and of names that do not.

    Each is asked for as often, since a name that was never asked for before takes longer in any case. The
    entitled tenant's key gets an answer for the former, which must be seen to take another time than a refusal.
    """
    groups, control = [], []
    absent = {name: _absent(scene, name) for name in names}
    for number in range(scene.effort.pairs):
        name = names[number % len(names)]
        await _post(scene, name, entitled)
        groups.append(await _timed(scene, name, absent[name], rival))
        if number < CONTROL_PAIRS:
            control.append(await _timed(scene, name, absent[name], entitled))
    separation = pooled(groups)
    found = judge(TIMES, separation, f"KS p = {separation.ks:.2g}", either_way=True)
    return [found, replace(judge(TIMES_CONTROL, pooled(control), either_way=True), is_control=True)]


async def _timed(scene: Scene, existing: str, absent: str, disguise: Disguise) -> Group:
    """Return the seconds that answers for both names take, which are asked for in random order."""
    asked = [(existing, True), (absent, False)]
    scene.chance.shuffle(asked)
    times: dict[bool, float] = {}
    for name, exists in asked:
        started = scene.prober.clock.now()
        await _post(scene, name, disguise)
        times[exists] = scene.prober.clock.now() - started
    return Group((times[True],), (times[False],))


async def _adapters(scene: Scene, admin: Disguise) -> list[str]:
    status, body = await scene.prober.get(LISTING, admin)
    if status != OK:
        return []
    try:
        return [each["lora_name"] for each in orjson.loads(body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise AttackError(f"{LISTING} answered something that is no list of adapters") from None


def _absent(scene: Scene, name: str) -> str:
    """Return a name of the same length that no adapter has."""
    return "".join(scene.chance.choices("abcdefghijklmnopqrstuvwxyz", k=max(len(name), 8)))


async def _answers(scene: Scene, name: str, disguise: Disguise) -> Answers:
    model = f"{scene.prober.model}:{name}"
    asked = [
        await _post(scene, name, disguise),
        await scene.prober.post("/v1/completions", _body(scene.prober.model, lora_path=name), disguise),
        await scene.prober.get(f"/v1/models/{model}", disguise),
        await scene.prober.get("/v1/models", disguise),
    ]
    return [(status, body.replace(name.encode(), STAND_IN.encode())) for status, body in asked]


async def _post(scene: Scene, name: str, disguise: Disguise) -> tuple[int, bytes]:
    return await scene.prober.post("/v1/completions", _body(f"{scene.prober.model}:{name}"), disguise)


def _body(model: str, **fields: str) -> dict[str, object]:
    return {"model": model, "prompt": "A", "max_tokens": 1, **fields}
