"""Findings of an oracle: its power to distinguish two worlds, with a confidence interval, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# The targets' bound on private text. Guessing is 0.5.
HIGHEST_CLOSED_AUC = 0.55
# "Closed" is only said where a leak beyond the bound would have been seen: 250 pairs give ± 0.051.
COARSEST_HALF_WIDTH = 0.06

RESAMPLES = 2000
CONFIDENCE = 0.95
_QUANTILE = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


class OracleVerdict(Enum):
    """Whether an oracle reveals anything.

    BOUNDED: it reveals as much as is claimed that it may, and no more; UNBOUNDED: more than that. UNDECIDED: too few
    observations for the noise. NOT_APPLICABLE: the server has no such thing.
    """

    LEAKS = "leaks"
    CLOSED = "closed"
    BOUNDED = "bounded"
    UNBOUNDED = "unbounded"
    UNDECIDED = "undecided"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `probes` counts the attacker's requests that were compared.

    `is_control`: an attack that must succeed, since otherwise the failure of the others proves nothing.
    """

    oracle: str
    verdict: OracleVerdict
    probes: int = 0
    separation: Separation | None = None
    note: str = ""
    is_control: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the attack got more than is claimed that it can."""
        return self.verdict in (OracleVerdict.LEAKS, OracleVerdict.UNBOUNDED)


def judge(oracle: str, separation: Separation, note: str = "", *, either_way: bool = False) -> Finding:
    """Return the finding that a separation amounts to; `either_way`: showing less would reveal as much."""
    shown = separation.folded if either_way else separation
    verdict, doubt = _decide(shown)
    notes = "; ".join(part for part in (note, doubt) if part)
    return Finding(oracle, verdict, separation.held + separation.other, separation, notes)


def not_applicable(oracle: str, why: str) -> Finding:
    """Return the finding that there was nothing to try."""
    return Finding(oracle, OracleVerdict.NOT_APPLICABLE, note=why)


def _decide(shown: Separation) -> tuple[OracleVerdict, str]:
    if shown.auc > HIGHEST_CLOSED_AUC and shown.low > 0.5:
        return OracleVerdict.LEAKS, ""
    if shown.auc <= HIGHEST_CLOSED_AUC and shown.half_width <= COARSEST_HALF_WIDTH:
        return OracleVerdict.CLOSED, ""
    wanted = COARSEST_HALF_WIDTH if shown.auc <= HIGHEST_CLOSED_AUC else shown.auc - 0.5
    pairs = min(shown.held, shown.other)
    needed = max(math.ceil(pairs * (shown.half_width / wanted) ** 2), pairs_for(wanted), pairs + 1)
    return OracleVerdict.UNDECIDED, f"about {needed} pairs would decide, these were {pairs}"


@dataclass(frozen=True, slots=True)
class Group:
    """Observations made under one condition: of texts that a victim holds, and of others. More speaks for "held"."""

    held: tuple[float, ...]
    other: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Separation:
    """The separation of held texts from others by an observable.

    `auc` is the chance that a held text shows more than another one (ties count half; 0.5 is blind guessing), `low` to
    `high` its 95 % bootstrap interval. `blind` is half of the interval that as many random observations would have; 0
    if in every group all observations were equal, so that there was no chance in it. `ks` is the p-value of the
    two-sample Kolmogorov-Smirnov test.
    """

    auc: float
    low: float
    high: float
    held: int
    other: int
    blind: float
    ks: float

    @property
    def half_width(self) -> float:
        """Uncertainty of the AUC: a bootstrap of few groups says too little."""
        return max((self.high - self.low) / 2, self.blind)

    @property
    def folded(self) -> Separation:
        """The same where showing less reveals as much as showing more."""
        if self.auc >= 0.5:
            return self
        return replace(self, auc=1 - self.auc, low=1 - self.high, high=1 - self.low)


def pooled(groups: Sequence[Group], seed: int = 0) -> Separation:
    """Compare all held with all other observations; the bootstrap draws whole groups, as each was paired."""
    held = [np.array(group.held, np.float64) for group in groups]
    other = [np.array(group.other, np.float64) for group in groups]

    def auc_of(chosen: NDArray[np.int64]) -> float:
        return auc(np.concatenate([held[i] for i in chosen]), np.concatenate([other[i] for i in chosen]))

    everything = np.arange(len(groups))
    draws = np.random.default_rng(seed).integers(0, len(groups), (RESAMPLES, len(groups)))
    pairs = sum(map(len, held)), sum(map(len, other))
    return _separation(auc_of(everything), [auc_of(draw) for draw in draws], groups, _blind_variance(*pairs))


def within(groups: Sequence[Group], seed: int = 0) -> Separation:
    """Compare only observations of the same group, such as places in one queue; the bootstrap draws groups."""
    areas = np.array([auc(np.array(group.held, np.float64), np.array(group.other, np.float64)) for group in groups])
    draws = np.random.default_rng(seed).integers(0, len(groups), (RESAMPLES, len(groups)))
    variances = [_blind_variance(len(group.held), len(group.other)) for group in groups]
    resampled = areas[draws].mean(axis=1).tolist()
    return _separation(float(areas.mean()), resampled, groups, sum(variances) / len(groups) ** 2)


def auc(held: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the area under the ROC curve, by ranks (Mann and Whitney, 1947)."""
    ranks = stats.rankdata(np.concatenate([held, other]))
    rank_sum = float(ranks[: len(held)].sum())
    return (rank_sum - len(held) * (len(held) + 1) / 2) / (len(held) * len(other))


def pairs_for(half_width: float) -> int:
    """Return the number of pairs that determine an AUC near 0.5 to within ± `half_width`."""
    # The variance is about 1 / (6 n) for n = m.
    return math.ceil(_QUANTILE**2 / (6 * half_width**2))


def _blind_variance(held: int, other: int) -> float:
    """Return the variance of the AUC of observations that say nothing."""
    return (held + other + 1) / (12 * held * other)


def _separation(area: float, resampled: Sequence[float], groups: Sequence[Group], variance: float) -> Separation:
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    held = [value for group in groups for value in group.held]
    other = [value for group in groups for value in group.other]
    is_exact = all(len({*group.held, *group.other}) == 1 for group in groups)
    blind = 0.0 if is_exact else _QUANTILE * math.sqrt(variance)
    ks = float(stats.ks_2samp(held, other).pvalue)
    return Separation(area, float(low), float(high), len(held), len(other), blind, ks)
