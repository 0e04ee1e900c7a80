"""Groups that generate: they push a token of each open choice to its detokenizer in every step, and compute nothing.

Each also keeps a prefix cache and exchanges evidence with the state server, as schedulers do.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
import uvloop

from common.fleet.state import open_fleet
from common.rpc.channel import open_channel
from common.rpc.stream import StreamLink, StreamSource
from common.settings import CacheSettings, FleetSettings
from common.types import Finish, FinishReason, ReplyTo, RequestId, SubscriberId
from common.wire.answers import finish_to_wire
from common.wire.identity import view_from_wire
from deploy.evaluation.experiments.cell.plan import SECRET, CellPlan, subscriber
from deploy.evaluation.experiments.simulated_groups import start_group
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.fleet_desk import FleetDesk, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.types import TokenIds, View
    from protos.gen.pando.v1 import scheduler_pb2

PAGE_SIZE = 16
PAGES = 65_536
START_POLL_S = 0.1
# Single tokens of the bundled model's vocabulary, nearly all of them whole words.
TOKENS = tuple(1000 + 7 * number % 20_000 for number in range(4096))
LENGTH = finish_to_wire(Finish(FinishReason.LENGTH))


@dataclass(slots=True)
class GeneratedChoice:
    """An open choice: its request, and the tokens that it has yet to get."""

    request_id: str
    remaining: int


class Outlet:
    """The stream to one detokenizer, and the choices whose output goes there."""

    def __init__(self, address: str) -> None:
        """Prepare a stream, which `run` opens."""
        channel = open_channel(address)
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        self.choices: dict[int, GeneratedChoice] = {}
        self._scheduler_id = secrets.token_hex(8)
        self._link: StreamLink[detokenizer_pb2.PushRequest, detokenizer_pb2.PushResponse] = StreamLink(
            "detokenizer",
            StreamSource(lambda: stub.Push(), lambda: detokenizer_pb2.PushRequest(heartbeat=True)),
            self._on_answer,
            on_connected=self._on_connected,
            on_disconnected=self._on_disconnected,
        )
        self._next_token = random.randrange(len(TOKENS))

    @property
    def process(self) -> str | None:
        """The name of the detokenizer's process; None before the first connection."""
        return self._link.process

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        await self._link.run()

    def open(self, handle: int, choice: GeneratedChoice, reply_to: ReplyTo, prompt_tokens: int) -> None:
        """Open a choice and push its first token at once, as if its prompt took no time.

        Raises:
            UnavailableError: the detokenizer is not connected.
        """
        message = detokenizer_pb2.PushRequest(
            opens=[
                detokenizer_pb2.ChoiceOpen(
                    handle=handle,
                    request_id=choice.request_id,
                    subscriber_id=reply_to.subscriber_id,
                    skip_special_tokens=True,
                    prompt_tokens=prompt_tokens,
                )
            ],
            starts=[detokenizer_pb2.ChoiceStart(handle=handle)],
        )
        self.choices[handle] = choice
        self._push(message, (handle,))

    def step(self) -> None:
        """Push a token of each choice; those that have all of theirs end."""
        if self.choices and self._link.connected:
            self._push(detokenizer_pb2.PushRequest(), tuple(self.choices))

    def _push(self, message: detokenizer_pb2.PushRequest, handles: tuple[int, ...]) -> None:
        self._next_token = (self._next_token + len(handles)) % (len(TOKENS) - len(handles))
        message.handles.extend(handles)
        message.token_ids.extend(TOKENS[self._next_token : self._next_token + len(handles)])
        for handle in handles:
            choice = self.choices[handle]
            choice.remaining -= 1
            if choice.remaining <= 0:
                message.finishes.add(handle=handle, finish=LENGTH)
                del self.choices[handle]
        self._link.send(message)

    def _on_connected(self) -> None:
        self._link.send(detokenizer_pb2.PushRequest(scheduler_id=self._scheduler_id))

    def _on_disconnected(self, reason: str) -> None:
        # The detokenizer has ended them, and their gateways ask again.
        self.choices.clear()

    def _on_answer(self, message: detokenizer_pb2.PushResponse) -> None:
        for handle in message.gone_handles:
            self.choices.pop(handle, None)


@dataclass(slots=True)
class GeneratingEngine:
    """The choices of one group, over all of its outlets."""

    plan: CellPlan
    number: int
    cache: RadixCache
    outlets: tuple[Outlet, ...]
    handles: int = 0
    # Outlets by the names of their processes, once they are connected.
    named: dict[str | None, Outlet] = field(default_factory=dict)

    @property
    def open_choices(self) -> int | None:
        """The number of open choices."""
        return sum(len(outlet.choices) for outlet in self.outlets)

    def submit(self, schedule: scheduler_pb2.ScheduleRequest) -> None:
        """Open the choice of a request."""
        token_ids = np.array(schedule.token_ids, np.int32)
        remember(self.cache, view_from_wire(schedule.view), token_ids)
        reply_to = ReplyTo(SubscriberId(schedule.reply_to.subscriber_id), schedule.reply_to.detokenizer or None)
        choice = GeneratedChoice(RequestId(schedule.request_id), schedule.stop.max_tokens)
        self._open(self._outlet(reply_to), choice, reply_to, len(token_ids))

    def abort(self, request_id: str) -> None:
        """End the choice of a request; the detokenizer forgets it with its subscriber."""
        for outlet in self.outlets:
            for handle in [key for key, choice in outlet.choices.items() if choice.request_id == request_id]:
                del outlet.choices[handle]

    def fill(self) -> None:
        """Open the choices of the simulated gateways, each in another phase of its answer."""
        others = self.plan.gateways - 1
        for row in range(round(self.plan.rows * others / self.plan.gateways)):
            outlet = self.outlets[row % len(self.outlets)]
            reply_to = ReplyTo(SubscriberId(subscriber((row + self.number) % others)), outlet.process)
            choice = GeneratedChoice(f"filled-{self.number}-{row}", random.randint(1, self.plan.answer_tokens))
            self._open(outlet, choice, reply_to, self.plan.prompt_words)

    async def run(self) -> None:
        """Step until cancelled, from a random phase on; steps that are late are not made up for."""
        interval_s = self.plan.interval_s
        loop = asyncio.get_running_loop()
        due = loop.time() + random.uniform(0, interval_s)
        while True:
            await asyncio.sleep(due - loop.time())
            for outlet in self.outlets:
                outlet.step()
            due = max(due + interval_s, loop.time())

    def _outlet(self, reply_to: ReplyTo) -> Outlet:
        if not self.named:
            self.named = {outlet.process: outlet for outlet in self.outlets}
        return self.named[reply_to.detokenizer]

    def _open(self, outlet: Outlet, choice: GeneratedChoice, reply_to: ReplyTo, prompt_tokens: int) -> None:
        self.handles += 1
        outlet.open(self.handles, choice, reply_to, prompt_tokens)


def remember(cache: RadixCache, view: View, token_ids: TokenIds) -> None:
    """Insert a prompt into a cache, unless it is full, and count it as evidence."""
    allocator = cache.store.allocator
    lock = cache.commit(view, token_ids)
    fresh = allocator.try_allocate(-(-len(token_ids) // PAGE_SIZE) - len(lock.pages))
    if fresh is None:
        cache.release(lock)
        return
    table = np.concatenate([lock.pages, fresh])
    cache.release(cache.insert(lock, token_ids, table, len(token_ids)).lock)
    allocator.release(table)


async def advance(caches: Iterable[RadixCache]) -> None:
    """Begin an epoch of each cache at its end, until cancelled."""
    epoch_s = CacheSettings().epoch_seconds
    epoch = 0
    while True:
        await asyncio.sleep(epoch_s)
        epoch += 1
        for cache in caches:
            cache.advance(epoch)


def run_groups(plan: CellPlan, first: int, count: int) -> None:
    """Serve some groups until the process ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    uvloop.run(_run(plan, range(first, first + count)))


async def _run(plan: CellPlan, numbers: range) -> None:
    fleet = FleetSettings.model_validate({"state": plan.state, "secret": SECRET})
    rules = CacheConfig(has_fleet=True)
    engines = [
        GeneratingEngine(
            plan,
            number,
            RadixCache(PageAllocator(PAGES), PAGE_SIZE, rules),
            tuple(Outlet(plan.detokenizer(each)) for each in range(plan.detokenizers)),
        )
        for number in numbers
    ]
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            opened = open_fleet(fleet)
            assert opened is not None
            desk = FleetDesk(*opened, rules_of(CacheSettings()), partial(_same, engine.cache))
            tasks.create_task(desk.run())
            for outlet in engine.outlets:
                tasks.create_task(outlet.run())
        tasks.create_task(advance([engine.cache for engine in engines]))
        while not all(outlet.process for engine in engines for outlet in engine.outlets):  # noqa: ASYNC110  (links set it)
            await asyncio.sleep(START_POLL_S)
        _servers = [await start_group(plan.group(engine.number), engine) for engine in engines]
        while not plan.started.exists():  # noqa: ASYNC110  (another process creates it)
            await asyncio.sleep(START_POLL_S)
        for engine in engines:
            if plan.gateways > 1:
                engine.fill()
            tasks.create_task(engine.run())


def _same(cache: RadixCache) -> RadixCache:
    return cache
