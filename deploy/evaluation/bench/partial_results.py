"""Results of experiments that have a time limit: shown and written as they come, so that none is lost at its end."""

from __future__ import annotations

import shlex
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.evaluation.bench.figures import Spread
from deploy.evaluation.bench.results import Provenance, ResultSheet, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time by which all has to end."""

    at_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the time in so many seconds."""
        return cls(clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 afterwards."""
        return max(self.at_s - self.clock(), 0.0)


class PartialResults:
    """The measurements so far, printed and written to a file, if one is given, at each addition."""

    def __init__(self, benchmark: str, model: str, path: Path | None, *, tp: int = 1, label: str | None = None) -> None:
        """Start empty, for a results file at `path`; `label` names the variant."""
        self._benchmark = benchmark
        self._model = model
        self._path = path
        self._tp = tp
        self._label = label
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, metric: str, unit: str, values: Sequence[float]) -> None:
        """Add values of a metric."""
        self._values[metric, unit] += values
        spread = Spread.of(self._values[metric, unit])
        digits = 1 if spread.median >= 100 else 2
        low, high = f"{spread.low:.{digits}f}", f"{spread.high:.{digits}f}"
        sys.stdout.write(f"{metric:45} {spread.median:10.{digits}f} {unit}  ({low} to {high}, {spread.repeats})\n")
        sys.stdout.flush()
        if self._path is not None:
            # Experiments run as modules: `python -m deploy.evaluation.experiments.NAME`.
            command = shlex.join(["python", *sys.orig_argv[1:]])
            provenance = replace(Provenance.collect(()), command=command)
            sheet = ResultSheet(self._benchmark, self._model, self._tp, provenance, self._label)
            for (known, its_unit), its_values in self._values.items():
                sheet.add_spread(known, Spread.of(its_values), its_unit)
            write_results(self._path, sheet.results)


def within_time(items: Iterable[T], deadline: Deadline, reserve_s: float) -> Iterator[T]:
    """Yield items as long as what takes as long as the same item before, or as the slowest one, ends in time.

    `reserve_s` is left for what follows. The first item is always yielded.
    """
    took: dict[T, float] = {}
    for item in items:
        expected_s = took.get(item, max(took.values(), default=0.0))
        if took and expected_s + reserve_s > deadline.left_s:
            report(f"no time is left: not measured again: {item}")
            return
        began_at = deadline.clock()
        yield item
        took[item] = deadline.clock() - began_at


def report(line: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
