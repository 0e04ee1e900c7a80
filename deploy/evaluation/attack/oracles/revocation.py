"""Revocation (claim B3): text that became public by mistake, and one who has never written it but asks and asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable

if TYPE_CHECKING:
    from deploy.evaluation.attack.scene import Scene

ORACLE = "revocation"
# Two closed windows and an epoch, and the part of a window in which the prober begins.
ALLOWED_EPOCHS = 4
# `PrivacyProfile.hit_min`: who asks less often than that per window cannot be told from a person.
HITS_THAT_TELL = 16
# Beyond it there is no point in waiting.
PATIENCE_EPOCHS = 8


async def probe_revocation(scene: Scene) -> list[Finding]:
    """Publish a text by as many holders as it takes, then probe it without pause until it is not found any more."""
    if not scene.server.promotes:
        return [not_applicable(ORACLE, "nothing becomes public by evidence")]
    text, prober = scene.texts.document(scene.name()), scene.user("prober")
    for _ in range(scene.server.promotion_subjects):
        await scene.prober.ask(text, scene.user("holder"))
    await scene.pass_epoch()
    clock, epoch_s = scene.prober.clock, scene.server.epoch_seconds
    start, probes = clock.now(), 0
    give_up = start + PATIENCE_EPOCHS * epoch_s
    while (cached := (await scene.prober.ask(text, prober)).cached_tokens) and clock.now() < give_up:
        probes += 1
    epochs = (clock.now() - start) / epoch_s
    if not probes:
        return [Finding(ORACLE, OracleVerdict.UNDECIDED, 1, note="the text was not public when it was first probed")]
    if (cached or epochs > ALLOWED_EPOCHS) and probes / epochs < HITS_THAT_TELL:
        return [Finding(ORACLE, OracleVerdict.UNDECIDED, probes, note="too slow: fewer probes per epoch say nothing")]
    if cached:
        return [Finding(ORACLE, OracleVerdict.UNBOUNDED, probes, note=f"still found after {epochs:.1f} epochs")]
    verdict = OracleVerdict.BOUNDED if epochs <= ALLOWED_EPOCHS else OracleVerdict.UNBOUNDED
    return [Finding(ORACLE, verdict, probes, note=f"lost after {epochs:.1f} epochs and {probes} probes")]
