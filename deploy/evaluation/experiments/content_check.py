"""The shipped rules of the content check: the harmless text that they refuse, and how fast they read.

Run as `python -m deploy.evaluation.experiments.content_check DIRECTORY…`, which reads the text files below each
directory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.scheduler.content.interface import DetectorOptions
from services.scheduler.content.patterns import PatternDetector

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SUFFIXES = frozenset({".py", ".md", ".rst", ".txt", ".toml", ".yaml", ".yml", ".json", ".proto"})
WINDOW = 4000
# Long files would count as often as all others together.
MAX_WINDOWS = 10


@dataclass(slots=True)
class Findings:
    """Windows of text, those with a finding, and the rules that found something."""

    windows: int = 0
    refused: int = 0
    characters: int = 0
    seconds: float = 0.0
    rules: Counter[str] = field(default_factory=Counter)


def examine(paths: Iterable[Path], detector: PatternDetector) -> Findings:
    """Look at the windows of each file that is text."""
    findings = Findings()
    started = time.process_time()
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for start in range(0, min(len(text), WINDOW * MAX_WINDOWS), WINDOW):
            found = {finding.rule for finding in detector.find(text[start : start + WINDOW])}
            findings.windows += 1
            findings.refused += bool(found)
            findings.rules.update(found)
            findings.characters += len(text[start : start + WINDOW])
    findings.seconds = time.process_time() - started
    return findings


def main(arguments: Sequence[str]) -> None:
    """Print a line for each directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path)
    detector = PatternDetector(DetectorOptions())
    detector.refresh()
    for directory in parser.parse_args(arguments).directories:
        paths = sorted(path for path in directory.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        found = examine(paths, detector)
        share, speed = found.refused / max(1, found.windows), found.characters / 1e6 / max(1e-9, found.seconds)
        print(  # noqa: T201
            f"{directory}: {found.refused} of {found.windows} windows ({share:.1%}), {speed:.1f} million characters/s, "
            f"{dict(found.rules.most_common())}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
