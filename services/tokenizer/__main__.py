"""Run the tokenizer: `python -m services.tokenizer --help`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from common.chat_template import read_chat_template
from common.errors import ConfigurationError
from common.fleet.state import open_fleet
from common.host import available_memory, available_processors
from common.logs import get_logger
from common.metrics import MODEL_INFO
from common.recent_images import RecentImages, bytes_to_keep
from common.requests import ImageLimits
from common.room import SharedRoom
from common.rpc.channel import open_channel
from common.rpc.discovery import is_looked_up
from common.rpc.peers import servers_at
from common.rpc.security import read_security
from common.rpc.server import RpcServer
from common.rpc.sessions import SESSIONS, SessionsService
from common.runtime import collect_garbage_rarely, drained, run_service
from common.settings import Settings, load_settings
from common.tokenization import load_served_model
from common.tokenization.directory import read_json
from common.vision import mark_id, placeholder_id, seeing_model, video_mark_id
from protos.gen.pando.v1 import sessions_pb2_grpc, tokenizer_pb2_grpc
from services.tokenizer import metrics
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.encoding import PromptEncoder
from services.tokenizer.encoding_pool import EncodingPool
from services.tokenizer.images.child import ChildLimits
from services.tokenizer.images.containers import can_be_decoded
from services.tokenizer.images.pool import ImagePool, usual_processes
from services.tokenizer.images.prompts import NoImages, PreparedPrompts
from services.tokenizer.images.registry import read_processor
from services.tokenizer.limits import ModelLimits
from services.tokenizer.relay import RETRY_AFTER_MS, Relay
from services.tokenizer.routing.fleet import Fleet
from services.tokenizer.routing.policies import make_policy
from services.tokenizer.routing.shared_prefixes import FleetPrefixes
from services.tokenizer.scheduler_link import SchedulerLink
from services.tokenizer.service import TokenizerService
from services.tokenizer.template_style import style_of, warn_of_problems

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from common.rpc.security import Security
    from common.tokenization import TextModel
    from services.tokenizer.images.processor import PreparedImage
    from services.tokenizer.images.prompts import ImagePrompts
    from services.tokenizer.relay import Scheduler

NAME = "pando.v1.Tokenizer"
HEALTH_INTERVAL_S = 0.25
# Seconds that pending requests have to be submitted after the signal to stop.
DRAIN_S = 5.0
# Requests that are being tokenized or wait for the scheduler's answer.
MAX_PENDING_REQUESTS = 4096


def main() -> None:
    """Read the settings and serve until the process receives a termination signal."""
    settings = load_settings("python -m services.tokenizer", "Chat templates, text to token ids, request validation.")
    # The library's own thread pool would mix the texts of all calls without regard to tenants.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    MODEL_INFO.labels(settings.model.name).set(1)
    collect_garbage_rarely()
    run_service("tokenizer", settings, settings.tokenizer.metrics_port, lambda stop: serve(settings, stop))


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Run the tokenizer until `stopping` is set.

    Raises:
        ConfigurationError: the settings are inconsistent.
    """
    security = read_security(settings.rpc)
    server = RpcServer(NAME, settings.tokenizer.address, security, also=(SESSIONS,))
    with ThreadPoolExecutor(settings.tokenizer.threads, "encode") as executor:
        async with open_schedulers(settings, security) as schedulers:
            model = load_served_model(settings.model)
            pool, images = build_images(settings, model)
            relay, service = build(settings, model, schedulers, executor, images)
            server.add(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, service)
            server.add(sessions_pb2_grpc.add_SessionsServicer_to_server, SessionsService(schedulers))
            await server.start()
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = tasks.create_task(schedulers.run(relay))
                    decoding = [] if pool is None else [tasks.create_task(pool.run())]
                    health = tasks.create_task(report_health(server, schedulers.can_serve))
                    await stopping.wait()
                    health.cancel()
                    await server.set_serving(False)
                    await drained(lambda: not relay.pending, DRAIN_S)
                    for task in (running, *decoding):
                        task.cancel()
            finally:
                await server.stop(grace_s=0.2)


def build_images(settings: Settings, model: TextModel) -> tuple[ImagePool | None, ImagePrompts]:
    """Build the pool that decodes images, if the model is served with any.

    Raises:
        ConfigurationError: model.images is "on", and the model's processor is not supported.
    """
    directory = seeing_model(settings)
    if directory is None:
        return None, NoImages()
    rules = settings.tokenizer.images
    try:
        config = read_json(directory / "config.json")
        token_id, mark = placeholder_id(config), mark_id(config)
        token = model.tokenizer.id_to_token(token_id)
        if token is None:
            raise ConfigurationError(f"{directory}: the tokenizer has no token {token_id}, the placeholder of images")
        processor = read_processor(directory, token)
    except ConfigurationError as error:
        if settings.model.images == "on":
            raise
        get_logger("images").warning("images.refused", reason=str(error))
        return None, NoImages()
    limits = ChildLimits(rules.max_pixels, rules.max_frames, rules.memory_bytes, rules.timeout_s)
    processes = rules.processes or usual_processes(available_processors(), available_memory(), rules.memory_bytes)
    get_logger("images").info("images.processes", processes=processes)
    recent: RecentImages[PreparedImage] = RecentImages(bytes_to_keep(rules.kept_bytes, available_memory()))
    pool = ImagePool(directory, processor, limits, processes, rules.timeout_s, recent)
    return pool, PreparedPrompts(pool, model.tokenizer, mark, token_id, video_mark_id(config))


def build(
    settings: Settings, model: TextModel, scheduler: Scheduler, executor: ThreadPoolExecutor, images: ImagePrompts
) -> tuple[Relay, TokenizerService]:
    """Build the objects of a service that sends requests to `scheduler`.

    Raises:
        ConfigurationError: model.chat_template cannot be read, or is not usable.
    """
    rules = settings.tokenizer.images
    max_frames = rules.max_frames if images.videos_are_taken else 0
    image_limits = ImageLimits(
        rules.max_images, rules.max_file_bytes, rules.max_pixels, max_frames, bool(max_frames) and can_be_decoded()
    )
    limits = ModelLimits(
        settings.model.name, model.max_context_tokens, model.vocabulary_size, model.embedding,
        image_limits if images.are_taken else None,
    )  # fmt: skip
    sources = model.chat_templates
    if settings.model.chat_template:
        sources = {"default": read_chat_template(settings.model.chat_template)}
    templates = ChatTemplates(sources, model.special_tokens)
    if settings.model.chat_template:
        # A model's own template may be broken as long as only completions are asked for.
        templates.check()
    style = style_of(sources, templates, settings.model.tool_style, settings.model.reasoning_style)
    warn_of_problems(style, settings.model.tool_style)
    pool = EncodingPool(PromptEncoder(model, templates, style), executor, settings.tokenizer.threads)
    room = SharedRoom(MAX_PENDING_REQUESTS, "being submitted", RETRY_AFTER_MS)
    relay = Relay(limits, scheduler, pool.encode, room, pool.ban, images)
    return relay, TokenizerService(relay, pool, images, room, limits, int(time.time()))


@contextlib.asynccontextmanager
async def open_schedulers(every: Settings, security: Security) -> AsyncIterator[Fleet | SchedulerLink]:
    """Connect to the scheduler groups in the settings, or to the single scheduler."""
    settings = every.tokenizer
    if len(settings.schedulers) == 1 and not is_looked_up(settings.schedulers[0]):
        async with open_channel(settings.schedulers[0], security) as channel:
            yield SchedulerLink(channel)
        return

    servers = servers_at(settings.schedulers, security)
    fleet = open_fleet(every.fleet)
    prefixes = None if fleet is None else FleetPrefixes(*fleet)
    routing = settings.routing
    yield Fleet(servers, make_policy(routing.policy), prefixes=prefixes, role_settle_s=routing.role_settle_s)


async def report_health(server: RpcServer, can_serve: Callable[[], Awaitable[bool]]) -> None:
    """Report SERVING as long as a scheduler would serve requests."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            serving = await can_serve()
            metrics.SCHEDULER_CONNECTED.set(serving)
            await server.set_serving(serving)
            await asyncio.sleep(HEALTH_INTERVAL_S)


if __name__ == "__main__":
    main()
