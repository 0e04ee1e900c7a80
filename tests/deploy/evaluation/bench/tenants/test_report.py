from __future__ import annotations

import pytest

from deploy.evaluation.bench.figures import summarize
from deploy.evaluation.bench.records import LoadResult, RequestRecord
from deploy.evaluation.bench.results import Provenance
from deploy.evaluation.bench.tenants.command import ratio, ratio_table, sheets_of
from deploy.evaluation.bench.tenants.measuring import ModeRounds, PhaseFigures, throughput_curve


def load(seconds: float, first_s: float = 0.1, requests: int = 16) -> LoadResult:
    """Requests one after the other, which together take so long."""
    each = seconds / requests
    records = tuple(
        RequestRecord(i * each, (i + 1) * each, (i * each + first_s,), input_tokens=10, output_tokens=1)
        for i in range(requests)
    )
    return LoadResult(records, seconds)


def rounds(mode: str, *durations: float, first_s: float = 0.1) -> ModeRounds:
    figures = [PhaseFigures(summarize(load(s, first_s)), throughput_curve(load(s))) for s in durations]
    return ModeRounds(mode, {"cold": figures, "warm": figures})


def test_ratios_are_taken_within_rounds() -> None:
    # The second round was slow for both: the ratio does not see it.
    modes = [rounds("isolated", 8.0, 80.0), rounds("user_aware", 2.0, 20.0)]
    spread = ratio(modes, "warm", "request_throughput", "isolated")
    assert spread is not None
    assert [spread.low, spread.median, spread.high] == pytest.approx([4.0, 4.0, 4.0])


def test_an_omitted_mode_has_no_ratio() -> None:
    modes = [rounds("isolated", 8.0), rounds("user_aware", 2.0)]
    assert ratio(modes, "warm", "request_throughput", "shared") is None
    assert ratio_table(modes).row_count == 2


def test_first_tokens_are_compared_in_milliseconds() -> None:
    modes = [rounds("isolated", 8.0, first_s=0.4), rounds("user_aware", 2.0, first_s=0.1)]
    spread = ratio(modes, "warm", "ttft_p50", "isolated")
    assert spread is not None
    assert spread.median == pytest.approx(0.25)


def test_labels_of_results_name_mode_and_phase_or_the_ratio_s_two_modes() -> None:
    modes = [rounds("isolated", 8.0), rounds("user_aware", 2.0)]
    sheets = sheets_of(modes, "tenants-s1", "tiny", Provenance("pando", "abc", "2026-01-01"))
    found = {(result.label, result.metric): result for sheet in sheets for result in sheet.results}
    assert found["isolated, cold", "request_throughput"].value == pytest.approx(2.0)
    assert found["isolated, cold", "ttft_p50"].unit == "ms"
    assert found["user_aware / isolated, warm", "request_throughput"].value == pytest.approx(4.0)
    assert found["user_aware, cold", "curve_001"].value == pytest.approx(8.0)


def test_the_curve_counts_requests_by_their_ends() -> None:
    assert throughput_curve(load(4.0, requests=16)) == pytest.approx((4.0, 4.0))
    assert throughput_curve(load(1.0, requests=7)) == ()
