"""The threshold of evidence: invented users, probes around the moment of publication (B2), revocation (B3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.evaluation.attack.findings import Finding, OracleVerdict, not_applicable
from deploy.evaluation.attack.oracles.pairs import report_cached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.attack.oracles.pairs import Pair
    from deploy.evaluation.attack.scene import Scene
    from deploy.evaluation.bench.records import Segment

SYBIL = "Sybil sweep"
BOUNDARY = "epoch boundary"
REVOCATION = "revocation"
# Two closed windows and an epoch, and the part of a window in which the prober begins.
ALLOWED_EPOCHS = 4
# `PrivacyProfile.hit_min`: a prober that asks less often than that per window looks like a person.
HITS_THAT_TELL = 16
# Beyond it there is no point in waiting.
PATIENCE_EPOCHS = 8


@dataclass(frozen=True, slots=True)
class SybilSweep:
    """Colluders that it took to see that a text was held: by number of holders, None if it was never seen.

    `colluders` were tried at most; `first_hits[0]` is the control, a text without holders.
    """

    threshold: int
    colluders: int
    first_hits: tuple[int | None, ...]

    def leaks(self, colluders: int, holders: int) -> bool:
        """Whether so many colluders could distinguish so many holders from none."""
        seen, control = self.first_hits[holders], self.first_hits[0]
        return seen is not None and seen <= colluders and seen != control

    @property
    def cases(self) -> list[tuple[int, int]]:
        """All (colluders, holders) that were tried."""
        holders = range(1, len(self.first_hits))
        return [(a, n) for a in range(1, self.colluders + 1) for n in holders]

    @property
    def leaking(self) -> list[tuple[int, int]]:
        """The cases in which colluders could distinguish."""
        return [case for case in self.cases if self.leaks(*case)]

    @property
    def expected(self) -> list[tuple[int, int]]:
        """The cases in which B2 does not promise that they cannot: n + a > k."""
        return [(a, n) for a, n in self.cases if n + a > self.threshold]


async def probe_sybils(scene: Scene) -> list[Finding]:
    """Let colluders ask one after the other, an epoch apart: the first hit shows how many others held the text."""
    sweep = await sweep_sybils(scene)
    return [not_applicable(SYBIL, "the server does not report cached_tokens") if sweep is None else judge_sweep(sweep)]


async def sweep_sybils(scene: Scene) -> SybilSweep | None:
    """Return the sweep over (a, n) at the server's k; None if it does not report cached tokens."""
    threshold = scene.server.promotion_subjects
    texts = [scene.texts.document(scene.name()) for _ in range(threshold + 1)]
    for holders, text in enumerate(texts):
        for _ in range(holders):
            await scene.prober.ask(text, scene.user("holder"))
    first: list[int | None] = [None] * len(texts)
    for colluder in range(1, threshold + 2):
        await scene.pass_epoch()
        for holders, text in enumerate(texts):
            cached = (await scene.prober.ask(text, scene.user("colluder"))).cached_tokens
            if cached is None:
                return None
            if cached and first[holders] is None:
                first[holders] = colluder
    return SybilSweep(threshold, threshold + 1, tuple(first))


def judge_sweep(sweep: SybilSweep) -> Finding:
    """Compare a sweep with the bound."""
    probes = sweep.colluders * len(sweep.first_hits)
    if not sweep.leaking:
        return Finding(SYBIL, OracleVerdict.CLOSED, probes, note=f"no (a, n) leaks up to {sweep.cases[-1]}")
    beyond = [case for case in sweep.leaking if case not in sweep.expected]
    if beyond:
        return Finding(SYBIL, OracleVerdict.LEAKS, probes, note=f"k = {sweep.threshold}: leaks at (a, n) = {beyond[0]}")
    if sweep.leaking == sweep.expected:
        return Finding(SYBIL, OracleVerdict.BOUNDED, probes, note=f"leaks exactly where n + a > k = {sweep.threshold}")
    return Finding(SYBIL, OracleVerdict.BOUNDED, probes, note=f"leaks only where n + a > k = {sweep.threshold}")


async def probe_boundary(scene: Scene) -> list[Finding]:
    """Probe texts that are one principal short of the threshold, spread over two epochs and what happens between."""
    holders = max(scene.server.promotion_subjects - 1, 1)
    pairs = [
        (scene.texts.document(scene.name()), scene.texts.document(scene.name()))
        for _ in range(scene.effort.boundary_texts)
    ]
    gap_s = 2 * scene.server.epoch_seconds / len(pairs)
    seen: list[Pair] = []
    for held, _ in pairs:
        for _ in range(holders):
            await scene.prober.ask(held, scene.user("holder"))
    for held, other in pairs:
        seen.append(await _look(scene, held, other))
        await scene.prober.clock.sleep(gap_s)
    return [report_cached(BOUNDARY, seen, f"{holders} holders, 1 prober, k = {scene.server.promotion_subjects}")]


async def _look(scene: Scene, held: tuple[Segment, ...], other: tuple[Segment, ...]) -> Pair:
    prober = scene.user("prober")
    return await scene.prober.ask(held, prober), await scene.prober.ask(other, prober)


async def probe_revocation(scene: Scene) -> list[Finding]:
    """Publish a text by as many holders as it takes, then probe it without pause until it is not found any more."""
    if not scene.server.promotes:
        return [not_applicable(REVOCATION, "nothing becomes public by evidence")]
    text, prober = scene.texts.document(scene.name()), scene.user("prober")
    for _ in range(scene.server.promotion_subjects):
        await scene.prober.ask(text, scene.user("holder"))
    await scene.pass_epoch()
    clock, epoch_s = scene.prober.clock, scene.server.epoch_seconds
    start, hits = clock.now(), [clock.now()]
    give_up = start + PATIENCE_EPOCHS * epoch_s
    while (cached := (await scene.prober.ask(text, prober)).cached_tokens) and clock.now() < give_up:
        hits.append(clock.now())
    moments = [(moment - start) / epoch_s for moment in (*hits, clock.now())]
    return [judge_revocation(moments, is_lost=not cached)]


def judge_revocation(moments: Sequence[float], *, is_lost: bool) -> Finding:
    """Judge the time for which a prober finds a text, in epochs.

    The server counts hits per window of an epoch, which may begin at any time; a prober that a busy machine slows down
    below `HITS_THAT_TELL` looks like a person meanwhile. So only stretches of time count in which any window has as
    many hits.

    Args:
        moments: The beginning, each hit, and the end, in epochs.
        is_lost: The text was not found any more at the end.
    """
    probes, epochs = len(moments) - 2, moments[-1] - moments[0]
    if not probes:
        return Finding(REVOCATION, OracleVerdict.UNDECIDED, 1, note="the text was not public when it was first probed")
    if is_lost and epochs <= ALLOWED_EPOCHS:
        note = f"lost after {epochs:.1f} epochs and {probes} probes"
        return Finding(REVOCATION, OracleVerdict.BOUNDED, probes, note=note)
    longest, last = _telling_stretches(moments)
    if longest > ALLOWED_EPOCHS:
        found = "lost only" if is_lost and last == longest else "still found"
        note = f"{found} after {longest:.1f} epochs with enough probes"
        return Finding(REVOCATION, OracleVerdict.UNBOUNDED, probes, note=note)
    if is_lost and last:
        note = f"lost after {last:.1f} epochs with enough probes, and {probes} probes"
        return Finding(REVOCATION, OracleVerdict.BOUNDED, probes, note=note)
    return Finding(REVOCATION, OracleVerdict.UNDECIDED, probes, note="too slow: fewer probes per epoch say nothing")


def _telling_stretches(moments: Sequence[float]) -> tuple[float, float]:
    """Return the longest stretch of time in which any window has enough hits, and the one that lasts to the end."""
    longest = last = 0.0
    since: float | None = None
    for first, end in zip(moments, moments[HITS_THAT_TELL:], strict=False):
        if end - first > 1.0:
            since, last = None, 0.0
            continue
        since = first if since is None else since
        last = end - since
        longest = max(longest, last)
    return longest, last
