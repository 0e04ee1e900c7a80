"""`make chaos`: apply faults to a system under load, one after the other, and report what each of them cost.

Lost, wrong and leaked have to be 0 for every fault. Pauses are reported; they decide only with --strict-pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.disks import NoDiskError
from tests.chaos.faults import all_faults
from tests.chaos.load import cases, references
from tests.chaos.report import HEADER, exit_code, row, summary, warnings_in, write_json
from tests.chaos.rounds import run_round
from tests.chaos.system import MissingProgramError, System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.chaos.faults import Fault
    from tests.chaos.load import Case, Exchange
    from tests.chaos.rounds import Outcome

HOUR_S = 3600.0
SHORT_S = 540.0
KEPT_LOGS = Path("build/chaos")


def main() -> int:
    """Run the campaign and return its exit code."""
    arguments = _parse()
    faults = _chosen(arguments)
    if arguments.list:
        _say("\n".join(fault.name for fault in faults))
        return 0
    if not faults:
        sys.stderr.write(f"no fault is called {arguments.faults}; --list shows all\n")
        return 2
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    duration_s = arguments.duration or (SHORT_S if arguments.short else HOUR_S)
    campaign = Campaign(random.Random(seed), simulated=not arguments.model)
    _say(f"seed {seed}\n{HEADER}")
    try:
        outcomes = asyncio.run(campaign.run(faults, duration_s))
    except MissingProgramError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _say(summary(outcomes))
    if len(outcomes) < len(faults):
        _say(f"{len(faults) - len(outcomes)} faults were not reached within {duration_s:g} s")
    if arguments.json is not None:
        write_json(arguments.json, outcomes, seed=seed)
    return exit_code(outcomes, strict_pauses=arguments.strict_pauses)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a choice of faults in at most ten minutes, as in CI")
    parser.add_argument("--faults", default="*", help="names or patterns, separated by commas: one/kill-*,*-refused")
    parser.add_argument("--seed", type=int, help="of ports and flipped bits; by default another one each time")
    parser.add_argument("--duration", type=float, metavar="S", help="begin no fault after this many seconds")
    parser.add_argument("--model", action="store_true", help="the bundled model instead of the simulated engine")
    parser.add_argument("--strict-pauses", action="store_true", help="fail if a pause is longer than its goal")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to this file")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    return parser.parse_args()


def _chosen(arguments: argparse.Namespace) -> list[Fault]:
    patterns = arguments.faults.split(",")
    return [
        fault
        for fault in all_faults()
        if any(fnmatch.fnmatch(fault.name, pattern) for pattern in patterns) and (fault.is_short or not arguments.short)
    ]


class Campaign:
    """Runs faults, each in the system that it needs; a system is replaced after a fault that it has not survived."""

    def __init__(self, randomness: random.Random, *, simulated: bool) -> None:
        self._settings: Mapping[str, Callable[[Path], System]] = {
            "one": lambda directory: System(directory, randomness, simulated=simulated),
            "two": lambda directory: System(directory, randomness, groups=2, simulated=simulated),
            "stages": lambda directory: System(directory, randomness, stages=2, simulated=simulated),
            "roles": lambda directory: System(directory, randomness, groups=2, divided=True, simulated=simulated),
            "tls": lambda directory: System(directory, randomness, simulated=simulated, secure=True),
            "mixed": lambda directory: System(directory, randomness, mixed=True),
            "disk": lambda directory: System(directory, randomness, simulated=simulated, with_disk=True),
        }
        self._simulated = simulated
        self._kept = 0

    async def run(self, faults: Sequence[Fault], duration_s: float) -> list[Outcome]:
        """Apply the faults in their order, as long as there is time."""
        outcomes: list[Outcome] = []
        end_at = time.monotonic() + duration_s
        for setting in self._settings:
            waiting: Sequence[Fault] = [fault for fault in faults if fault.setting == setting]
            while waiting and time.monotonic() < end_at:
                waiting = await self._run_in(setting, waiting, end_at, outcomes)
        return outcomes

    async def _run_in(
        self, setting: str, faults: Sequence[Fault], end_at: float, outcomes: list[Outcome]
    ) -> Sequence[Fault]:
        """Apply faults in one system until it cannot be used any more; return those that are left."""
        directory = Path(tempfile.mkdtemp(prefix="chaos-"))
        try:
            system = self._settings[setting](directory)
        except NoDiskError as error:
            _say(f"{setting}/*: skipped: {error}")
            return ()
        is_clean = True
        try:
            await system.start()
            requests = self._cases(setting, system.layout.model)
            undisturbed = await references(system.url, requests)
            for number, fault in enumerate(faults):
                if time.monotonic() > end_at:
                    return ()
                outcome = await self._run_one(system, fault, requests, undisturbed)
                outcomes.append(outcome)
                is_clean = is_clean and outcome.is_clean
                if not outcome.is_sound:
                    return faults[number + 1 :]
            return ()
        except BaseException:
            is_clean = False
            raise
        finally:
            await system.stop()
            if not is_clean:
                self._keep_log(setting, system.log_path)
            shutil.rmtree(directory, ignore_errors=True)

    def _cases(self, setting: str, model: str) -> list[Case]:
        if setting != "mixed":
            return cases(model, simulated=self._simulated)
        # Imports torch, which the other systems need not wait for.
        from tests.chaos.kinds import mixed_cases

        return mixed_cases()

    async def _run_one(
        self, system: System, fault: Fault, requests: Sequence[Case], undisturbed: Mapping[str, Exchange]
    ) -> Outcome:
        system.reporter.note(f"fault {fault.name}")
        outcome = await run_round(system, fault, requests, undisturbed)
        _say(row(outcome))
        return outcome

    def _keep_log(self, setting: str, log: Path) -> None:
        KEPT_LOGS.mkdir(parents=True, exist_ok=True)
        self._kept += 1
        kept = KEPT_LOGS / f"{setting}-{self._kept}.log"
        shutil.copy(log, kept)
        _say(f"    the services' logs: {kept}")
        with log.open() as lines:
            for warning in warnings_in(lines):
                _say(f"    {warning}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
