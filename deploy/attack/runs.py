"""What the flags of `pando attack` ask for, server by server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from deploy.attack.campaign import ORACLES, Plan, Report, attack
from deploy.attack.launching import MODES, launched
from deploy.attack.scene import QUICK, UNKNOWN, Effort, Server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

# Few probes decide where observations are exact: what the server says, whom it serves first, who is who.
EXACT_ORACLES = ("pairs", "order", "sybils", "boundary", "revocation", "names")
SWEPT_MODE = "user_aware"
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
        promotion_principals=arguments.promotion_principals,
        epoch_seconds=arguments.epoch_seconds,
        capacity_tokens=arguments.capacity_tokens,
        rival_key=arguments.rival_key,
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
    for mode in arguments.modes or MODES:
        tell(f"{mode}: start")
        with launched(mode, arguments.config, arguments.overrides) as own:
            report = asyncio.run(attack(own.url, own.api_key, own.server, plan, tell))
        if mode == SWEPT_MODE and "sybils" in plan.oracles:
            swept = [found for k in arguments.thresholds for found in _sweep(arguments, k, tell).findings]
            named = [replace(found, oracle=f"{found.oracle}, another k") for found in swept]
            report = replace(report, findings=(*report.findings, *named))
        reports.append(report)
    return reports


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return which oracles are run, and how hard."""
    effort = QUICK if arguments.quick else Effort()
    if arguments.pairs is not None:
        effort = replace(effort, pairs=arguments.pairs)
    oracles = arguments.oracles or (EXACT_ORACLES if arguments.quick else tuple(ORACLES))
    return Plan(oracles, effort, arguments.text_tokens, arguments.seed)


def _sweep(arguments: argparse.Namespace, principals: int, tell: Callable[[str], None]) -> Report:
    plan = replace(plan_of(arguments), oracles=("sybils",))
    overrides = [*arguments.overrides, NO_MODEL]
    with launched(SWEPT_MODE, arguments.config, overrides, principals) as own:
        return asyncio.run(attack(own.url, own.api_key, own.server, plan, tell))
