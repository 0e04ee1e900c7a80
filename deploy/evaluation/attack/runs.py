"""What the flags of `pando attack` ask for, server by server."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.evaluation.attack.campaign import ORACLES, AttackReport, Plan, attack
from deploy.evaluation.attack.launching import FAIR, KEYLESS, MODES, NO_MODEL, ROOMY, STEP_MS, Launch, launched
from deploy.evaluation.attack.scene import QUICK, UNKNOWN, Effort, Server, VictimKeys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from deploy.evaluation.attack.campaign import Observer

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
# With --quick, these are asked of that server, too: most of their time would be the model's.
QUICK_ROOMY_ORACLES = ("order", "sybils", "boundary", "revocation", "names", *ROOMY_ORACLES)
# What these find does not depend on the mode of the cache.
MODE_INDEPENDENT = ("pages", "grammar-times", "grammar-delay", "delay", "long-outputs", "forgeries")


def planned_oracles(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of the oracles that the flags ask for, by mode."""
    oracles = plan_of(arguments).oracles
    if not arguments.launch:
        return {arguments.modes[0] if arguments.modes else UNKNOWN: list(oracles)}
    planned: dict[str, list[str]] = {}
    for mode in arguments.modes or MODES:
        planned[mode] = [each for each in oracles if mode == SWEPT_MODE or each not in MODE_INDEPENDENT]
        if mode == SWEPT_MODE and "sybils" in oracles:
            planned[mode] += [_sweep_name(k) for k in arguments.thresholds]
    return planned


def attack_running(arguments: argparse.Namespace, observer: Observer) -> list[AttackReport]:
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
        credentials=VictimKeys(
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
    return [asyncio.run(attack(arguments.url, arguments.api_key, server, plan_of(arguments), observer))]


def attack_launched(arguments: argparse.Namespace, observer: Observer) -> list[AttackReport]:
    """Start a server for each mode in turn, and attack it.

    Raises:
        LaunchError: a server does not start.
        TargetError, AttackError: see `attack`.
    """
    return [_attack_mode(arguments, mode, observer) for mode in arguments.modes or MODES]


def _attack_mode(arguments: argparse.Namespace, mode: str, observer: Observer) -> AttackReport:
    plan = plan_of(arguments)
    if mode != SWEPT_MODE:
        plan = replace(plan, oracles=tuple(oracle for oracle in plan.oracles if oracle not in MODE_INDEPENDENT))
    launch = Launch(mode, arguments.config, tuple(arguments.overrides))
    model_free = replace(launch, settings=NO_MODEL)
    roomy = ROOMY_ORACLES if plan.effort.times else QUICK_ROOMY_ORACLES
    special = (*STORAGE, *KEYLESS_ORACLES, *FAIR_ORACLES, *roomy)
    first = tuple(oracle for oracle in plan.oracles if oracle not in special)
    parts: list[AttackReport] = []

    def add(what: str, launch: Launch, oracles: Sequence[str], servers: int = 1) -> None:
        chosen = tuple(oracle for oracle in oracles if oracle in plan.oracles)
        if chosen:
            observer.progress(f"{mode}: start{what}")
            parts.append(_attack_launch(launch, replace(plan, oracles=chosen), servers, observer))

    add("", launch, first)
    add(" without keys", replace(model_free, settings=(*NO_MODEL, *KEYLESS), has_keys=False), KEYLESS_ORACLES)
    slow = replace(model_free, fake_step_ms=STEP_MS)
    add(" without a model", replace(slow, settings=(*NO_MODEL, *ROOMY)), roomy)
    add(" with fair shares", replace(slow, settings=(*NO_MODEL, *FAIR)), FAIR_ORACLES)
    with TemporaryDirectory(prefix="pando-storage-") as folder:
        add(" two over one storage", replace(launch, storage=Path(folder)), STORAGE, servers=2)
    if mode == SWEPT_MODE and "sybils" in plan.oracles:
        parts += [_sweep(model_free, plan, k, observer) for k in arguments.thresholds]
    if not parts:
        raise ValueError(f"none of the chosen oracles depends on the mode, so that {mode} need not be attacked")
    return AttackReport.of(parts)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return which oracles are run, and how hard."""
    effort = QUICK if arguments.quick else Effort()
    if arguments.pairs is not None:
        effort = replace(effort, pairs=arguments.pairs)
    oracles = arguments.oracles or (EXACT_ORACLES if arguments.quick else tuple(ORACLES))
    return Plan(oracles, effort, arguments.text_tokens, arguments.seed)


def _attack_launch(launch: Launch, plan: Plan, servers: int, observer: Observer) -> AttackReport:
    """Attack a server; the second one of two is its sibling over the same storage."""
    with ExitStack() as stack:
        own, *others = [stack.enter_context(launched(launch)) for _ in range(servers)]
        server = replace(own.server, sibling_url=others[0].url) if others else own.server
        return asyncio.run(attack(own.url, own.api_key, server, plan, observer))


@dataclass(frozen=True, slots=True)
class _SweepObserver:
    """Names a sweep by its threshold, as there are several of them."""

    observer: Observer
    name: str

    def progress(self, line: str) -> None:
        self.observer.progress(line)

    def found(self, _oracle: str, report: AttackReport) -> None:
        self.observer.found(self.name, report)


def _sweep(launch: Launch, plan: Plan, promotion_subjects: int, observer: Observer) -> AttackReport:
    observer.progress(f"{launch.mode}: start with k = {promotion_subjects}")
    with_k = replace(launch, promotion_subjects=promotion_subjects)
    named = _SweepObserver(observer, _sweep_name(promotion_subjects))
    return _attack_launch(with_k, replace(plan, oracles=("sybils",)), 1, named)


def _sweep_name(promotion_subjects: int) -> str:
    return f"sybils, k = {promotion_subjects}"
