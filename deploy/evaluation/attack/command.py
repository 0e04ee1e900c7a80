"""`pando attack`: the published attacks on shared prefix caches, against a live server over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.evaluation.attack.prober import AttackError
from deploy.evaluation.attack.scene import Effort
from deploy.evaluation.bench.deployments import LaunchError, add_setting_arguments
from deploy.evaluation.bench.report import output_console, print_failure
from deploy.evaluation.bench.results import Provenance
from deploy.evaluation.bench.serve_arguments import positive_float, positive_int
from deploy.evaluation.bench.target import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.evaluation.attack.campaign import AttackReport
    from deploy.evaluation.attack.report import FindingsFile
    from deploy.evaluation.attack.schedule import AttackRun

MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
# As `runs.ORACLES` and `campaign.ORACLES`; those need scipy, and --help must not.
ORACLES = (
    "pairs",
    "order",
    "duplicates",
    "sybils",
    "boundary",
    "revocation",
    "names",
    "inventions",
    "rival-times",
    "keyless",
    "isolation",
    "demotion",
    "pages",
    "adapters",
    "drafts",
    "images",
    "grammar-times",
    "grammar-delay",
    "delay",
    "long-outputs",
    "storage",
    "forgeries",
    "pushing",
    "flood",
)
PROGRAM = "pando attack"
KEY_FLAGS = (
    "--api-key",
    "--plain-key",
    "--personal-key",
    "--rival-key",
    "--rival-vouching-key",
    "--third-key",
    "--isolated-key",
    "--admin-key",
)
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Parse a flag's value such as 30m or 6h; return seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS_S or not number.replace(".", "", 1).isdigit() or not float(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 30m, 6h or 1d")
    return float(number) * UNITS_S[unit]


def variable_of(flag: str) -> str:
    """Return the environment variable with a key, which other users of the machine cannot read as they can a flag."""
    return f"PANDO_ATTACK_{flag.removeprefix('--').replace('-', '_').upper()}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pando attack`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server that runs; --modes names the one that it is in")
    where.add_argument("--launch", action="store_true", help="start a server of its own for each of --modes")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all, with --launch")
    parser.add_argument("--oracles", nargs="+", choices=ORACLES, help="default: all")
    parser.add_argument("--quick", action="store_true", help="few probes: enough where observations are exact")
    parser.add_argument("--pairs", type=positive_int, help=f"pairs of probes (default {Effort().pairs})")
    parser.add_argument("--text-tokens", type=positive_int, default=64, help="length of private texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="of texts and orders")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write each oracle's findings to FILE at its end; those of other oracles in FILE stay",
    )
    repeated = parser.add_argument_group("on a schedule, against a server that others use")
    repeated.add_argument(
        "--every",
        type=duration,
        metavar="TIME",
        help="attack the server at --url again and again, for example every 6h: with --quick, at the lowest priority, "
        "within the budget below; requires --json, where each run writes how it ended",
    )
    repeated.add_argument("--runs", type=positive_int, help="end after so many runs; default: never")
    repeated.add_argument(
        "--max-requests", type=positive_int, default=1000, metavar="N", help="of one run (%(default)s)"
    )
    repeated.add_argument(
        "--max-rate", type=positive_float, default=4.0, metavar="R", help="requests per second (%(default)s)"
    )
    known = parser.add_argument_group("what is known of the server at --url")
    known.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key under which victims and their neighbours are named: it must vouch for its users. No key is "
        f"ever written to results. All keys can be in variables instead, as {variable_of('--api-key')}",
    )
    known.add_argument("--no-keys", action="store_true", help="the server needs no credential")
    known.add_argument("--plain-key", metavar="KEY", help="ordinary key of the same tenant")
    known.add_argument("--personal-key", metavar="KEY", help="key of the same tenant that stands for a person")
    known.add_argument("--rival-key", metavar="KEY", help="ordinary key of another tenant, the only power of a rival")
    known.add_argument("--rival-vouching-key", metavar="KEY", help="key of that tenant that vouches for its users")
    known.add_argument("--third-key", metavar="KEY", help="ordinary key of a third tenant")
    known.add_argument(
        "--isolated-key",
        metavar="KEY",
        help="key of a tenant with sharing none in the limits file; it vouches for its users",
    )
    known.add_argument("--admin-key", metavar="KEY", help="administrator's key: the control of what others cannot read")
    known.add_argument("--sibling-url", metavar="URL", help="another server over the same storage, with the same keys")
    known.add_argument("--storage", type=Path, metavar="FOLDER", help="directory of that storage, to forge pages in")
    known.add_argument("--epoch-seconds", type=positive_float, default=10.0, help="(%(default)s)")
    known.add_argument("--promotion-subjects", type=positive_int, default=3, help="k (%(default)s)")
    known.add_argument("--capacity-tokens", type=positive_int, help="of its KV memory; the floods need it")
    known.add_argument("--policy", help="order of its waiting queue; the delay oracle needs fair")
    known.add_argument("--rows", type=positive_int, default=64, help="requests that run at the same time (%(default)s)")
    for flag in KEY_FLAGS:
        known.set_defaults(**{flag.removeprefix("--").replace("-", "_"): os.environ.get(variable_of(flag))})
    launch = parser.add_argument_group("--launch")
    launch.add_argument(
        "--thresholds",
        type=positive_int,
        nargs="*",
        default=[2, 4],
        metavar="K",
        help="repeat the Sybil sweep of user_aware at these k, on a server without a model (2 4)",
    )
    add_setting_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Attack; return 0 if everything is as claimed, 1 if not, 2 if it could not be found out."""
    if importlib.util.find_spec("scipy") is None:
        print_failure(PROGRAM, ModuleNotFoundError("this needs scipy: make install-dev"))
        return 2
    from deploy.evaluation.attack.report import FindingsFile
    from deploy.evaluation.attack.runs import attack_launched, attack_running, planned_oracles

    console = output_console()
    try:
        if arguments.every is not None:
            return _run_on_schedule(arguments, console)
        file = None
        if arguments.json is not None:
            file = FindingsFile(arguments.json, Provenance.collect(sys.argv[1:]), planned_oracles(arguments))
        observer = _Observer(Console(stderr=True), file)
        reports = attack_launched(arguments, observer) if arguments.launch else attack_running(arguments, observer)
    except (AttackError, TargetError, LaunchError, ValueError) as error:
        print_failure(PROGRAM, error)
        return 2
    except KeyboardInterrupt:
        return 130
    return _show(reports, console)


def _show(reports: Sequence[AttackReport], console: Console) -> int:
    from deploy.evaluation.attack.report import finding_table

    console.print(finding_table(reports))
    surprises = [line for report in reports for line in report.surprises]
    for line in surprises:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    return int(bool(surprises))


def _run_on_schedule(arguments: argparse.Namespace, console: Console) -> int:
    """Attack again and again; return the exit status after --runs."""
    from deploy.evaluation.attack.report import FindingsFile
    from deploy.evaluation.attack.runs import attack_on_schedule, planned_oracles

    if arguments.url is None or arguments.json is None:
        raise ValueError("--every requires --url and --json")
    errors = Console(stderr=True)

    def open_file() -> FindingsFile:
        return FindingsFile(arguments.json, Provenance.collect(sys.argv[1:]), planned_oracles(arguments))

    file = open_file()

    def begin() -> _Observer:
        nonlocal file
        file = open_file()
        return _Observer(errors, file)

    def finish(run: AttackRun) -> None:
        file.finish(run)
        ended = "ended" if run.error is None else f"ended early: {run.error}"
        errors.print(f"the attack {ended} after {run.requests} requests", highlight=False)

    attempts = attack_on_schedule(arguments, begin, finish, file.last_finished_s)
    reports = [each.report for each in attempts if each.report is not None]
    status = _show(reports, console)
    return 2 if len(reports) < len(attempts) else status


@dataclass(frozen=True, slots=True)
class _Observer:
    console: Console
    file: FindingsFile | None

    def progress(self, line: str) -> None:
        self.console.print(line, style="dim", highlight=False)

    def found(self, oracle: str, report: AttackReport) -> None:
        if self.file is not None:
            self.file.add(oracle, report)
