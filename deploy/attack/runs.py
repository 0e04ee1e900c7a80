"""What the flags of `pando attack` ask for, server by server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.attack.campaign import ORACLES, Plan, Report, attack
from deploy.attack.launching import MODES, Launch, launched
from deploy.attack.scene import QUICK, UNKNOWN, Effort, Server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from deploy.attack.findings import Finding

# Few probes decide where observations are exact: what the server says, whom it serves first, who is who.
EXACT_ORACLES = ("pairs", "order", "sybils", "boundary", "revocation", "names")
SWEPT_MODE = "user_aware"
STORAGE = "storage"
# A threshold of evidence is the same with and without a model.
NO_MODEL = "model.load_format=fake"


def attack_running(arguments: argparse.Namespace, tell: Callable[[str], None]) -> list[Report]:
    """Attack the server at --url.

    Raises:
        ValueError: flags that do not fit each other.
        TargetError, AttackError: see `attack`.
    """
    modes = arguments.modes or [UNKNOWN]
    if len(modes) != 1:
        raise ValueError("a server that runs is in one mode: name that one with --modes, or none")
    server = Server(
        mode=modes[0],
        promotion_subjects=arguments.promotion_subjects,
        epoch_seconds=arguments.epoch_seconds,
        capacity_tokens=arguments.capacity_tokens,
        rival_key=arguments.rival_key,
        sibling_url=arguments.sibling_url,
    )
    return [asyncio.run(attack(arguments.url, arguments.api_key, server, plan_of(arguments), tell))]


def attack_launched(arguments: argparse.Namespace, tell: Callable[[str], None]) -> list[Report]:
    """Start a server for each mode in turn, and attack it.

    Raises:
        LaunchError: a server does not start.
        TargetError, AttackError: see `attack`.
    """
    reports: list[Report] = []
    plan = plan_of(arguments)
    # Two servers over one storage have nothing to do with the other oracles.
    alone = replace(plan, oracles=tuple(oracle for oracle in plan.oracles if oracle != STORAGE))
    for mode in arguments.modes or MODES:
        tell(f"{mode}: start")
        launch = Launch(mode, arguments.config, tuple(arguments.overrides))
        findings: list[Finding] = []
        with launched(launch) as own:
            report = asyncio.run(attack(own.url, own.api_key, own.server, alone, tell))
        findings += report.findings
        if STORAGE in plan.oracles:
            findings += _attack_storage(launch, plan, tell)
        if mode == SWEPT_MODE and "sybils" in plan.oracles:
            findings += [each for k in arguments.thresholds for each in _sweep(launch, plan, k, tell)]
        reports.append(replace(report, findings=tuple(findings)))
    return reports


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return which oracles are run, and how hard."""
    effort = QUICK if arguments.quick else Effort()
    if arguments.pairs is not None:
        effort = replace(effort, pairs=arguments.pairs)
    oracles = arguments.oracles or (EXACT_ORACLES if arguments.quick else tuple(ORACLES))
    return Plan(oracles, effort, arguments.text_tokens, arguments.seed)


def _attack_storage(launch: Launch, plan: Plan, tell: Callable[[str], None]) -> Sequence[Finding]:
    with TemporaryDirectory(prefix="pando-storage-") as folder:
        over_storage = replace(launch, storage=Path(folder))
        with launched(over_storage) as own, launched(over_storage) as sibling:
            server = replace(own.server, sibling_url=sibling.url)
            only = replace(plan, oracles=(STORAGE,))
            return asyncio.run(attack(own.url, own.api_key, server, only, tell)).findings


def _sweep(launch: Launch, plan: Plan, principals: int, tell: Callable[[str], None]) -> list[Finding]:
    without_model = replace(launch, overrides=(*launch.overrides, NO_MODEL), principals=principals)
    with launched(without_model) as own:
        report = asyncio.run(attack(own.url, own.api_key, own.server, replace(plan, oracles=("sybils",)), tell))
    return [replace(found, oracle=f"{found.oracle}, another k") for found in report.findings]
