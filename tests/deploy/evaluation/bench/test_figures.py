from __future__ import annotations

import pytest

from deploy.evaluation.bench.figures import Percentiles, Spread, summarize
from deploy.evaluation.bench.records import LoadResult, RequestRecord


def record(start: float, chunks: tuple[float, ...], end: float, output: int, **more: object) -> RequestRecord:
    fields: dict[str, object] = {"input_tokens": 100, "output_tokens": output, **more}
    return RequestRecord(start, end, chunks, **fields)  # type: ignore[arg-type]  # fields of the record


def test_percentiles_are_interpolated() -> None:
    percentiles = Percentiles.of(float(value) for value in range(1, 101))
    assert percentiles is not None
    assert percentiles.values == {50: pytest.approx(50.5), 90: pytest.approx(90.1), 99: pytest.approx(99.01)}
    assert percentiles.mean == pytest.approx(50.5)
    assert percentiles.count == 100


def test_one_sample_is_every_percentile() -> None:
    percentiles = Percentiles.of([3.0])
    assert percentiles is not None
    assert set(percentiles.values.values()) == {3.0}


def test_no_samples_have_no_percentiles() -> None:
    assert Percentiles.of([]) is None


def test_spread_is_median_and_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_figures_of_a_load() -> None:
    records = (
        record(0.0, (1.0, 1.5, 2.0), 2.0, 3, cached_tokens=60),
        record(1.0, (4.0, 5.0), 5.0, 5, cached_tokens=0),
        record(1.0, (), 2.0, 0, error="http_429"),
        record(1.0, (1.5,), 2.0, 9, error="timeout"),
    )
    figures = summarize(LoadResult(records, 5.0))
    assert (figures.requests, figures.failed) == (4, 2)
    assert figures.errors == {"http_429": 1, "timeout": 1}
    assert figures.output_tokens_per_s == pytest.approx(8 / 5)
    assert figures.input_tokens_per_s == pytest.approx(200 / 5)
    assert figures.requests_per_s == pytest.approx(2 / 5)
    assert figures.cached_share == pytest.approx(0.3)
    assert figures.time_to_first is not None
    assert figures.time_to_first.mean == pytest.approx(2.0)
    assert figures.between_chunks is not None
    assert figures.between_chunks.mean == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    # 2 tokens in 1 s after the first, and 4 in 1 s: by usage, though the second came in two chunks.
    assert figures.decode_rate is not None
    assert figures.decode_rate.mean == pytest.approx(3.0)
    assert figures.per_output_token is not None
    assert figures.per_output_token.mean == pytest.approx((1 / 2 + 1 / 4) / 2)


def test_a_server_that_hides_its_cache_has_no_share() -> None:
    assert summarize(LoadResult((record(0.0, (1.0,), 1.0, 1),), 1.0)).cached_share is None


def test_an_empty_load_gives_zero_figures() -> None:
    figures = summarize(LoadResult((), 0.0))
    assert (figures.output_tokens_per_s, figures.requests_per_s, figures.cached_share) == (0.0, 0.0, None)


def test_output_that_came_at_once_has_no_rate() -> None:
    assert record(0.0, (1.0,), 1.0, 1).decode_tokens_per_s is None
    assert record(0.0, (1.0, 1.0), 1.0, 2).decode_tokens_per_s is None
