"""Run the scheduler: `python -m services.scheduler --help`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from functools import partial
from typing import TYPE_CHECKING

from common.audit.log import open_audit
from common.errors import ConfigurationError
from common.fleet.names import FleetKeys
from common.fleet.state import LEAST_SECRET, open_fleet
from common.metrics import MODEL_INFO
from common.rpc.channel import open_channel
from common.rpc.peers import servers_at
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.rpc.sessions import SESSIONS, SessionsService
from common.runtime import collect_garbage_rarely, drained, run_service
from common.settings import Settings, load_settings
from common.steps import EngineSpec, SleepLevel
from protos.gen.pando.v1 import scheduler_pb2_grpc, sessions_pb2_grpc
from services.scheduler.audit_desk import CallerActs
from services.scheduler.content.desk import ContentChecker, ContentDesk
from services.scheduler.credentials import Credentials, read_token
from services.scheduler.decision_log import DecisionLog
from services.scheduler.defects import begin_again
from services.scheduler.disaggregation.prefill_client import PrefillClient
from services.scheduler.disaggregation.prefill_server import PrefillServer
from services.scheduler.encoder_desk import EncoderDesk
from services.scheduler.fleet_desk import FleetDesk, rules_of
from services.scheduler.group import WorkerGroup
from services.scheduler.loop import SchedulerLoop
from services.scheduler.outlets import Outlets
from services.scheduler.service import SchedulerService
from services.scheduler.sleep_desk import SleepDesk
from services.scheduler.turn_desk import TurnDesk
from services.scheduler.turn_queue import TurnQueue
from services.scheduler.weights_desk import WeightsDesk

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from common.audit.log import Audit
    from common.rpc.security import Security
    from common.settings import SchedulerSettings
    from common.settings.scheduler import DeviceTurnSettings
    from services.scheduler.cache.interface import PrefixCache

NAME = "pando.v1.Scheduler"
HEALTH_INTERVAL_S = 0.1
# Pages of sliding-window layers per page of the other layers; workers take more if the windows of all rows need it and
# memory suffices. 0: all layers share one pool.
WINDOW_RATIO = 0.25


def main() -> None:
    """Read the settings and serve until a signal arrives."""
    settings = load_settings("python -m services.scheduler", "Queues, policy, prefix cache and step plans.")
    MODEL_INFO.labels(settings.model.name).set(1)
    collect_garbage_rarely()
    run_service("scheduler", settings, settings.scheduler.metrics_port, lambda stop: serve(settings, stop))


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Run the scheduler until `stopping` is set.

    Raises:
        ConfigurationError: the settings are invalid here or in a worker.
    """
    path = settings.scheduler.cache.decision_log
    with (
        contextlib.closing(open_audit(settings.audit, "scheduler")) as audit,
        contextlib.nullcontext() if path is None else DecisionLog(path) as decisions,
    ):
        await serve_with(settings, stopping, decisions, audit)


async def serve_with(settings: Settings, stopping: asyncio.Event, decisions: DecisionLog | None, audit: Audit) -> None:
    """Run the scheduler until `stopping` is set; record the cache's decisions if there is a log."""
    fleet = open_fleet(settings.fleet)
    loop = SchedulerLoop(
        settings.scheduler,
        decisions=decisions,
        limits_file=settings.limits.file,
        has_fleet=fleet is not None,
        audit=audit,
    )
    security = read_security(settings.rpc)
    group = make_group(settings, security, loop)
    outlets = Outlets(servers_at(settings.scheduler.detokenizer, security), loop)
    loop.connect(group, outlets)
    service, waker = make_service(settings.scheduler, loop, group, audit)
    loop.prefills = PrefillClient(
        loop,
        lambda address, name: open_channel(address, security, name or None),
        settings.scheduler.prefill_min_tokens,
    )
    works = [
        group.run(), outlets.run(), loop.run(), begin_again("sleep", waker.run), loop.prefills.run(),
        service.drop_images(),
        loop.roles.run(lambda: has_open_work(loop, service)),
        *use_encoders(settings.scheduler, security, loop, group),
        *publish_kv_events(settings, loop, fleet[1] if fleet else None),
    ]  # fmt: skip
    desk = make_desk(settings, loop)
    if desk is not None:
        service.verdicts = desk.verdicts
        works.append(desk.run())
    if fleet is not None:
        members = FleetDesk(*fleet, rules_of(settings.scheduler.cache), lambda: cache_of(loop))
        service.announce_pin = members.announce_pin
        works.append(members.run())
    server = RpcServer(NAME, settings.scheduler.address, security, also=(SESSIONS,), audit=audit)
    server.add(sessions_pb2_grpc.add_SessionsServicer_to_server, SessionsService(loop))
    server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)
    await server.start()
    misconfigured: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in (*works, report_health(server, lambda: loop.is_healthy))]
            await stopping.wait()
            running.pop().cancel()
            await server.set_serving(False)
            loop.refuse_new()
            await drained(lambda: not has_open_work(loop, service), settings.scheduler.drain_s)
            for task in running:
                task.cancel()
    except* ConfigurationError as errors:
        misconfigured = next(iter(errors.exceptions))
    finally:
        await server.stop(grace_s=0.2)
    if misconfigured is not None:
        raise misconfigured


def has_open_work(loop: SchedulerLoop, service: SchedulerService) -> bool:
    """Whether requests are open, or other groups may still read the pages of prompts that were computed for them."""
    return bool(service.open_leases) or (loop.core is not None and any(loop.core.open_sequences))


def make_service(
    settings: SchedulerSettings, loop: SchedulerLoop, group: WorkerGroup, audit: Audit
) -> tuple[SchedulerService, SleepDesk | TurnDesk]:
    """Return the service, and the desk that wakes the workers for requests while it runs."""
    weights = WeightsDesk(loop, group)
    sleep = SleepDesk(loop, group, weights, audit)
    credentials = Credentials(read_token(settings))
    service = SchedulerService(loop, settings, credentials, CallerActs(audit, credentials), weights, sleep)
    service.prefill_server = PrefillServer(loop, group, settings.workers)
    return service, make_waker(settings.device_turns, loop, group, sleep)


async def report_health(server: RpcServer, can_serve: Callable[[], bool]) -> None:
    """Keep the health service's status up to date."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await server.set_serving(can_serve())
            await asyncio.sleep(HEALTH_INTERVAL_S)


def make_group(settings: Settings, security: Security, loop: SchedulerLoop) -> WorkerGroup:
    """Return the worker group in the settings.

    Raises:
        ConfigurationError: see `check_ranks` and `check_encoders`.
    """
    check_ranks(settings.scheduler)
    check_encoders(settings)
    channels = [partial(open_channel, address, security) for address in settings.scheduler.workers]
    turns = settings.scheduler.device_turns
    level = SleepLevel(turns.level) if turns.enabled else None
    return WorkerGroup(
        channels, engine_spec(settings), loop, settings.scheduler.worker_timeout_s, loop.adapters.restore, level
    )


def use_encoders(
    settings: SchedulerSettings, security: Security, loop: SchedulerLoop, group: WorkerGroup
) -> list[Coroutine[None, None, None]]:
    """Let `loop` use workers that only encode images, if the settings name any; return what has to run for that."""
    if not settings.encoders:
        return []
    connect = partial(open_channel, security=security)
    desk = loop.encoders = EncoderDesk(
        settings.encoders, connect, loop, group, settings.vision.step_embeddings, settings.worker_timeout_s
    )
    return [desk.run()]


def check_encoders(settings: Settings) -> None:
    """Raise ConfigurationError if workers that only encode images would have nothing to do."""
    scheduler = settings.scheduler
    if not scheduler.encoders:
        return
    if not engine_spec(settings).vision:
        raise ConfigurationError("scheduler.encoders requires a model with images, in one pipeline stage")
    if not scheduler.vision.kept_embeddings:
        raise ConfigurationError(
            "scheduler.encoders requires scheduler.vision.kept_embeddings: room for what the workers read from them"
        )
    if scheduler.device_turns.enabled:
        raise ConfigurationError("scheduler.encoders is not available for models that take turns on a device")


def check_ranks(settings: SchedulerSettings) -> None:
    """Raise ConfigurationError if workers cannot be divided into stages, or experts not be distributed over them."""
    workers, stages = len(settings.workers), settings.pipeline_parallel
    if workers % stages:
        raise ConfigurationError(
            f"scheduler.workers has {workers} addresses, which cannot be divided into the {stages} stages of "
            "scheduler.pipeline_parallel: each stage needs as many ranks as the others"
        )
    if settings.expert_parallel and workers == stages:
        raise ConfigurationError(
            "scheduler.expert_parallel distributes experts over the ranks of a stage, and each stage has only one: add "
            "workers (pando up --tp 2)"
        )


def make_waker(
    settings: DeviceTurnSettings, loop: SchedulerLoop, group: WorkerGroup, sleep: SleepDesk
) -> SleepDesk | TurnDesk:
    """Return the desk that wakes the workers for requests: one for turns, if the model shares its device.

    Raises:
        ConfigurationError: it does, and no directory is set.
    """
    if not settings.enabled:
        return sleep
    if settings.directory is None:
        raise ConfigurationError(
            "scheduler.device_turns.enabled requires scheduler.device_turns.directory: the same one for all models of "
            "the device; `pando up --share-device` chooses one"
        )
    return TurnDesk(settings, TurnQueue(settings.directory), loop, group, sleep)


def make_desk(settings: Settings, loop: SchedulerLoop) -> ContentDesk | None:
    """Return the content check that precedes publication, if the settings enable it."""
    rules, model = settings.scheduler.content_check, settings.model
    if not rules.enabled:
        return None
    configuration = {
        "model": model.model_dump(mode="json"),
        "detectors": list(rules.detectors),
        "rules": str(rules.rules) if rules.rules else None,
    }
    checker = ContentChecker(configuration)
    return ContentDesk(checker, lambda: cache_of(loop))


def publish_kv_events(
    settings: Settings, loop: SchedulerLoop, keys: FleetKeys | None
) -> list[Coroutine[None, None, None]]:
    """Return the publisher of KV events, if the settings ask for it; without `keys`, names are valid for this process.

    Raises:
        ConfigurationError: packages are missing, or an endpoint is invalid.
    """
    rules = settings.scheduler.kv_events
    if rules.endpoint is None:
        return []
    try:
        from services.scheduler.kv_events.desk import KVEventDesk
        from services.scheduler.kv_events.publisher import KVEventPublisher
    except ModuleNotFoundError as error:
        message = f"scheduler.kv_events requires the extra kv-events; {error.name} is missing"
        raise ConfigurationError(message) from error
    publisher = KVEventPublisher(rules.endpoint, rules.replay_endpoint, rules.topic)
    keys = keys or FleetKeys(secrets.token_hex(LEAST_SECRET))
    return [KVEventDesk(publisher, keys, settings.scheduler.page_size, lambda: cache_of(loop)).run()]


def cache_of(loop: SchedulerLoop) -> PrefixCache | None:
    """Return the cache, which exists while there is a core."""
    return loop.core.memory.cache if loop.core else None


def engine_spec(settings: Settings) -> EngineSpec:
    """Return the configuration of every rank; the group fills in rank and world size."""
    model, scheduler = settings.model, settings.scheduler
    return EngineSpec(
        model=model.reference,
        load_format=model.load_format,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        quantization=model.quantization,
        deterministic=model.deterministic,
        classifier_from_token=model.classifier_from_token,
        rope_parameters=json.dumps(model.rope_parameters) if model.rope_parameters else "",
        rendezvous=scheduler.rendezvous,
        stages=scheduler.pipeline_parallel,
        expert_parallel=scheduler.expert_parallel,
        data_parallel_size=scheduler.data_parallel.size,
        data_parallel_rank=scheduler.data_parallel.rank,
        data_parallel_rendezvous=scheduler.data_parallel.rendezvous if scheduler.data_parallel.size > 1 else "",
        page_size=scheduler.page_size,
        max_rows=scheduler.max_rows,
        max_context=model.max_context,
        max_step_tokens=scheduler.max_step_tokens,
        device_pages=scheduler.device_pages,
        memory_fraction=scheduler.memory_fraction,
        host_pages=scheduler.host_tier.pages,
        host_bytes=int(scheduler.host_tier.gigabytes * 1024**3),
        adapter_slots=scheduler.adapters.slots,
        adapter_experts=scheduler.adapters.experts,
        kept_embeddings=scheduler.vision.kept_embeddings,
        # Cache decisions depend on the sliding-window pool, which the log does not record, so it is disabled then.
        window_ratio=0.0 if scheduler.cache.decision_log else WINDOW_RATIO,
        # Whether there is an encoder, the workers find out: they have the model's files.
        vision=model.images != "off" and scheduler.pipeline_parallel == 1,
    )


if __name__ == "__main__":
    main()
