"""Starts the servers that the flags of `pando attack` ask for, one per mode and variant, and attacks each in turn."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from deploy.evaluation.attack.allowance import Allowance, Budget
from deploy.evaluation.attack.campaign import ORACLES, AttackReport, Plan, attack
from deploy.evaluation.attack.scene import QUICK, UNKNOWN, Effort, Server, VictimKeys
from deploy.evaluation.attack.schedule import SCHEDULED_ORACLES, Attempt, attack_repeatedly, attempted
from deploy.evaluation.attack.seeing_model import NAME, save_seeing_model
from deploy.evaluation.bench.clock import SystemClock
from deploy.evaluation.bench.deployments import LaunchedDeployment
from gateway.identity.keys import ApiKey, hash_of, save_keys

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from deploy.evaluation.attack.campaign import Observer
    from deploy.evaluation.attack.schedule import AttackRun

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
    "adapters",
    "drafts",
    "images",
    "delay",
    "long-outputs",
    "pushing",
)
SWEPT_MODE = "user_aware"
# Which oracles a launched server of its own is for, and with which settings. All others ask the first server.
STORAGE = ("storage", "forgeries")
KEYLESS_ORACLES = ("keyless",)
ADAPTER_ORACLES = ("adapters",)
FAIR_ORACLES = ("delay", "long-outputs", "pushing")
DRAFT_ORACLES = ("drafts",)
IMAGE_ORACLES = ("images",)
ROOMY_ORACLES = ("inventions", "isolation", "demotion")
# With --quick, these are asked of that server, too: most of their time would be the model's.
QUICK_ROOMY_ORACLES = ("order", "sybils", "boundary", "revocation", "names", *ROOMY_ORACLES)
# What these find does not depend on the mode of the cache.
MODE_INDEPENDENT = ("pages", "adapters", "grammar-times", "grammar-delay", "delay", "long-outputs", "forgeries")
MODES = ("shared", "isolated", "isolated_pinned", "user_aware")
# Small, so that a flood is soon through: 16,384 tokens of KV.
DEVICE_PAGES = 1024
EPOCH_SECONDS = 2.0
# The order that reveals most: requests with more cached tokens go first.
DEFAULTS = (
    f"scheduler.cache.epoch_seconds={EPOCH_SECONDS}",
    f"scheduler.device_pages={DEVICE_PAGES}",
    "scheduler.queue.policy=lpm",
)
OWN_TENANT, RIVAL_TENANT, THIRD_TENANT, ISOLATED_TENANT = "default", "rival", "third", "isolated"
ADAPTER = "confidential"
LIMITS = f"""
[tenants.{ISOLATED_TENANT}]
sharing = "none"

[tenants.{OWN_TENANT}]
adapters = ["{ADAPTER}"]
"""
KEYS_FILE, LIMITS_FILE = "keys.toml", "limits.toml"
# Few rows, small steps and an engine that takes this long for each, so that a queue forms whose order can be seen.
STEP_MS = 20.0
FAIR_ROWS = 4
FAIR = (
    "scheduler.queue.policy=fair",
    f"scheduler.max_rows={FAIR_ROWS}",
    "scheduler.max_step_tokens=256",
)
# A pass takes long enough for drafts to pay, and each gives packets of its own.
DRAFT_STEP_MS = 5.0
DRAFTS = ("scheduler.speculation.method=ngram", "scheduler.max_steps_per_plan=1")
KEYLESS = ("gateway.anonymous=auto",)
# So that no text of many is evicted before it is looked at, which could hide that it is shared.
ROOMY = (f"scheduler.device_pages={8 * DEVICE_PAGES}",)
# Random weights: what is said about a picture does not matter.
SEEING = ("model.load_format=dummy", "model.dtype=float32", "model.images=on")
# A threshold of evidence, a quota and a share are the same with and without a model.
NO_MODEL = ("model.load_format=fake",)


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
    server, plan = server_of(arguments), plan_of(arguments)
    return [asyncio.run(attack(arguments.url, arguments.api_key, server, plan, observer))]


def attack_on_schedule(
    arguments: argparse.Namespace,
    begin: Callable[[], Observer],
    finish: Callable[[AttackRun], None],
    last_finished_s: float | None,
) -> list[Attempt]:
    """Attack the server at --url every so often, each time with other texts, within the budget of the flags.

    `begin` returns the observer of a run, and `finish` is told how it ended; `last_finished_s` is the end of the last
    complete run of an earlier process.

    Raises:
        ValueError: flags that do not fit each other.
    """
    server, plan = server_of(arguments), plan_of(arguments)

    async def attempt() -> Attempt:
        observer = begin()
        allowance = Allowance(Budget(arguments.max_requests, arguments.max_rate), SystemClock())
        # Texts of earlier runs may still be cached.
        fresh = replace(plan, seed=secrets.randbelow(1 << 31))

        async def run() -> AttackReport:
            return await attack(arguments.url, arguments.api_key, server, fresh, observer, allowance)

        return await attempted(run, lambda: allowance.spent)

    return asyncio.run(attack_repeatedly(attempt, finish, arguments.every, arguments.runs, last_finished_s))


def server_of(arguments: argparse.Namespace) -> Server:
    """Return the description of the server at --url that the flags give.

    Raises:
        ValueError: they name several modes.
    """
    modes = arguments.modes or [UNKNOWN]
    if len(modes) != 1:
        raise ValueError("a server that runs is in one mode: name that one with --modes, or none")
    return Server(
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
    special = (*STORAGE, *KEYLESS_ORACLES, *ADAPTER_ORACLES, *FAIR_ORACLES, *DRAFT_ORACLES, *IMAGE_ORACLES, *roomy)
    first = tuple(oracle for oracle in plan.oracles if oracle not in special)
    parts: list[AttackReport] = []

    def add(what: str, launch: Launch, oracles: Sequence[str], servers: int = 1) -> None:
        chosen = tuple(oracle for oracle in oracles if oracle in plan.oracles)
        if chosen:
            observer.progress(f"{mode}: start{what}")
            parts.append(_attack_launch(launch, replace(plan, oracles=chosen), servers, observer))

    add("", launch, first)
    add(" without keys", replace(model_free, settings=(*NO_MODEL, *KEYLESS), has_keys=False), KEYLESS_ORACLES)
    with TemporaryDirectory(prefix="pando-adapter-") as folder:
        # Without a model, an adapter is a directory with this file.
        Path(folder, "adapter_config.json").write_text("{}", encoding="utf-8")
        adapters = ("scheduler.adapters.slots=1", f"scheduler.adapters.load={json.dumps({ADAPTER: folder})}")
        add(" with an adapter", replace(model_free, settings=(*NO_MODEL, *adapters)), ADAPTER_ORACLES)
    slow = replace(model_free, fake_step_ms=STEP_MS)
    add(" without a model", replace(slow, settings=(*NO_MODEL, *ROOMY)), roomy)
    add(" with fair shares", replace(slow, settings=(*NO_MODEL, *FAIR)), FAIR_ORACLES)
    drafting = replace(model_free, fake_step_ms=DRAFT_STEP_MS, settings=(*NO_MODEL, *ROOMY, *DRAFTS))
    add(" with drafts", drafting, DRAFT_ORACLES)
    with TemporaryDirectory(prefix="pando-seeing-") as folder:
        save_seeing_model(Path(folder))
        seeing = (f"model.reference={folder}", f"model.served_name={NAME}", *SEEING)
        add(" with a model that sees", replace(launch, settings=(*seeing, *ROOMY)), IMAGE_ORACLES)
    with TemporaryDirectory(prefix="pando-storage-") as folder:
        add(" two over one storage", replace(launch, storage=Path(folder)), STORAGE, servers=2)
    if mode == SWEPT_MODE and "sybils" in plan.oracles:
        parts += [_sweep(model_free, plan, k, observer) for k in arguments.thresholds]
    if not parts:
        raise ValueError(f"none of the chosen oracles depends on the mode, so that {mode} need not be attacked")
    return AttackReport.of(parts)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return which oracles are run, and how hard."""
    is_scheduled = arguments.every is not None
    effort = QUICK if arguments.quick or is_scheduled else Effort()
    if arguments.pairs is not None:
        effort = replace(effort, pairs=arguments.pairs)
    unless_named = SCHEDULED_ORACLES if is_scheduled else EXACT_ORACLES if arguments.quick else tuple(ORACLES)
    oracles = arguments.oracles or unless_named
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


def _key() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class LaunchedKeys:
    """The keys of a launched server. `app` vouches for its users, who are the victims and their neighbours."""

    app: str = field(default_factory=_key)
    plain: str = field(default_factory=_key)
    personal: str = field(default_factory=_key)
    rival: str = field(default_factory=_key)
    rival_app: str = field(default_factory=_key)
    third: str = field(default_factory=_key)
    isolated: str = field(default_factory=_key)
    admin: str = field(default_factory=_key)

    def save(self, path: Path) -> None:
        """Write the keys file of the gateway."""
        keys = [
            ApiKey("app", hash_of(self.app), OWN_TENANT, vouches_for_users=True),
            ApiKey("plain", hash_of(self.plain), OWN_TENANT),
            ApiKey("personal", hash_of(self.personal), OWN_TENANT, user="somebody"),
            ApiKey("rival", hash_of(self.rival), RIVAL_TENANT),
            ApiKey("rival-app", hash_of(self.rival_app), RIVAL_TENANT, vouches_for_users=True),
            ApiKey("third", hash_of(self.third), THIRD_TENANT),
            ApiKey("isolated", hash_of(self.isolated), ISOLATED_TENANT, vouches_for_users=True),
            ApiKey("admin", hash_of(self.admin), OWN_TENANT, admin=True),
        ]
        save_keys(path, keys)

    @property
    def credentials(self) -> VictimKeys:
        """The keys as attackers have them."""
        return VictimKeys(self.plain, self.personal, self.rival, self.rival_app, self.third, self.isolated, self.admin)


@dataclass(frozen=True, slots=True)
class Launch:
    """A deployment to start: a mode, the user's own settings, and the settings that an oracle needs.

    `settings` go before the user's; `promotion_subjects` is the threshold of evidence, `storage` the storage's
    directory. The keys are equal for servers that are made from one `Launch`; `has_keys` says whether requests need
    one; `fake_step_ms` is the duration of a pass without a model.
    """

    mode: str
    config: str | None = None
    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    promotion_subjects: int | None = None
    storage: Path | None = None
    has_keys: bool = True
    fake_step_ms: float | None = None
    keys: LaunchedKeys = field(default_factory=LaunchedKeys)
    storage_secret: str = field(default_factory=_key)

    def all_settings(self, folder: Path) -> list[str]:
        """Return the settings that go before all others; keys and limits are files in `folder`."""
        settings = [*self.overrides, *self.settings, f"scheduler.cache.mode={self.mode}"]
        if self.has_keys:
            settings += [f"gateway.keys_file={folder / KEYS_FILE}", f"limits.file={folder / LIMITS_FILE}"]
        if self.promotion_subjects is not None:
            settings.append(f"scheduler.cache.promotion_subjects={self.promotion_subjects}")
        if self.storage is not None:
            settings += [
                f"worker.storage.location={self.storage}",
                f"scheduler.host_tier.pages={DEVICE_PAGES}",
                f"scheduler.storage.keyring={self.storage / 'keyring.db'}",
                f"scheduler.storage.secret={self.storage_secret}",
                "scheduler.storage.prefetch=wait_complete",
                "scheduler.storage.min_tokens=1",
            ]
        return settings


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that runs, and the key under which victims are named; None where there are no keys."""

    url: str
    api_key: str | None
    server: Server


@contextmanager
def launched(launch: Launch) -> Iterator[Launched]:
    """Run a server as long as the block lasts.

    Raises:
        LaunchError: it does not start.
    """
    with TemporaryDirectory(prefix="pando-attack-") as folder:
        launch.keys.save(Path(folder, KEYS_FILE))
        Path(folder, LIMITS_FILE).write_text(LIMITS, encoding="utf-8")
        with LaunchedDeployment(
            launch.config, launch.all_settings(Path(folder)), DEFAULTS, fake_step_ms=launch.fake_step_ms
        ) as deployment:
            settings = deployment.settings.scheduler
            server = Server(
                mode=launch.mode,
                model=deployment.model,
                promotion_subjects=settings.cache.promotion_subjects,
                epoch_seconds=settings.cache.epoch_seconds,
                capacity_tokens=(settings.device_pages or 0) * settings.page_size or None,
                credentials=launch.keys.credentials if launch.has_keys else VictimKeys(),
                storage=launch.storage,
                policy=settings.queue.policy,
                rows=settings.max_rows,
                has_keys=launch.has_keys,
            )
            yield Launched(deployment.url, launch.keys.app if launch.has_keys else None, server)
