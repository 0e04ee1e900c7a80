"""Result files of the repository: a list of flat objects with the last run of each benchmark."""

from __future__ import annotations

import datetime
import shlex
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deploy.evaluation.bench.figures import Spread

SECRET_FLAGS = (
    "--api-key",
    "--plain-key",
    "--personal-key",
    "--rival-key",
    "--rival-vouching-key",
    "--third-key",
    "--isolated-key",
    "--admin-key",
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of figures."""

    command: str
    commit: str
    date: str
    """Day of the run, ISO 8601, UTC."""

    @classmethod
    def collect(cls, argv: Sequence[str], now: datetime.datetime | None = None) -> Provenance:
        """Describe this run of `pando` with `argv`; credentials are hidden."""
        now = now or datetime.datetime.now(datetime.UTC)
        return cls(shlex.join(["pando", *redact(argv)]), current_commit(), now.date().isoformat())


@dataclass(frozen=True, slots=True)
class Result:
    """One figure."""

    benchmark: str
    model: str
    tp: int
    metric: str
    value: float
    unit: str
    command: str
    commit: str
    date: str
    label: str | None = None
    """The measured server if it is not this repository's, or the variant."""
    low: float | None = None
    high: float | None = None
    repeats: int | None = None

    @property
    def key(self) -> tuple[str, str, int, str, str | None]:
        """The identity of the figure: a later run replaces the result with the same key."""
        return (self.benchmark, self.model, self.tp, self.metric, self.label)


class ResultSheet:
    """Collects the results of one run, which share benchmark, model and provenance."""

    def __init__(self, benchmark: str, model: str, tp: int, provenance: Provenance, label: str | None = None) -> None:
        self.results: list[Result] = []
        self._benchmark = benchmark
        self._model = short_model(model)
        self._tp = tp
        self._provenance = provenance
        self._label = label

    def add(self, metric: str, value: float | None, unit: str) -> None:
        """Add a single figure, unless it is None."""
        if value is not None:
            self._append(metric, value, unit, None)

    def add_spread(self, metric: str, spread: Spread, unit: str) -> None:
        """Add the median of repeats with its spread."""
        self._append(metric, spread.median, unit, spread)

    def _append(self, metric: str, value: float, unit: str, spread: Spread | None) -> None:
        self.results.append(
            Result(
                self._benchmark,
                self._model,
                self._tp,
                metric,
                rounded(value),
                unit,
                self._provenance.command,
                self._provenance.commit,
                self._provenance.date,
                self._label,
                rounded(spread.low) if spread else None,
                rounded(spread.high) if spread else None,
                spread.repeats if spread else None,
            )
        )


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write `results` to the list in `path`, replacing entries with the same keys; fields that are None are omitted.

    Raises:
        ValueError: the file exists, but is not a list of results.
    """
    new = list(results)
    keys = {result.key for result in new}
    kept = [entry for entry in read_entries(path) if _key(entry) not in keys]
    entries = kept + [{name: value for name, value in asdict(r).items() if value is not None} for r in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(entries, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_results(path: Path) -> list[Result]:
    """Return the list in `path`; empty if the file does not exist.

    Raises:
        ValueError: the file is not a list of results.
    """
    try:
        return [Result(**entry) for entry in read_entries(path)]
    except TypeError as error:
        raise ValueError(f"{path} is not a list of results") from error


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the list in `path` with all of its fields; empty if the file does not exist.

    Raises:
        ValueError: the file is not a list of results.
    """
    if not path.exists():
        return []
    entries = orjson.loads(path.read_bytes())
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} is not a list of results")
    return entries


def short_model(name: str) -> str:
    """Return `name` without the folders that some servers prepend; owner/name is unchanged."""
    return name.replace("\\", "/").rpartition("/")[2] if name.startswith(("/", "~", ".")) or "\\" in name else name


def rounded(value: float) -> float:
    """Return `value` rounded to four significant digits, which is the precision of the measurements."""
    return float(f"{value:.4g}")


def redact(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the values of secret flags hidden."""
    shown: list[str] = []
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if shown and _is_secret(shown[-1]):
            shown.append("***")
        elif equals and _is_secret(flag):
            shown.append(f"{flag}=***")
        else:
            shown.append(argument)
    return shown


def _is_secret(flag: str) -> bool:
    """Whether a flag, which argparse lets people abbreviate, is followed by a credential."""
    return len(flag) > 2 and any(name.startswith(flag) for name in SECRET_FLAGS)


def current_commit() -> str:
    """Return the short commit of this source tree, with a + if files have changed; "unknown" outside a repository."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("benchmark", "model", "tp", "metric", "label"))
