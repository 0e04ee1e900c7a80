"""The plan of a deployment on one machine: its processes, their addresses and settings, and the order of their end."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from common.errors import ConfigurationError
from common.file_locks import FileLock
from common.settings import BackendSettings, SchedulerSettings, explain
from common.types import GroupRole
from deploy.supervisor.child import IGNORE_SIGTERM
from deploy.supervisor.models import check_metrics_ports, deploy_models
from deploy.supervisor.state import make_private, run_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from common.settings import Settings, WorkerSettings
    from deploy.supervisor.models import DeployedModel

# A unix socket's path must fit `sockaddr_un.sun_path`: 108 bytes on Linux, 104 on macOS, with the final zero.
MAX_SOCKET_PATH = 103
# Seconds that a service has to end in addition to the time in which open requests may finish.
STOP_MARGIN_S = 3.0
DRIVER = Path("/dev/nvidiactl")
# The ports that Linux gives to connections, and to servers that ask for any.
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# The first of the other ports that are tried, and how many of them are.
_FIRST_PORT, _TRIES = 20_000, 20
# A CPU computes 512 tokens of a small model in the time in which a GPU computes 4,096 of a large one.
ON_GPUS = {"max_rows": 256, "max_step_tokens": 4096}
# GiB of each rank's host tier where groups read pages of others, if nothing else is configured: some long prompts of a
# small model on a CPU, and of one of 8 billion parameters on a GPU (32,768 tokens of 128 KiB).
HOST_GIGABYTES, HOST_GIGABYTES_ON_GPUS = 1.0, 4.0


class Stage(Enum):
    """Services of one stage end together, and only after all services of the next stage have ended."""

    COMPUTE = 0
    CONTROL = 1
    EDGE = 2


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process: its name in logs, the module that it runs, its address, and its settings."""

    name: str
    module: str
    address: str
    stage: Stage
    settings: Settings
    # Services of one group are killed together: a rank that lost a peer may hang in a collective forever.
    group: str
    # Seconds between SIGTERM and SIGKILL.
    stop_s: float = STOP_MARGIN_S
    # The model that it belongs to; None: all.
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """All processes of one deployment, ordered so that the first ones end last."""

    services: tuple[ServiceSpec, ...]
    url: str
    # The model of the example requests.
    model: str
    # The prefix of service names of each model.
    models: Mapping[str, str] = field(default_factory=dict)
    # URL for health checks of the gateway, if it differs from `url`.
    probe_url: str | None = None

    def find(self, name: str) -> ServiceSpec:
        """Return the service called `name`; a single worker is called `worker`.

        Raises:
            KeyError: there is no such service.
        """
        for service in self.services:
            if service.name == name:
                return service
        raise KeyError(f"no service {name!r}; there are {', '.join(service.name for service in self.services)}")


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A scheduler group with workers of its own; `tp`: tensor-parallel ranks of each stage, None: as the model has."""

    role: GroupRole = GroupRole.BOTH
    tp: int | None = None


@dataclass(frozen=True, slots=True)
class Replicas:
    """The numbers of a model's processes that exist several times side by side."""

    tokenizers: int = 1
    detokenizers: int = 1
    groups: tuple[PlannedGroup, ...] = (PlannedGroup(),)
    # Workers of each scheduler group that only encode images.
    encoders: int = 0

    @property
    def total_encoders(self) -> int:
        """Number of encoders of all scheduler groups of a model."""
        return self.encoders * len(self.groups)

    @property
    def roles(self) -> tuple[GroupRole, ...]:
        """The role of each scheduler group."""
        return tuple(group.role for group in self.groups)

    def ranks_of(self, model: DeployedModel) -> tuple[int, ...]:
        """Return the number of a model's ranks in each scheduler group."""
        stages = model.settings.scheduler.pipeline_parallel
        return tuple(model.ranks if group.tp is None else group.tp * stages for group in self.groups)


ONE_OF_EACH = Replicas()


def lay_out(
    settings: Settings, ranks: int, root: Path | None = None, replicas: Replicas = ONE_OF_EACH
) -> tuple[Layout, Path]:
    """Return the processes of a deployment and its run directory, with a currently free port.

    Raises:
        ConfigurationError: the port is in use, or the directory's path is too long for sockets.
    """
    gateway = settings.gateway
    if gateway.port:
        check_port(gateway.host, gateway.port)
    else:
        gateway = gateway.model_copy(update={"port": free_port(gateway.host)})
    directory = (run_root() if root is None else root) / str(gateway.port)
    # Services write JSON; the reporter chooses the format for people.
    log = settings.log.model_copy(update={"format": "json"})
    settings = settings.model_copy(update={"gateway": gateway, "log": log})
    return plan_layout(settings, directory, ranks, replicas), directory


def plan_layout(settings: Settings, run_directory: Path, ranks: int = 1, replicas: Replicas = ONE_OF_EACH) -> Layout:
    """Plan the services of all models, with unix sockets in `run_directory`, and their gateway.

    A single model has `ranks` workers in each stage of each group, and each model `replicas` of its services. All
    settings stay as configured except addresses, roles, ports of metrics, values that depend on the rank, and "auto"
    values that depend on the number of ranks.

    Raises:
        ConfigurationError: the directory's path is too long for sockets, there are fewer than 1 ranks, tokenizers or
            detokenizers, groups cannot work with each other, or models conflict with each other.
    """
    if replicas.encoders < 0:
        raise ConfigurationError(f"a scheduler group cannot have {replicas.encoders} encoders")
    if replicas.tokenizers < 1 or replicas.detokenizers < 1:
        raise ConfigurationError("at least 1 tokenizer and 1 detokenizer are required")
    if ranks < 1:
        raise ConfigurationError(f"tensor parallelism requires at least 1 rank, not {ranks}")
    if any(group.tp is not None and group.tp < 1 for group in replicas.groups):
        raise ConfigurationError("a scheduler group requires at least 1 tensor-parallel rank")
    if all(role is GroupRole.PREFILL for role in replicas.roles):
        raise ConfigurationError("a scheduler group that serves requests is required beside those that only prefill")
    # A prefill group that the load changes leaves prompts to others, too.
    if GroupRole.DECODE in replicas.roles or (
        GroupRole.PREFILL in replicas.roles and settings.scheduler.automatic_role.enabled
    ):
        settings = with_host_tier(settings)
    takes_turns = settings.scheduler.device_turns.enabled
    if takes_turns and len(replicas.roles) > 1:
        raise ConfigurationError("models that share a device have one scheduler group each: leave out --roles")
    deployed = deploy_models(settings, ranks)
    for model in deployed:
        check_data_parallel(model, replicas)
        check_stages(model, replicas)
    check_metrics_ports(settings.gateway, [model.settings for model in deployed])
    at_once = max if takes_turns else sum
    total = at_once(sum(replicas.ranks_of(model)) + replicas.total_encoders for model in deployed)
    placed = [_place(model, run_directory, total, replicas) for model in deployed]
    port = settings.gateway.port or free_port(settings.gateway.host)
    host = _reachable(settings.gateway.host)
    url = f"{'https' if settings.gateway.tls.certificate else 'http'}://{host}:{port}"
    probe_url = _probe_url(settings, host) or url
    gateway = settings.gateway.model_copy(
        update={
            "port": port,
            **_backends(placed),
        }
    )
    edge = settings.model_copy(update={"gateway": gateway, "models": {}})
    services = (
        *(spec for stage in (Stage.COMPUTE, Stage.CONTROL) for each in placed for spec in each.of(stage)),
        ServiceSpec(
            "gateway", "gateway", probe_url, Stage.EDGE, edge, "gateway", settings.gateway.drain_s + STOP_MARGIN_S
        ),
    )
    models = {each.model.name: each.model.prefix for each in placed}
    return Layout(services, url, settings.gateway.default_model or next(iter(models)), models, probe_url)


def check_stages(model: DeployedModel, replicas: Replicas) -> None:
    """Raise ConfigurationError if groups of stages cannot read the pages of those that prefill for them."""
    if GroupRole.PREFILL not in replicas.roles or model.settings.scheduler.pipeline_parallel == 1:
        return
    if len(sizes := set(replicas.ranks_of(model))) > 1:
        ranks = " and ".join(map(str, sorted(sizes)))
        raise ConfigurationError(
            f"groups of pipeline stages can only read pages of groups with as many ranks, not {ranks}: give all roles "
            "the same number of ranks, as in --roles prefill=1x2,decode=1x2, or leave out --pp"
        )


def check_data_parallel(model: DeployedModel, replicas: Replicas) -> None:
    """Raise ConfigurationError if the groups of a model cannot share its experts as its settings say."""
    scheduler = model.settings.scheduler
    size = scheduler.data_parallel.size
    if size == 1:
        return
    if len(replicas.groups) != size:
        raise ConfigurationError(
            f"scheduler.data_parallel.size is {size}, but there are {len(replicas.groups)} scheduler groups: leave out "
            f"--roles, and add --dp {size}"
        )
    if max(replicas.ranks_of(model)) > 1:
        raise ConfigurationError(
            "groups that share experts (--dp, scheduler.data_parallel) have one worker each: leave out --tp and --pp"
        )
    try:
        SchedulerSettings.model_validate(scheduler.model_dump())
    except ValidationError as error:
        raise ConfigurationError(explain(error, "scheduler")) from error


def _probe_url(settings: Settings, host: str) -> str | None:
    """Return the URL at which a gateway that requires client certificates serves health without one."""
    if settings.gateway.tls.client_authority is None:
        return None
    if settings.rpc.probe_port is None:
        raise ConfigurationError("with gateway.tls.client_authority, set rpc.probe_port: it is used for health checks")
    return f"http://{host}:{settings.rpc.probe_port}"


@dataclass(frozen=True, slots=True)
class _Placed:
    """The services of one model."""

    model: DeployedModel
    services: tuple[ServiceSpec, ...]

    def of(self, stage: Stage) -> Iterator[ServiceSpec]:
        return (spec for spec in self.services if spec.stage is stage)

    def addresses_of(self, service: str) -> tuple[str, ...]:
        return tuple(spec.address for spec in self.services if spec.module == f"services.{service}")


@dataclass(frozen=True, slots=True)
class _Group:
    """A scheduler and its ranks, by their names.

    `workers` is the ranks' common name, `first_rank` the number of ranks in the groups before this one. `encoders` are
    workers that only encode images for it.
    """

    number: int
    role: GroupRole
    scheduler: str
    workers: str
    ranks: Sequence[str]
    first_rank: int
    encoders: Sequence[str]

    @property
    def manifest(self) -> str:
        """Name of the file with the adapters that were loaded while the group served."""
        return self.scheduler.replace("scheduler", "adapters") + ".json"


def _place(model: DeployedModel, run_directory: Path, total_ranks: int, replicas: Replicas) -> _Placed:
    count, sizes = len(replicas.groups), replicas.ranks_of(model)
    encoders = [_numbered(name, replicas.encoders) for name in _numbered("encoder", count)]
    groups = [
        _Group(number, group.role, scheduler, worker, _numbered(worker, size), before, own if replicas.encoders else ())
        for number, (group, scheduler, worker, size, before, own) in enumerate(zip(
            replicas.groups, _numbered("scheduler", count), _numbered("worker", count), sizes,
            itertools.accumulate(sizes[:-1], initial=0), encoders, strict=True,
        ))
    ]  # fmt: skip
    encoder_names = [name for group in groups for name in group.encoders]
    tokenizers = _numbered("tokenizer", replicas.tokenizers)
    detokenizers = _numbered("detokenizer", replicas.detokenizers)
    of_groups = (name for group in groups for name in (group.scheduler, *group.ranks))
    names = (*detokenizers, *tokenizers, *of_groups, *encoder_names)
    sockets = {name: _socket(run_directory, model.prefix.replace("/", ".") + name) for name in names}
    settings = suited(model.settings)
    shares_experts = settings.scheduler.data_parallel.size > 1
    meeting_place = f"127.0.0.1:{free_port('127.0.0.1')}"
    rendezvous = {group.scheduler: f"127.0.0.1:{free_port('127.0.0.1')}" for group in groups}
    settings = _with(settings, "scheduler", {"detokenizer": tuple(sockets[name] for name in detokenizers)})
    settings = _with(settings, "tokenizer", {"schedulers": tuple(sockets[group.scheduler] for group in groups)})
    turns = settings.scheduler.device_turns
    if turns.enabled and turns.directory is None:
        turns = turns.model_copy(update={"directory": run_directory / "turns"})
        settings = _with(settings, "scheduler", {"device_turns": turns})

    def spec(
        name: str, module: str, stage: Stage, number: int = 0, drain_s: float = 0.0, of: _Group | None = None
    ) -> ServiceSpec:
        own = _with(settings, module, {"address": sockets[name]})
        if of is not None:
            connected: dict[str, object] = {
                "workers": tuple(sockets[rank] for rank in of.ranks),
                "encoders": tuple(sockets[name] for name in of.encoders) or own.scheduler.encoders,
                "rendezvous": rendezvous[of.scheduler],
                "role": of.role.value,
                "data_parallel": own.scheduler.data_parallel.model_copy(
                    update={"rank": of.number, "rendezvous": meeting_place} if shares_experts else {}
                ),
            }
            adapters = own.scheduler.adapters
            if adapters.slots and adapters.manifest is None:
                manifest = run_directory / f"{model.prefix.replace('/', '.')}{of.manifest}"
                connected["adapters"] = adapters.model_copy(update={"manifest": manifest})
            own = _with(own, "scheduler", connected)
        is_rank = module == "worker"
        its = _with_own_metrics_port(_for_rank(own, number, total_ranks) if is_rank else own, module, number)
        # Only the ranks of a group depend on each other. Those of groups that share experts notice a loss themselves;
        # but on GPUs they may hang in a collective until the lost one has come back.
        workers = "workers" if of is None or (shares_experts and runs_on_gpu(settings.worker)) else of.workers
        group = model.prefix + (workers if is_rank and of else name)
        full = f"services.{module}"
        return ServiceSpec(
            model.prefix + name, full, sockets[name], stage, its, group, drain_s + STOP_MARGIN_S, model.name
        )

    return _Placed(
        model,
        (
            *(
                spec(name, "worker", Stage.COMPUTE, group.first_rank + rank, of=group)
                for group in groups
                for rank, name in enumerate(group.ranks)
            ),
            # After the ranks of all groups, on devices of their own where there are several.
            *(spec(name, "worker", Stage.COMPUTE, sum(sizes) + number) for number, name in enumerate(encoder_names)),
            *(spec(name, "detokenizer", Stage.COMPUTE, number) for number, name in enumerate(detokenizers)),
            *(
                spec(group.scheduler, "scheduler", Stage.CONTROL, number, settings.scheduler.drain_s, group)
                for number, group in enumerate(groups)
            ),
            *(spec(name, "tokenizer", Stage.CONTROL, number) for number, name in enumerate(tokenizers)),
        ),
    )


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)] if count > 1 else [name]


def _with(settings: Settings, section: str, update: Mapping[str, object]) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=dict(update))})


def _with_own_metrics_port(settings: Settings, section: str, number: int) -> Settings:
    port = getattr(settings, section).metrics_port
    return _with(settings, section, {"metrics_port": port + number}) if port else settings


def _backends(placed: Sequence[_Placed]) -> dict[str, object]:
    """Return the gateway's settings with the addresses of the models."""
    if not placed[0].model.prefix:
        return _addresses(placed[0])
    models = {
        each.model.name: BackendSettings.model_validate({**_addresses(each), "aliases": each.model.aliases})
        for each in placed
    }
    return {"models": models}


def _addresses(placed: _Placed) -> dict[str, object]:
    return {
        "tokenizer": placed.addresses_of("tokenizer"),
        "detokenizer": placed.addresses_of("detokenizer"),
        "schedulers": placed.addresses_of("scheduler"),
    }


def _for_rank(settings: Settings, rank: int, ranks: int) -> Settings:
    threads = settings.worker.threads
    if ranks > 1 and threads == 0:
        threads = max(1, available_cores() // ranks)
    return _with(settings, "worker", {"device_index": settings.worker.device_index + rank, "threads": threads})


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _socket(run_directory: Path, name: str) -> str:
    path = str(run_directory / f"{name}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"the run directory's path is too long for unix sockets: {path} has {len(os.fsencode(path))} bytes, "
            f"at most {MAX_SOCKET_PATH} are possible; choose a shorter one with --run-directory"
        )
    return f"unix:{path}"


def _reachable(host: str) -> str:
    """Return a host that a client on this machine can connect to."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    return f"[{'::1' if host == '::' else host}]" if ":" in host else host


def free_port(host: str, count: int = 1) -> int:
    """Return a TCP port that is currently free at `host`: the first of `count` neighbours that are.

    If possible, they are none of those that the system chooses from for others, and no other call on this machine by
    the same user returns them while this process lives: the caller's servers may start later, or stop for a while.

    Raises:
        OSError: not so many neighbours are free.
    """
    firsts = range(_FIRST_PORT, _first_ephemeral_port() - count + 1)
    for _ in range(_TRIES if firsts else 0):
        first = secrets.choice(firsts)
        if _are_free(host, range(first, first + count)) and _reserve(range(first, first + count)):
            return first
    for _ in range(_TRIES):
        with _listen(host, 0) as listener:
            first = int(listener.getsockname()[1])
        if _are_free(host, range(first, first + count)):
            return first
    raise OSError(f"found no {count} free ports at {host} that are neighbours")


def _are_free(host: str, ports: range) -> bool:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(_listen(host, port))
        return True
    return False


def _reserve(ports: range) -> bool:
    """Reserve ports until this process ends; return False if one is reserved. Without a directory, none ever is."""
    locks: list[FileLock] = []
    try:
        # Where no directory can be written to, there is none for temporary files either.
        directory = Path(tempfile.gettempdir()) / f"pando-ports-{os.getuid()}"
        make_private(directory)
        locks += (FileLock(directory / str(port)) for port in ports)
        # They are not released: the kernel does that when the process ends.
        if all(lock.try_acquire() for lock in locks):
            return True
    except (OSError, ConfigurationError):
        return True
    for lock in locks:
        lock.release()
    return False


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_PORT


def check_port(host: str, port: int) -> None:
    """Raise ConfigurationError if a server cannot listen on `host`:`port`."""
    try:
        _listen(host, port).close()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another port with --port "
            "(make serve PORT=…); 0 selects a free one"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do, so that a port whose last connections are in TIME_WAIT counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def command_of(service: ServiceSpec, python: str, config: Path, parent_pid: int) -> Sequence[str]:
    """Return the command line that runs `service` with the settings in `config` and is killed with `parent_pid`."""
    child = ("-m", "deploy.supervisor.child", str(parent_pid), IGNORE_SIGTERM)
    return (python, *child, service.module, "--config", str(config))


def with_host_tier(settings: Settings) -> Settings:
    """Return `settings` with a host tier, where pages of other groups arrive, of a default size if none is configured.

    Raises:
        ConfigurationError: it is turned off.
    """
    tier = settings.scheduler.host_tier
    if tier.pages or (tier.gigabytes and tier.pages is None):
        return settings
    gigabytes = HOST_GIGABYTES_ON_GPUS if runs_on_gpu(settings.worker) else HOST_GIGABYTES
    if tier.model_fields_set & {"gigabytes", "pages"}:
        raise ConfigurationError(
            "groups that leave prompts to others need a host tier, where the pages arrive, and scheduler.host_tier."
            f"{'gigabytes' if tier.pages is None else 'pages'} is 0: leave it out for {gigabytes:g} GiB on each rank, "
            "or set another size"
        )
    return _with(settings, "scheduler", {"host_tier": tier.model_copy(update={"gigabytes": gigabytes})})


def suited(settings: Settings) -> Settings:
    """Return `settings` with more rows and longer steps if workers run on a GPU and these are not set."""
    chosen = settings.scheduler.model_fields_set
    changes = {name: value for name, value in ON_GPUS.items() if name not in chosen}
    if not changes or not runs_on_gpu(settings.worker):
        return settings
    return settings.model_copy(update={"scheduler": settings.scheduler.model_copy(update=changes)})


def runs_on_gpu(worker: WorkerSettings) -> bool:
    """Whether a worker on this host will probably use a GPU, determined without importing torch."""
    if worker.device != "auto":
        return worker.device == "cuda"
    try:
        return DRIVER.exists() and not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
