"""What an oracle was found to tell, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deploy.evaluation.attack.statistics import pairs_for

if TYPE_CHECKING:
    from deploy.evaluation.attack.statistics import Separation

# The targets' bound on private text. Guessing is 0.5.
HIGHEST_CLOSED_AUC = 0.55
# "Closed" is only said where a leak beyond the bound would have been seen: 250 pairs give ± 0.051.
COARSEST_HALF_WIDTH = 0.06


class OracleVerdict(Enum):
    """Whether an oracle tells anything.

    BOUNDED: it tells as much as is claimed that it may, and no more; UNBOUNDED: more than that. UNDECIDED: too few
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
    """Return the finding that a separation amounts to; `either_way`: showing less would tell as much."""
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
