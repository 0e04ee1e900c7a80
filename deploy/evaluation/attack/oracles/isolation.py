"""A tenant that shares nothing: do its people learn anything of each other, even if k of them ask the same?

Such a tenant meets OWASP AISVS C5.5.5. What all other tenants share by evidence is the control.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.inventions import person
from deploy.evaluation.attack.oracles.pairs import report_cached
from deploy.evaluation.attack.prober import COMPLETIONS

if TYPE_CHECKING:
    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.scene import Scene

ORACLE = "tenant that shares nothing"
CONTROL = "tenant that shares by evidence (control)"
TEXTS = 4


async def probe_isolation(scene: Scene) -> list[Finding]:
    """Let twice k people of a tenant that shares nothing ask the same, then one more of them look."""
    key = scene.server.credentials.isolated
    if key is None:
        return [not_applicable(ORACLE, "no key of a tenant that shares nothing: --isolated-key")]
    found = await _looked(scene, ORACLE, key)
    if not scene.server.promotes:
        return [found]
    return [found, replace(await _looked(scene, CONTROL, None), is_control=True)]


async def _looked(scene: Scene, oracle: str, key: str | None) -> Finding:
    texts = [(scene.texts.document(scene.name()), scene.texts.document(scene.name())) for _ in range(TEXTS)]
    seen: list[Pair] = []
    for held, _ in texts:
        for _ in range(2 * scene.server.promotion_subjects):
            await scene.prober.ask_as(held, person(scene.user("holder"), COMPLETIONS, key))
    await scene.pass_epoch()
    for held, other in texts:
        looker = person(scene.user("looker"), COMPLETIONS, key)
        seen.append((await scene.prober.ask_as(held, looker), await scene.prober.ask_as(other, looker)))
    found = report_cached(oracle, seen, f"{2 * scene.server.promotion_subjects} people asked before")
    hits = any((held.cached_tokens or 0) > (other.cached_tokens or 0) for held, other in seen)
    return replace(found, verdict=OracleVerdict.LEAKS) if hits else found
