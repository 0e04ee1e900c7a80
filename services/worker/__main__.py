"""Run one rank of the model: `python -m services.worker --help`."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.file_locks import FileLock
from common.logs import get_logger
from common.metrics import MODEL_INFO
from common.rpc.channel import open_channel
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.runtime import drained, run_service
from common.settings import Settings, WorkerSettings, WorkerStorageSettings, load_settings
from protos.gen.pando.v1 import worker_pb2_grpc
from services.worker.engine.execution.device_claim import OwnDevice, SharedDevice
from services.worker.engine.execution.engine import ModelEngine
from services.worker.engine.execution.fake_model import LOAD_FORMAT as FAKE_FORMAT
from services.worker.engine.execution.fake_model import FakeModel, options_from_environment
from services.worker.engine.grammars.library import GrammarLibrary
from services.worker.engine.host import limit_spinning
from services.worker.grammars.desk import GrammarDesk, GrammarLimits
from services.worker.grammars.process import CompileProcesses
from services.worker.peers.reading import PeerReader
from services.worker.profiles import ProfileRules
from services.worker.rank import Rank
from services.worker.service import WorkerService
from services.worker.storage.factory import STORAGE_THREADS, make_storage
from services.worker.storage.tier import WorkerStorageTier
from services.worker.tiered_engine import TieredEngine

if TYPE_CHECKING:
    from common.settings.scheduler import DeviceTurnSettings
    from common.steps import EngineSpec
    from services.worker.engine.backends import RunnerOptions
    from services.worker.engine.execution.device_claim import DeviceClaim
    from services.worker.engine.execution.engine import LoadedModel, LoadModel
    from services.worker.engine.execution.interface import Engine, ProgressReport
    from services.worker.engine.host_tier.nixl_agents import NixlAgents

NAME = "pando.v1.Worker"
# Exit status that asks the supervisor for a restart: EX_TEMPFAIL of sysexits.h.
RESTART_STATUS = 75
# Compiled grammars, of all users. One user may take an eighth of it.
GRAMMAR_CACHE_BYTES = 512 * 2**20
SUBJECTS_A_CACHE = 8


def main() -> None:
    """Read the settings and serve until a signal comes."""
    settings = load_settings("python -m services.worker", "One rank of the model: weights, KV memory, sampling.")
    limit_spinning()
    run_service("worker", settings, settings.worker.metrics_port, lambda stopping: serve(settings, stopping))


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, or until only a new process can go on."""
    security = read_security(settings.rpc)
    MODEL_INFO.labels(settings.model.name).set(1)
    tier = make_tier(settings.worker.storage)
    library = GrammarLibrary(cache_bytes=GRAMMAR_CACHE_BYTES, subject_bytes=GRAMMAR_CACHE_BYTES // SUBJECTS_A_CACHE)
    limits = GrammarLimits(seconds_per_minute=settings.worker.grammars.seconds_per_minute)
    grammars = GrammarDesk(library, CompileProcesses(), limits)
    turns = settings.scheduler.device_turns
    engine = make_engine(settings.worker, library, device_claim(turns, settings.worker.device_index))
    peers = PeerReader(lambda address: open_channel(address, security))
    engine = TieredEngine(engine, tier, peers, asyncio.get_running_loop())
    rules = ProfileRules(directory=settings.worker.profile.directory)
    rank = Rank(
        engine,
        profile_rules=rules,
        keep_warm_s=settings.worker.keep_warm_ms / 1000,
        check_weights=check_weights,
    )
    server = RpcServer(NAME, settings.worker.address, security)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerService(rank, grammars, peers))
    await server.start()
    await server.set_serving(True)
    get_logger("worker").info("worker.listening", address=settings.worker.address)
    ends = [asyncio.create_task(event.wait()) for event in (stopping, rank.needs_new_process)]
    if turns.enabled:
        ends.append(asyncio.create_task(rank.unload_when_unused()))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await server.set_serving(False)
        # A scheduler that is stopped at the same time needs its workers until its requests have finished.
        await drained(lambda: not rank.has_session or rank.needs_new_process.is_set(), settings.scheduler.drain_s)
    finally:
        for end in ends:
            end.cancel()
        # Short, because Execute streams never end by themselves.
        await server.stop(grace_s=0.5)
        await grammars.close()
        if rank.needs_new_process.is_set():
            get_logger("worker").warning("worker.starts_anew", status=RESTART_STATUS)
            # A thread that hangs in a collective also hangs the interpreter's orderly end.
            os._exit(RESTART_STATUS)
        has_ended = await rank.stop()
        await peers.close()
        if tier is not None:
            has_ended = await tier.close() and has_ended
        if not has_ended:
            # The interpreter cannot end either while operators or a hanging storage run in another thread.
            os._exit(0)


def make_tier(settings: WorkerStorageSettings) -> WorkerStorageTier | None:
    """Return the storage tier, None where no storage is configured."""
    storage = make_storage(settings)
    return None if storage is None else WorkerStorageTier(storage, settings.timeout_s, STORAGE_THREADS)


def check_weights(loaded: EngineSpec, replacement: EngineSpec) -> int:
    """Check that `replacement` has the shape of the loaded weights; return the bytes of its files."""
    if loaded.load_format == FAKE_FORMAT:
        return 0
    from services.worker.engine.checkpoints.replacing import check_replacement

    return check_replacement(loaded, replacement)


def device_claim(turns: DeviceTurnSettings, device_index: int) -> DeviceClaim:
    """Return the claim to this rank's device, which other models may share.

    Raises:
        ConfigurationError: it is shared, and no directory is set.
    """
    if not turns.enabled:
        return OwnDevice()
    if turns.directory is None:
        raise ConfigurationError("scheduler.device_turns.enabled requires scheduler.device_turns.directory")
    return SharedDevice(FileLock(turns.directory / f"device-{device_index}"))


def make_engine(settings: WorkerSettings, library: GrammarLibrary, device: DeviceClaim | None = None) -> Engine:
    """Return the engine that `Configure` will load; torch is imported only when a real model is configured."""
    fake_options = options_from_environment()
    nixl = make_nixl(settings)
    options = partial(runner_options, settings, takes_turns=isinstance(device, SharedDevice))

    def load(spec: EngineSpec, report: ProgressReport) -> LoadedModel:
        if spec.load_format == FAKE_FORMAT:
            return FakeModel(spec, report, fake_options)
        from services.worker.engine.execution.torch_model import TorchModel
        from services.worker.engine.loader import load_encoder, load_model

        if spec.only_encodes:
            from services.worker.engine.vision.vision_model import VisionModel

            return VisionModel(lambda report: load_encoder(spec, report, options()), report)
        return TorchModel(load_model(spec, report, options(nixl)), spec, report, library)

    def prepare(spec: EngineSpec, serving: LoadedModel) -> LoadModel | None:
        if spec.load_format == FAKE_FORMAT:
            return None
        from services.worker.engine.execution.torch_model import prepare_model

        return prepare_model(spec, options(), serving, library)

    return ModelEngine(load, prepare, device)


def make_nixl(settings: WorkerSettings) -> NixlAgents | None:
    """Return the transfers of pages between groups over NIXL; None if they go otherwise.

    Raises:
        ConfigurationError: it is not installed, or cannot be loaded.
    """
    if settings.peer_transfers != "nixl":
        return None
    from services.worker.engine.host_tier.nixl_agents import NixlAgents

    return NixlAgents()


def runner_options(
    settings: WorkerSettings, nixl: NixlAgents | None = None, *, takes_turns: bool = False
) -> RunnerOptions:
    """Return the settings of this host for a model that torch computes."""
    from services.worker.engine.backends import RunnerOptions

    return RunnerOptions(
        device=settings.device,
        device_index=settings.device_index,
        threads=settings.threads,
        backend=settings.backend,
        products=settings.products,
        takes_turns=takes_turns,
        nixl=nixl,
    )


if __name__ == "__main__":
    main()
