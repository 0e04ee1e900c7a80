"""The storage tier: is what one user has stored read for another one?

Asked of a second server over the same storage, which has nothing of its own in memory: what it finds, it has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, not_applicable
from deploy.evaluation.attack.oracles.pairs import report_cached

if TYPE_CHECKING:
    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.prober import Prober
    from deploy.evaluation.attack.scene import Scene

ORACLE = "storage reads"
# How long writing may take: so many looks, so far apart.
LOOKS = 16
POLL_S = 1.0


async def probe_storage(scene: Scene) -> list[Finding]:
    """Let victims ask one server, and attackers the other."""
    sibling = scene.sibling
    if sibling is None:
        return [not_applicable(ORACLE, "no second server over the same storage")]
    texts = [(scene.texts.document(scene.name()), scene.user("victim")) for _ in range(scene.effort.stored_texts)]
    for text, victim in texts:
        await scene.prober.ask(text, victim)
    if not await _is_stored(scene, sibling):
        return [not_applicable(ORACLE, "the storage gives nothing back, not even to its owner")]
    seen: list[Pair] = []
    found = 0
    for text, victim in texts:
        attacker, other = scene.user("attacker"), scene.texts.document(scene.name())
        seen.append((await sibling.ask(text, attacker), await sibling.ask(other, attacker)))
        found += bool((await sibling.ask(text, victim)).cached_tokens)
    return [report_cached(ORACLE, seen, f"owners find {found} of {len(texts)} again")]


async def _is_stored(scene: Scene, sibling: Prober) -> bool:
    """Wait until the other server reads for its owner what was stored after all else.

    Whoever is asked once has it in memory, so that each look takes a text of its own.
    """
    owner = scene.user("owner")
    canaries = [scene.texts.document(scene.name()) for _ in range(LOOKS)]
    for canary in canaries:
        await scene.prober.ask(canary, owner)
    for canary in canaries:
        if (await sibling.ask(canary, owner)).cached_tokens:
            return True
        await scene.prober.clock.sleep(POLL_S)
    return False
