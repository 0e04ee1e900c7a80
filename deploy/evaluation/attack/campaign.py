"""Runs oracles against one server after another, and says whether what was found is what is claimed."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from deploy.evaluation.attack.findings import OracleVerdict
from deploy.evaluation.attack.oracles.adapters import probe_adapters
from deploy.evaluation.attack.oracles.capacity import probe_flood, probe_pushing
from deploy.evaluation.attack.oracles.delay import probe_delay, probe_long_outputs
from deploy.evaluation.attack.oracles.demotion import probe_demotion
from deploy.evaluation.attack.oracles.drafts import probe_drafts
from deploy.evaluation.attack.oracles.evidence import probe_boundary, probe_revocation, probe_sybils
from deploy.evaluation.attack.oracles.grammars import probe_grammar_delay, probe_grammar_times
from deploy.evaluation.attack.oracles.images import probe_images
from deploy.evaluation.attack.oracles.inventions import probe_inventions, probe_keyless, probe_rival_times
from deploy.evaluation.attack.oracles.isolation import probe_isolation
from deploy.evaluation.attack.oracles.names import probe_names
from deploy.evaluation.attack.oracles.pages import probe_pages
from deploy.evaluation.attack.oracles.pairs import probe_pairs
from deploy.evaluation.attack.oracles.serving_order import probe_duplicates, probe_order
from deploy.evaluation.attack.oracles.storage import probe_forgeries, probe_storage
from deploy.evaluation.attack.prober import Prober, ProbeTexts
from deploy.evaluation.attack.scene import Scene
from deploy.evaluation.bench.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from deploy.evaluation.attack.allowance import Allowance
    from deploy.evaluation.attack.findings import Finding
    from deploy.evaluation.attack.scene import Effort, Server

# The floods come last, as they leave the cache full.
ORACLES: dict[str, Callable[[Scene], Awaitable[list[Finding]]]] = {
    "pairs": probe_pairs,
    "order": probe_order,
    "duplicates": probe_duplicates,
    "sybils": probe_sybils,
    "boundary": probe_boundary,
    "revocation": probe_revocation,
    "names": probe_names,
    "inventions": probe_inventions,
    "rival-times": probe_rival_times,
    "keyless": probe_keyless,
    "isolation": probe_isolation,
    "demotion": probe_demotion,
    "pages": probe_pages,
    "adapters": probe_adapters,
    "drafts": probe_drafts,
    "images": probe_images,
    "grammar-times": probe_grammar_times,
    "grammar-delay": probe_grammar_delay,
    "delay": probe_delay,
    "long-outputs": probe_long_outputs,
    "storage": probe_storage,
    "forgeries": probe_forgeries,
    "pushing": probe_pushing,
    "flood": probe_flood,
}
# What the shared cache must be seen to leak; whatever does not see that proves nothing about the other modes.
KNOWN_LEAKS = (
    "cached_tokens",
    "time to first token",
    "serving order (PromptPeek)",
    "in-batch duplicates",
    "Sybil sweep",
    "epoch boundary",
    "absent user id",
    "spoofed user id",
    "rival key: guessing",
    "rival key: tenant's shared text",
    "rival key: publishing",
    "rival key: time to first token",
    "one key: guessing",
    "one key: publishing",
    "keyless: guessing",
    "keyless: publishing",
    "tenant that shares nothing",
    "packets of drafted answers",
    "pictures: cached_tokens",
    "pictures: time to first token",
    "pictures: time of another question",
    "pictures: made-up names",
    "storage reads",
    "made-up names: pushing out",
    "flood",
)


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The findings on one server."""

    mode: str
    model: str
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, parts: Sequence[AttackReport]) -> AttackReport:
        """Return the reports on one mode as one, named after the first of them."""
        return cls(parts[0].mode, parts[0].model, tuple(finding for part in parts for finding in part.findings))

    @property
    def surprises(self) -> list[str]:
        """The findings that contradict the claims of the server's mode."""
        blind = [each for each in self.findings if each.is_control and not each.succeeded]
        lines = [f"{self.mode} is not seen to leak by {each.oracle}: it proves nothing elsewhere" for each in blind]
        attacks = [each for each in self.findings if not each.is_control]
        if self.mode == "shared":
            tried = [each for each in attacks if each.verdict is not OracleVerdict.NOT_APPLICABLE]
            blind = [each for each in tried if each.oracle in KNOWN_LEAKS and not each.succeeded]
            return lines + [
                f"shared is not seen to leak by {found.oracle}: it proves nothing elsewhere" for found in blind
            ]
        return lines + [f"{self.mode}: {found.oracle}: {found.verdict.value}" for found in attacks if found.succeeded]


class Observer(Protocol):
    """Follows a campaign."""

    def progress(self, line: str) -> None:
        """Take a line on what runs now."""

    def found(self, oracle: str, report: AttackReport) -> None:
        """Take all that an oracle has found in a mode."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of an attack: which oracles, how hard, with which chance."""

    oracles: Sequence[str]
    effort: Effort
    text_tokens: int
    seed: int


async def attack(
    url: str,
    api_key: str | None,
    server: Server,
    plan: Plan,
    observer: Observer,
    allowance: Allowance | None = None,
) -> AttackReport:
    """Run the oracles of `plan` against the server at `url`; `observer` gets the findings of each of them at its end.

    `allowance` bounds the requests; None: there is no bound.

    Raises:
        TargetError: nothing there that could be asked.
        AttackError: a request failed in the middle.
    """
    reports: list[AttackReport] = []
    async with AsyncExitStack() as stack:
        prober = await _connect(stack, url, api_key, plan.seed, allowance)
        texts, chance = ProbeTexts(tokens=plan.text_tokens), random.Random(plan.seed)
        scene = Scene(prober, server, plan.effort, texts, chance)
        if server.sibling_url is not None:
            scene.sibling = await _connect(stack, server.sibling_url, api_key, plan.seed, allowance)
        for name in plan.oracles:
            observer.progress(f"{server.mode}: {name}")
            reports.append(AttackReport(server.mode, server.model or prober.model, tuple(await ORACLES[name](scene))))
            observer.found(name, reports[-1])
    return AttackReport.of(reports)


async def _connect(
    stack: AsyncExitStack, url: str, api_key: str | None, seed: int, allowance: Allowance | None
) -> Prober:
    prober = await Prober.connect(url, api_key, seed, SystemClock(), allowance)
    stack.push_async_callback(prober.close)
    return prober
