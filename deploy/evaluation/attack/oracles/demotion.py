"""Demotion (claim B5): can another tenant's key switch sharing off for a prompt that a tenant shares?

Few subjects who ask the same shared prompt again and again look like probers, and enough of them make it private. So
the control, two made-up people of the tenant's own vouching key, must succeed where text becomes shared by evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.inventions import Invention, Power, rivals
from deploy.evaluation.attack.oracles.inventions import NO_RIVAL

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene
    from deploy.evaluation.bench.records import Segment

ORACLE = "rival key: demotion"
CONTROL = "demotion by the tenant's own people (control)"
# As many as quarantine and demotion take.
NAMES = 2
# Two windows close, and there is one for each end.
PATIENCE_EPOCHS = 8


@dataclass(slots=True)
class Target:
    """A shared prompt, its attackers, and how many of its tokens a new user of the tenant finds."""

    text: tuple[Segment, ...]
    way: Invention
    names: list[str]
    before: int = 0
    after: int = 0


async def probe_demotion(scene: Scene) -> list[Finding]:
    """Let each key of another tenant hammer on a prompt that the victims' tenant shares."""
    if not scene.server.promotes:
        return [not_applicable(ORACLE, "nothing becomes shared by evidence")]
    ways = [Invention(power, "user") for power in rivals(scene.server.credentials)]
    if not ways:
        return [not_applicable(ORACLE, NO_RIVAL)]
    control = Invention(Power("vouching key"), "user")
    targets = [_target(scene, way) for way in (control, *ways)]
    for target in targets:
        for _ in range(scene.server.promotion_subjects):
            await scene.prober.ask(target.text, scene.user("victim"))
    await scene.pass_epoch()
    for target in targets:
        target.before = await _found(scene, target)
    if not all(target.before for target in targets):
        return [
            Finding(ORACLE, OracleVerdict.UNDECIDED, note="the prompts were not shared when they were first attacked")
        ]
    # Users taken for probers lose sight of the prompt first. New users must not look meanwhile: they are evidence
    # that the prompt is in honest use.
    probes = await _hammer(scene, targets)
    await scene.pass_epoch()
    for target in targets:
        target.after = await _found(scene, target)
    return [_judge(ORACLE, targets[1:], probes), replace(_judge(CONTROL, targets[:1], probes), is_control=True)]


async def _hammer(scene: Scene, targets: list[Target]) -> int:
    """Ask all prompts without pause, all at the same rate, until the control's names do not find theirs any more.

    Returns:
        How often each name has asked.
    """
    clock = scene.prober.clock
    give_up = clock.now() + PATIENCE_EPOCHS * scene.server.epoch_seconds
    times = 0
    while clock.now() < give_up:
        probes = [(target.text, target.way.worn(name)) for target in targets for name in target.names]
        seen = await scene.prober.ask_at_once_as(probes)
        times += 1
        if not any(each.cached_tokens for each in seen[: len(targets[0].names)]):
            break
    return times


async def _found(scene: Scene, target: Target) -> int:
    return (await scene.prober.ask(target.text, scene.user("new-user"))).cached_tokens or 0


def _target(scene: Scene, way: Invention) -> Target:
    return Target(scene.texts.document(scene.name()), way, [scene.user("made-up") for _ in range(NAMES)])


def _judge(oracle: str, targets: list[Target], times: int) -> Finding:
    lost = [target for target in targets if target.after < target.before]
    probes = len(targets) * NAMES * times
    if lost:
        note = f"new users find {lost[0].after} tokens instead of {lost[0].before}: {lost[0].way.label}"
        return Finding(oracle, OracleVerdict.UNBOUNDED, probes, note=note)
    return Finding(oracle, OracleVerdict.CLOSED, probes, note=f"new users still find {targets[0].before} tokens")
