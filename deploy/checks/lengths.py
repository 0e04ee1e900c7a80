"""Report source files that have grown beyond what one reads in a sitting; `make lint` runs it.

The aim is 300 lines a file; beyond `LIMIT` the check fails, since by then the file holds a second subject.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("common", "deploy", "gateway", "protos", "services", "tests")
LIMIT = 400


def main() -> int:
    """Print every file that is too long; the exit status tells whether there was one."""
    longer = too_long(ROOT)
    for path, lines in longer:
        sys.stderr.write(f"{path}: {lines} lines, at most {LIMIT} are allowed: split it by subject\n")
    return 1 if longer else 0


def too_long(root: Path, limit: int = LIMIT) -> list[tuple[Path, int]]:
    """Return written (not generated) source files below `root` with more than `limit` lines, longest first."""
    lengths = [
        (path.relative_to(root), len(path.read_text().splitlines()))
        for folder in FOLDERS
        for pattern in ("*.py", "*.proto", "*.cpp", "*.cu", "*.sh")
        for path in (root / folder).rglob(pattern)
        if not path.is_relative_to(root / "protos" / "gen")
    ]
    return sorted((entry for entry in lengths if entry[1] > limit), key=lambda entry: -entry[1])


if __name__ == "__main__":
    sys.exit(main())
