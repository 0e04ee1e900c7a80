"""Runs oracles against one server after another, and says whether what was found is what is claimed."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.attack.findings import Verdict
from deploy.attack.oracles.evidence import probe_boundary, probe_sybils
from deploy.attack.oracles.flood import probe_flood
from deploy.attack.oracles.names import probe_names
from deploy.attack.oracles.pairs import probe_pairs
from deploy.attack.oracles.revocation import probe_revocation
from deploy.attack.oracles.serving_order import probe_duplicates, probe_order
from deploy.attack.oracles.storage import probe_storage
from deploy.attack.prober import Prober
from deploy.attack.scene import Scene
from deploy.attack.texts import Texts
from deploy.bench.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from deploy.attack.findings import Finding
    from deploy.attack.scene import Effort, Server

# The flood comes last, as it leaves the cache full.
ORACLES: dict[str, Callable[[Scene], Awaitable[list[Finding]]]] = {
    "pairs": probe_pairs,
    "order": probe_order,
    "duplicates": probe_duplicates,
    "sybils": probe_sybils,
    "boundary": probe_boundary,
    "revocation": probe_revocation,
    "names": probe_names,
    "storage": probe_storage,
    "flood": probe_flood,
}
# What the shared cache must be seen to leak; whatever does not see that proves nothing about the other modes.
KNOWN_LEAKS = ("cached_tokens", "time to first token", "serving order (PromptPeek)")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found on one server."""

    mode: str
    model: str
    findings: tuple[Finding, ...]

    @property
    def surprises(self) -> list[str]:
        """What is not as claimed; nothing, if the server keeps what its mode promises."""
        if self.mode == "shared":
            blind = [each for each in self.findings if each.oracle in KNOWN_LEAKS and each.verdict is not Verdict.LEAKS]
            return [f"shared is not seen to leak by {each.oracle}: it proves nothing elsewhere" for each in blind]
        bad = (Verdict.LEAKS, Verdict.UNBOUNDED)
        return [f"{self.mode}: {each.oracle}: {each.verdict.value}" for each in self.findings if each.verdict in bad]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to attack: which oracles, how hard, with which chance."""

    oracles: Sequence[str]
    effort: Effort
    text_tokens: int
    seed: int


async def attack(url: str, api_key: str | None, server: Server, plan: Plan, tell: Callable[[str], None]) -> Report:
    """Run the oracles of `plan` against the server at `url`; `tell` is told what runs.

    Raises:
        TargetError: nothing there that could be asked.
        AttackError: a request failed in the middle.
    """
    findings: list[Finding] = []
    async with AsyncExitStack() as stack:
        prober = await _connect(stack, url, api_key, plan.seed)
        texts, chance = Texts(tokens=plan.text_tokens), random.Random(plan.seed)
        scene = Scene(prober, server, plan.effort, texts, chance)
        if server.sibling_url is not None:
            scene.sibling = await _connect(stack, server.sibling_url, api_key, plan.seed)
        for name in plan.oracles:
            tell(f"{server.mode}: {name}")
            findings += await ORACLES[name](scene)
    return Report(server.mode, prober.model, tuple(findings))


async def _connect(stack: AsyncExitStack, url: str, api_key: str | None, seed: int) -> Prober:
    prober = await Prober.connect(url, api_key, seed, SystemClock())
    stack.push_async_callback(prober.close)
    return prober
