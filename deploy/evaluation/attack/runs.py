"""What the flags of `pando attack` ask for, server by server."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.evaluation.attack.campaign import ORACLES, Plan, Report, attack
from deploy.evaluation.attack.launching import FAIR, FAIR_STEP_MS, KEYLESS, MODES, NO_MODEL, ROOMY, Launch, launched
from deploy.evaluation.attack.scene import QUICK, UNKNOWN, Credentials, Effort, Server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from deploy.evaluation.attack.findings import Finding

# Few probes decide where observations are exact: what the server says, whom it serves first, who is who.
EXACT_ORACLES = (
    "pairs",
    "order",
    "sybils",
    "boundary",
    "revocation",
    "names",
    "inventions",
    "keyless",
    "isolation",
    "demotion",
    "pages",
    "delay",
    "long-outputs",
    "pushing",
)
SWEPT_MODE = "user_aware"
# Which oracles a launched server of its own is for, and with which settings. All others ask the first server.
STORAGE = ("storage", "forgeries")
KEYLESS_ORACLES = ("keyless",)
FAIR_ORACLES = ("delay", "long-outputs", "pushing")
ROOMY_ORACLES = ("inventions", "isolation", "demotion")
# What these find does not depend on the mode of the cache.
MODE_INDEPENDENT = ("pages", "grammar-times", "grammar-delay", "delay", "long-outputs", "forgeries")


def attack_running(arguments: argparse.Namespace, progress: Callable[[str], None]) -> list[Report]:
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
        credentials=Credentials(
            arguments.plain_key,
            arguments.personal_key,
            arguments.rival_key,
            arguments.rival_vouching_key,
            arguments.third_key,
            arguments.isolated_key,
            arguments.admin_key,
        ),
        has_keys=not arguments.no_keys,
        policy=arguments.policy,
        rows=arguments.rows,
        sibling_url=arguments.sibling_url,
        storage=arguments.storage,
    )
    return [asyncio.run(attack(arguments.url, arguments.api_key, server, plan_of(arguments), progress))]


def attack_launched(arguments: argparse.Namespace, progress: Callable[[str], None]) -> list[Report]:
    """Start a server for each mode in turn, and attack it.

    Raises:
        LaunchError: a server does not start.
        TargetError, AttackError: see `attack`.
    """
    return [_attack_mode(arguments, mode, progress) for mode in arguments.modes or MODES]


def _attack_mode(arguments: argparse.Namespace, mode: str, progress: Callable[[str], None]) -> Report:
    plan = plan_of(arguments)
    if mode != SWEPT_MODE:
        plan = replace(plan, oracles=tuple(oracle for oracle in plan.oracles if oracle not in MODE_INDEPENDENT))
    launch = Launch(mode, arguments.config, tuple(arguments.overrides))
    model_free = replace(launch, settings=NO_MODEL)
    special = (*STORAGE, *KEYLESS_ORACLES, *FAIR_ORACLES, *ROOMY_ORACLES)
    first = tuple(oracle for oracle in plan.oracles if oracle not in special)
    parts: list[Report] = []

    def add(what: str, launch: Launch, oracles: Sequence[str], servers: int = 1) -> None:
        chosen = tuple(oracle for oracle in oracles if oracle in plan.oracles)
        if chosen:
            progress(f"{mode}: start{what}")
            parts.append(_attack_launch(launch, replace(plan, oracles=chosen), servers, progress))

    add("", launch, first)
    add(" without keys", replace(model_free, settings=(*NO_MODEL, *KEYLESS), has_keys=False), KEYLESS_ORACLES)
    add(" without a model", replace(model_free, settings=(*NO_MODEL, *ROOMY)), ROOMY_ORACLES)
    add(" with fair shares", replace(model_free, settings=(*NO_MODEL, *FAIR), fake_step_ms=FAIR_STEP_MS), FAIR_ORACLES)
    with TemporaryDirectory(prefix="pando-storage-") as folder:
        add(" two over one storage", replace(launch, storage=Path(folder)), STORAGE, servers=2)
    findings = [finding for part in parts for finding in part.findings]
    if mode == SWEPT_MODE and "sybils" in plan.oracles:
        findings += [each for k in arguments.thresholds for each in _sweep(model_free, plan, k, progress)]
    if not parts:
        raise ValueError(f"none of the chosen oracles depends on the mode, so that {mode} need not be attacked")
    return Report(mode, parts[0].model, tuple(findings))


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return which oracles are run, and how hard."""
    effort = QUICK if arguments.quick else Effort()
    if arguments.pairs is not None:
        effort = replace(effort, pairs=arguments.pairs)
    oracles = arguments.oracles or (EXACT_ORACLES if arguments.quick else tuple(ORACLES))
    return Plan(oracles, effort, arguments.text_tokens, arguments.seed)


def _attack_launch(launch: Launch, plan: Plan, servers: int, progress: Callable[[str], None]) -> Report:
    """Attack a server; the second one of two is its sibling over the same storage."""
    with ExitStack() as stack:
        own, *others = [stack.enter_context(launched(launch)) for _ in range(servers)]
        server = replace(own.server, sibling_url=others[0].url) if others else own.server
        return asyncio.run(attack(own.url, own.api_key, server, plan, progress))


def _sweep(launch: Launch, plan: Plan, promotion_subjects: int, progress: Callable[[str], None]) -> list[Finding]:
    progress(f"{launch.mode}: start with k = {promotion_subjects}")
    with_k = replace(launch, promotion_subjects=promotion_subjects)
    report = _attack_launch(with_k, replace(plan, oracles=("sybils",)), 1, progress)
    return [replace(found, oracle=f"{found.oracle}, another k") for found in report.findings]
