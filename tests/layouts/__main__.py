"""Compare every layout of ranks and groups with a single rank, over random requests, while services are killed.

Run as `python -m tests.layouts`. Exits with 1 if an answer differs from that of a single rank.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from deploy.evaluation.bench.results import Provenance, current_commit, write_results
from tests.layouts.arrangements import ARRANGEMENTS
from tests.layouts.runs import LayoutRuns, Outcome, results_of

REQUESTS = 10_000


def main() -> int:
    """Run the layouts and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of all layouts together (%(default)s)")
    parser.add_argument("--layouts", default="*", help="a name or a pattern: 'dense, *'; --list shows all")
    parser.add_argument("--seed", type=int, default=0, help="draws the requests (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file of results")
    parser.add_argument("--list", action="store_true", help="list the layouts and exit")
    arguments = parser.parse_args()
    chosen = [name for name in ARRANGEMENTS if fnmatch.fnmatch(name, arguments.layouts)]
    if arguments.list or not chosen:
        _say("\n".join(ARRANGEMENTS))
        return 0 if arguments.list else 2
    # Requests are divided over all layouts, whichever are chosen, so that a part of them can be repeated.
    each = -(-arguments.requests // len(ARRANGEMENTS))
    command = shlex.join(["python", "-m", "tests.layouts", *sys.argv[1:]])
    root = Path(tempfile.mkdtemp(prefix="layouts-"))
    outcomes: list[Outcome] = []
    try:
        runs = LayoutRuns(root, arguments.seed)
        for name in chosen:
            outcomes.append(runs.run(name, each))
            _say("\n".join([str(outcomes[-1]), *outcomes[-1].problems]))
            if arguments.json is not None:
                date = datetime.datetime.now(datetime.UTC).date().isoformat()
                origin = Provenance(command, current_commit(), date)
                write_results(arguments.json, results_of(outcomes[-1:], origin))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    _say(f"{len(outcomes)} layouts: {_summary(outcomes)}")
    return int(any(outcome.problems for outcome in outcomes))


def _summary(outcomes: list[Outcome]) -> str:
    counts = ("requests", "kills", "refusals", "differences", "ties")
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in counts}
    return ", ".join(f"{value} {name}" for name, value in sums.items())


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
