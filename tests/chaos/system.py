"""The system under test: all services under the supervisor, a proxy on each of their links, and a Redis server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc
import httpx
import psutil
from pydantic import SecretStr

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import (
    CacheSettings,
    GatewaySettings,
    LimitsSettings,
    ModelSettings,
    RpcSettings,
    SchedulerSettings,
    Settings,
    TokenizerSettings,
    WorkerSettings,
)
from common.settings.gateway import ResponsesSettings, StateSettings
from common.settings.scheduler import AdapterSettings, HostTierSettings, StorageSettings
from common.settings.tokenizer import ImageDecodingSettings
from common.settings.worker import WorkerStorageSettings
from common.types import GroupRole
from deploy.supervisor.layout import ONE_OF_EACH, Layout, PlannedGroup, Replicas, lay_out
from deploy.supervisor.process import Probes
from deploy.supervisor.supervisor import Supervisor
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.worker.engine.execution.fake_model import STEP_VARIABLE
from tests.chaos.disks import Disk
from tests.chaos.links import HOST, Link, PortRange
from tests.fakes.certificates import Authority, Identity
from tests.fakes.redis_process import BINARIES, RedisProcess

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from deploy.supervisor.layout import ServiceSpec
    from tests.chaos.kinds import TinyModel

T = TypeVar("T")

STEP_MS = 20
SECRET = "a secret of the fault campaign's gateways"
START_TIMEOUT_S = 300.0
RPC_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
GROUPS = (PlannedGroup(GroupRole.PREFILL), PlannedGroup(GroupRole.DECODE))
# Shorter prompts are computed where they are answered.
PREFILL_TOKENS = 64
TINY_PAGES = 1024
# Gauges that are 0 while nothing is open.
OPEN_GAUGES = {
    "gateway": "pando_gateway_open_requests",
    "tokenizer": "pando_tokenizer_pending_requests",
    "detokenizer": "pando_detokenizer_open_choices",
}


class MissingProgramError(Exception):
    """The campaign needs a program that is not installed."""


class FileReporter:
    """Writes all services' lines to a file, and keeps the times at which services came up."""

    def __init__(self, path: Path) -> None:
        self.came_up: dict[str, list[float]] = {}
        self._file = path.open("a", buffering=1)

    def line(self, service: str, text: str) -> None:
        """Write a service's line."""
        self._file.write(f"{service}: {text}\n")

    def note(self, text: str) -> None:
        """Write a remark of the supervisor's."""
        self.line("pando", text)

    def alive(self, service: str) -> None:
        """Keep the time."""
        self.came_up.setdefault(service, []).append(time.monotonic())

    def ready(self, layout: Layout) -> None:
        """Write where the deployment serves."""
        self.note(f"serving {layout.model} at {layout.url}")

    def close(self) -> None:
        self._file.close()


class System:
    """One or two scheduler groups behind one gateway, tokenizer and detokenizer.

    Services are called `gateway`, `tokenizer`, `detokenizer`, and `scheduler` and `worker` or, with two groups,
    `scheduler-0` to `worker-1`. Links have the names of both ends: `gateway-tokenizer`, or with two groups
    `tokenizer-scheduler-0`. With two stages, one group has `worker-0` and `worker-1`. If one group computes prompts for
    the other one, there are `scheduler-1-scheduler-0` and `worker-1-worker-0`, too.
    """

    def __init__(
        self,
        directory: Path,
        randomness: random.Random,
        *,
        groups: int = 1,
        divided: bool = False,
        stages: int = 1,
        simulated: bool = True,
        secure: bool = False,
        with_disk: bool = False,
        mixed: bool = False,
    ) -> None:
        """Plan the system, with sockets and logs in `directory`, whose path must be short.

        `divided`: of two groups, the first one only computes prompts, which the other one reads. `stages`: the ranks of
        a group, each with a part of the layers. `simulated`: its engine makes tokens up; if it is divided or has
        stages, its model is a tiny one, as the simulated engine reads no pages and waits for no other rank. `secure`:
        its links use mutual TLS. `mixed`: its model is a tiny one that reads images and has an adapter. `with_disk`: it
        has a storage tier and keeps responses in a file, on a small disk, instead of in a Redis server.

        Raises:
            MissingProgramError: there is no Redis server.
            NoDiskError: disks cannot be mounted here.
        """
        if not any(shutil.which(name) for name in BINARIES):
            raise MissingProgramError(f"the campaign needs one of {', '.join(BINARIES)}: apt-get install redis-server")
        self.groups = groups
        self.divided = divided
        self._stages = stages
        self._tiny: TinyModel | None = None
        if mixed or (simulated and (divided or stages > 1)):
            self._tiny = _save_tiny_model(directory, reads_images=mixed)
        self.simulated = simulated and self._tiny is None
        self.log_path = directory / "services.log"
        self.redis = RedisProcess(directory)
        self.links: dict[str, Link] = {}
        self._directory = directory
        self._random = randomness
        self._ports = PortRange(randomness)
        self._authority = Authority(directory / "certificates") if secure else None
        self._operator = self._authority.issue("operator", roles=["operator"]) if self._authority else None
        self._addresses: dict[str, str] = {}
        self._metrics_ports: dict[str, int] = {}
        self._disk = Disk(directory / "disk") if with_disk else None
        self.layout, self._run_directory = self._plan()
        self.reporter = FileReporter(self.log_path)
        self.supervisor = Supervisor(self.layout, self._run_directory, self.reporter, Probes())
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def has_another_group(self) -> bool:
        """Whether a second group serves while the first one is away."""
        return self.groups > 1 and not self.divided

    @property
    def url(self) -> str:
        return self.layout.url

    @property
    def services(self) -> list[str]:
        """The names of all services."""
        return [spec.name for spec in self.layout.services]

    @property
    def disk(self) -> Disk:
        assert self._disk is not None, "this system has no disk of its own"
        return self._disk

    def of_first_group(self, name: str) -> str:
        """Return the name of the first group's service or link `name`; others keep their name."""
        known = name in self.links or name in self.services
        return name if known else f"{name}-0"

    async def start(self) -> None:
        """Start everything and wait until a request would be served by each group.

        Raises:
            TimeoutError: it serves nothing in time.
        """
        if self.simulated:
            os.environ[STEP_VARIABLE] = str(STEP_MS)
        await asyncio.to_thread(self.redis.start)
        for link in self.links.values():
            await link.open()
        self._running = asyncio.create_task(self.supervisor.run(self._stopping))
        await self.until_ready(START_TIMEOUT_S)

    async def end(self) -> None:
        """Let the services finish what is open, and end them."""
        self._stopping.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    async def stop(self) -> None:
        """End everything."""
        await self.end()
        for link in self.links.values():
            await link.close()
        await asyncio.to_thread(self.redis.kill)
        if self._disk is not None:
            self._disk.close()
        self.reporter.close()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a service's processes; the supervisor starts it again if it dies."""
        self.supervisor.kill(name, number)

    async def until_up_again(self, name: str, since: float, timeout_s: float = 120.0) -> float:
        """Wait until a service that died after `since` answers again; return the seconds between.

        A worker with a model has loaded its weights by then.
        """
        async with asyncio.timeout(timeout_s):
            while not (times := [at for at in self.reporter.came_up.get(name, ()) if at > since]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        if name.startswith("worker") and not self.simulated:
            await self.until_ready(timeout_s)
            return time.monotonic() - since
        return times[0] - since

    async def until_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until the gateway is ready and every group's workers are, and nothing restarts."""
        async with asyncio.timeout(timeout_s):
            while not await self._is_ready():
                if self._running is not None and self._running.done():
                    self._running.result()
                await asyncio.sleep(0.1)

    async def _is_ready(self) -> bool:
        if any(self.supervisor.pid_of(name) is None for name in self.services):
            return False
        if not await Probes().is_ready(self.url):
            return False
        states = [await self._scheduler_state(name) for name in self.services if name.startswith("scheduler")]
        return all(state is not None and state.worker_group == "READY" for state in states)

    # --- what is open -------------------------------------------------------------------------------------------------

    async def leaks(self) -> list[str]:
        """Return what services still hold, each in a few words; nothing if all are idle and no page was ever lost."""
        if self._running is not None and self._running.done():
            return [f"{name} still runs" for name in self.services if self.supervisor.pid_of(name) is not None]
        found = []
        for name in self.services:
            if name.startswith("scheduler"):
                found += _held_by_scheduler(name, await self._scheduler_state(name))
            elif name.startswith("worker"):
                found += await self._held_by_worker(name)
            else:
                found += await self._held_elsewhere(name)
        return found

    # --- stored responses ---------------------------------------------------------------------------------------------

    async def store_response(self) -> str:
        """Have a response stored and return its id.

        Raises:
            httpx.HTTPStatusError: it is refused.
        """
        answer = await self._post_response()
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def try_to_store(self) -> bool:
        """Have a response stored; return False if that is refused with status 503.

        Raises:
            httpx.HTTPStatusError: it is refused otherwise.
        """
        answer = await self._post_response()
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            return False
        answer.raise_for_status()
        return True

    async def has_response(self, response_id: str) -> bool:
        """Return whether a response is stored."""
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as http:
            return (await http.get(f"{self.url}/v1/responses/{response_id}")).status_code == httpx.codes.OK

    async def _post_response(self) -> httpx.Response:
        body = {"model": self.layout.model, "input": "Hello", "max_output_tokens": 16, "store": True}
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_TIMEOUT_S) as http:
            return await http.post(f"{self.url}/v1/responses", json=body)

    # --- state of services --------------------------------------------------------------------------------------------

    async def _scheduler_state(self, name: str) -> scheduler_pb2.GetStateResponse | None:
        request = scheduler_pb2.GetStateRequest(include_requests=True)
        return await self._ask(
            name, lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).GetState(request, timeout=RPC_TIMEOUT_S)
        )

    async def _held_by_worker(self, name: str) -> list[str]:
        request = worker_pb2.GetWorkerStateRequest()
        state = await self._ask(
            name, lambda channel: worker_pb2_grpc.WorkerStub(channel).GetState(request, timeout=RPC_TIMEOUT_S)
        )
        if state is None:
            return [f"{name} does not answer"]
        return [f"{name}: {state.open_rows} rows"] if state.open_rows else []

    async def _held_elsewhere(self, name: str) -> list[str]:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=RPC_TIMEOUT_S) as http:
                text = (await http.get(f"http://{HOST}:{self._metrics_ports[name]}/metrics")).text
        except httpx.HTTPError:
            return [f"{name} does not answer"]
        gauge = OPEN_GAUGES[name]
        count = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(gauge))
        return [f"{name}: {count:g} open"] if count else []

    async def _ask(self, name: str, call: Callable[[grpc.Channel], T]) -> T | None:
        """Return the result of a call to a service; None if it does not answer."""

        def blocking() -> T | None:
            try:
                with self._channel(name) as channel:
                    return call(channel)
            except grpc.RpcError:
                return None

        return await asyncio.to_thread(blocking)

    def _channel(self, name: str) -> grpc.Channel:
        if self._operator is None:
            return grpc.insecure_channel(self._addresses[name], options=CHANNEL_OPTIONS)
        identity = self._operator
        credentials = grpc.ssl_channel_credentials(
            identity.authority.read_bytes(), identity.key.read_bytes(), identity.certificate.read_bytes()
        )
        return grpc.secure_channel(self._addresses[name], credentials, options=CHANNEL_OPTIONS)

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[Layout, Path]:
        """Return the processes of all groups, connected by links, and their run directory."""
        settings = self._settings()
        replicas = Replicas(groups=GROUPS) if self.divided else ONE_OF_EACH
        layout, directory = lay_out(settings, 1, self._directory, replicas)
        specs = [each for spec in layout.services for each in self._of_groups(spec)]
        for spec in specs:
            self._addresses[spec.name] = self._address_of(spec, directory)
            self._metrics_ports[spec.name] = self._ports.take()
        self._lay_links([spec.name for spec in specs])
        return replace(layout, services=tuple(self._connected(spec) for spec in specs)), directory

    def _settings(self) -> Settings:
        gateway = GatewaySettings(port=self._ports.take(), anonymous="vouched")
        scheduler = SchedulerSettings(max_rows=32 if self.simulated else 16)
        worker = WorkerSettings()
        if self._stages > 1:
            scheduler = scheduler.model_copy(update={"pipeline_parallel": self._stages})
        if self.divided:
            tier = HostTierSettings(pages=4096)
            # Prompts that several users sent would be shared, and then not be read from the other group.
            update = {"host_tier": tier, "prefill_min_tokens": PREFILL_TOKENS, "cache": CacheSettings(mode="isolated")}
            scheduler = scheduler.model_copy(update=update)
        if self._disk is not None:
            path = self._disk.path
            gateway = gateway.model_copy(update={"responses": ResponsesSettings(file=path / "responses.sqlite")})
            storage = StorageSettings(keyring=path / "keyring.db")
            scheduler = scheduler.model_copy(update={"host_tier": HostTierSettings(pages=512), "storage": storage})
            location = WorkerStorageSettings(location=SecretStr(str(path / "pages")))
            worker = worker.model_copy(update={"storage": location})
        model = ModelSettings(load_format="fake") if self.simulated else ModelSettings()
        if self._tiny is not None:
            return self._of_tiny_model(self._tiny, gateway, scheduler)
        return Settings(model=model, gateway=gateway, scheduler=scheduler, worker=worker)

    def _of_tiny_model(self, tiny: TinyModel, gateway: GatewaySettings, scheduler: SchedulerSettings) -> Settings:
        scheduler = scheduler.model_copy(update={"device_pages": TINY_PAGES})
        model = ModelSettings(reference=str(tiny.model), served_name=tiny.name, dtype="float32")
        if tiny.adapter is None:
            return Settings(model=model, gateway=gateway, scheduler=scheduler, worker=WorkerSettings(threads=1))
        limits = self._directory / "limits.toml"
        limits.write_text(f'[tenants.default]\nadapters = ["{tiny.adapter.name}"]\n')
        adapters = AdapterSettings(slots=2, load={tiny.adapter.name: str(tiny.adapter)})
        return Settings(
            model=model.model_copy(update={"images": "on"}),
            gateway=gateway,
            tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
            scheduler=scheduler.model_copy(update={"adapters": adapters}),
            limits=LimitsSettings(file=limits),
        )

    def _of_groups(self, spec: ServiceSpec) -> list[ServiceSpec]:
        """Return the service once for each group, if groups have their own."""
        if self.groups == 1 or self.divided or spec.name not in ("scheduler", "worker"):
            return [spec]
        return [
            replace(spec, name=f"{spec.name}-{number}", group=f"{spec.group}-{number}") for number in range(self.groups)
        ]

    def _address_of(self, spec: ServiceSpec, directory: Path) -> str:
        if spec.name == "gateway":
            return spec.address
        return f"{HOST}:{self._ports.take()}" if self._authority else f"unix:{directory / spec.name}.sock"

    def _lay_links(self, names: list[str]) -> None:
        targets = {
            "gateway-tokenizer": self._addresses["tokenizer"],
            "detokenizer-gateway": self._addresses["detokenizer"],
            "gateway-redis": self.redis.url.replace("unix://", "unix:"),
        }
        for name in names:
            service, _, number = name.partition("-")
            suffix = f"-{number}" if number else ""
            if service == "scheduler":
                targets[f"tokenizer-scheduler{suffix}"] = self._addresses[name]
                targets[f"scheduler-detokenizer{suffix}"] = self._addresses["detokenizer"]
            elif service == "worker":
                targets[f"scheduler-worker{suffix}"] = self._addresses[name]
        between = ("scheduler", "tokenizer-scheduler-0"), ("worker", "scheduler-worker-0")
        if self.divided:
            targets |= {f"{name}-1-{name}-0": self._addresses[f"{name}-0"] for name, _ in between}
        self.links = {name: Link(name, self._ports.take(), target, self._random) for name, target in targets.items()}
        if self.divided:
            # All services know the other group by one address; who connects tells the links apart.
            for name, link in between:
                branch = partial(self._is_port_of, f"{name}-1"), self.links[f"{name}-1-{name}-0"]
                self.links[link].branches.append(branch)

    def _is_port_of(self, name: str, port: int) -> bool:
        """Whether the service `name` has a connection from this port."""
        pid = self.supervisor.pid_of(name)
        if pid is None:
            return False
        with contextlib.suppress(psutil.Error):
            return any(each.laddr.port == port for each in psutil.Process(pid).net_connections("tcp"))
        return False

    def _connected(self, spec: ServiceSpec) -> ServiceSpec:
        """Return the service with its own address, and links as the addresses of its peers."""
        service, _, number = spec.name.partition("-")
        suffix = f"-{number}" if number else ""
        links = {name: link.address for name, link in self.links.items()}
        own: dict[str, object] = {"metrics_port": self._metrics_ports[spec.name]}
        if service != "gateway":
            own["address"] = self._addresses[spec.name]
        match service:
            case "gateway":
                own |= {"tokenizer": (links["gateway-tokenizer"],), "detokenizer": (links["detokenizer-gateway"],)}
                own["schedulers"] = ()
                if self._disk is None:
                    url = f"redis://{links['gateway-redis']}"
                    own["state"] = StateSettings.model_validate({"url": url, "secret": SECRET})
            case "tokenizer":
                own["schedulers"] = tuple(
                    address for name, address in links.items() if name.startswith("tokenizer-scheduler")
                )
            case "scheduler":
                own["workers"] = self._links_to_workers(suffix)
                own["detokenizer"] = (links[f"scheduler-detokenizer{suffix}"],)
        rpc = self._security_of(service)
        section = getattr(spec.settings, service).model_copy(update=own)
        probed = spec.address if service == "gateway" else self._addresses[spec.name]
        if rpc.probe_port is not None and service != "gateway":
            probed = f"{HOST}:{rpc.probe_port}"
        return replace(spec, address=probed, settings=spec.settings.model_copy(update={service: section, "rpc": rpc}))

    def _links_to_workers(self, suffix: str) -> tuple[str, ...]:
        """Return the addresses of the links to the ranks of a group."""
        name = f"scheduler-worker{suffix}"
        stages = [f"{name}-{number}" for number in range(self._stages)]
        return tuple(self.links[each].address for each in (stages if self._stages > 1 else [name]))

    def _security_of(self, service: str) -> RpcSettings:
        if self._authority is None:
            return RpcSettings(plaintext=True)
        identity: Identity = self._authority.issue(service, roles=[service])
        return identity.settings(probe_port=self._ports.take() if service != "gateway" else None)


def _save_tiny_model(directory: Path, *, reads_images: bool) -> TinyModel:
    # Imports torch, which the other systems need not wait for.
    from tests.chaos.kinds import TinyModel

    return TinyModel.save(directory) if reads_images else TinyModel.save_of_text(directory)


def _held_by_scheduler(name: str, state: scheduler_pb2.GetStateResponse | None) -> list[str]:
    if state is None:
        return [f"{name} does not answer"]
    found = []
    if state.waiting_requests or state.running_rows:
        found.append(f"{name}: {state.waiting_requests} waiting, {state.running_rows} rows")
    for tier in state.tiers:
        kept = tier.free_pages + tier.soft_free_pages + tier.evictable_pages
        if tier.protected_pages or kept != tier.capacity_pages:
            found.append(f"{name}: {tier.capacity_pages - kept} {tier.tier} pages")
    if state.disaggregation.open_leases:
        found.append(f"{name}: {state.disaggregation.open_leases} leases")
    if state.leaked_pages:
        found.append(f"{name}: {state.leaked_pages} pages were lost and repaired")
    return found
