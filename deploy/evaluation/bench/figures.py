"""Statistics of the records of a load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deploy.evaluation.bench.records import LoadResult

QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of several repeats: the median, the smallest and the largest value."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Distribution of a time in seconds, with linear interpolation between samples."""

    mean: float
    values: dict[int, float]
    """Percent to seconds."""
    count: int

    @classmethod
    def of(cls, samples: Iterable[float]) -> Percentiles | None:
        """Summarise `samples`; None if there are none."""
        array = np.fromiter(samples, dtype=np.float64)
        if not array.size:
            return None
        values = np.percentile(array, QUANTILES)
        return cls(float(array.mean()), dict(zip(QUANTILES, map(float, values), strict=True)), int(array.size))


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of one load. Rates only count successful requests, over the whole duration."""

    requests: int
    failed: int
    errors: dict[str, int]
    """Count by kind."""
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None if the server does not report them."""
    counted_by_chunks: bool
    """Some answers had no usage, so that their chunks were counted as tokens."""
    time_to_first: Percentiles | None
    between_chunks: Percentiles | None
    per_output_token: Percentiles | None
    end_to_end: Percentiles | None
    decode_rate: Percentiles | None
    """Output tokens per second of each stream after its first token."""
    late: Percentiles | None
    """Delay of the load generator itself; if it is not small compared to the other times, the client was measured."""

    @property
    def output_tokens_per_s(self) -> float:
        """Output rate of all streams together."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def input_tokens_per_s(self) -> float:
        """Rate of prompt tokens, cached ones included."""
        return self.input_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Rate of successful requests."""
        return (self.requests - self.failed) / self.duration_s if self.duration_s else 0.0

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that came from the server's cache; None if the server does not report it."""
        if self.cached_tokens is None or not self.input_tokens:
            return None
        return self.cached_tokens / self.input_tokens


def summarize(result: LoadResult) -> LoadFigures:
    """Return the figures of one load."""
    good = [record for record in result.records if record.error is None]
    errors = Counter(record.error for record in result.records if record.error is not None)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    rates = [record.decode_tokens_per_s for record in good]
    return LoadFigures(
        requests=len(result.records),
        failed=errors.total(),
        errors=dict(errors),
        duration_s=result.duration_s,
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        cached_tokens=sum(cached) if cached else None,
        counted_by_chunks=any(record.counted_by_chunks for record in good),
        time_to_first=Percentiles.of(r.time_to_first_s for r in good if r.time_to_first_s is not None),
        between_chunks=Percentiles.of(gap for record in good for gap in record.gaps_s),
        per_output_token=Percentiles.of(1 / rate for rate in rates if rate),
        end_to_end=Percentiles.of(record.duration_s for record in good),
        decode_rate=Percentiles.of(rate for rate in rates if rate),
        late=Percentiles.of(record.late_s for record in result.records),
    )
