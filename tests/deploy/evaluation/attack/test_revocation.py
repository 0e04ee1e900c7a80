"""The judgement about a text that a prober finds for some time: only windows with enough probes say something."""

from __future__ import annotations

import pytest

from deploy.evaluation.attack.findings import OracleVerdict
from deploy.evaluation.attack.oracles.evidence import ALLOWED_EPOCHS, HITS_THAT_TELL, judge_revocation

DENSE, SPARSE = 40, 8


def moments(*parts: tuple[float, int]) -> list[float]:
    """Return moments of probes at a steady pace: for so many epochs, so many in each."""
    times = [0.0]
    for epochs, rate in parts:
        begin = times[-1]
        times += [begin + number / rate for number in range(1, round(epochs * rate) + 1)]
    return times


@pytest.mark.parametrize(
    ("parts", "is_lost", "verdict"),
    [
        pytest.param([(2.5, DENSE)], True, OracleVerdict.BOUNDED, id="lost in time"),
        pytest.param([(2.5, SPARSE)], True, OracleVerdict.BOUNDED, id="lost in time although slow"),
        pytest.param([(ALLOWED_EPOCHS + 1, DENSE)], True, OracleVerdict.UNBOUNDED, id="lost too late"),
        pytest.param([(ALLOWED_EPOCHS + 4, DENSE)], False, OracleVerdict.UNBOUNDED, id="never lost"),
        pytest.param([(8, SPARSE)], False, OracleVerdict.UNDECIDED, id="too slow throughout"),
        pytest.param([(3, SPARSE), (3, DENSE)], True, OracleVerdict.BOUNDED, id="lost in time after a slow beginning"),
        pytest.param([(3, DENSE), (3, SPARSE)], True, OracleVerdict.UNDECIDED, id="lost while slow"),
        # In the mean, there are enough probes.
        pytest.param([(3, DENSE), (1, 1), (3, DENSE), (1, 1)], False, OracleVerdict.UNDECIDED, id="stalls between"),
        pytest.param([(1, SPARSE), (5, DENSE), (2, SPARSE)], True, OracleVerdict.UNBOUNDED, id="found for too long"),
        pytest.param([(8, HITS_THAT_TELL - 1)], False, OracleVerdict.UNDECIDED, id="one probe short"),
        pytest.param([(8, HITS_THAT_TELL + 1)], False, OracleVerdict.UNBOUNDED, id="just enough"),
    ],
)
def test_only_stretches_with_enough_probes_are_judged(
    parts: list[tuple[float, int]], is_lost: bool, verdict: OracleVerdict
) -> None:
    assert judge_revocation(moments(*parts), is_lost=is_lost).verdict is verdict


def test_a_text_that_is_not_found_at_first_was_not_public() -> None:
    assert judge_revocation([0.0, 0.1], is_lost=True).verdict is OracleVerdict.UNDECIDED
