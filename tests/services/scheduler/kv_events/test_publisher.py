"""A reader that knows vLLM's format follows a cache, also after it missed messages or events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import zmq
import zmq.asyncio

from common.errors import ConfigurationError
from common.fleet.names import FleetKeys
from services.scheduler import defects
from services.scheduler.event_backlog import EventBacklog
from services.scheduler.kv_events import desk as desk_module
from services.scheduler.kv_events.blocks import BlockIndex
from services.scheduler.kv_events.desk import KVEventDesk
from services.scheduler.kv_events.messages import MEDIUM_DEVICE, AllBlocksCleared, BlockStored, decode
from services.scheduler.kv_events.publisher import END, KVEventPublisher
from tests.services.scheduler.cache.driver import ANN, Driver
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.scheduler.cache.interface import PrefixCache

PAGE = 2


class Reader:
    """Holds the blocks that the messages describe."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.socket.connect(f"ipc://{path}/events")
        self.blocks: set[int] = set()
        self.numbers: list[int] = []
        self.clearings = 0

    async def run(self) -> None:
        while True:
            topic, number, payload = await self.socket.recv_multipart()
            assert topic == b"kv@here@model"
            self.read(number, payload)

    def read(self, number: bytes, payload: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        for event in decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.clearings += 1
            elif event.medium == MEDIUM_DEVICE:
                change = self.blocks.update if isinstance(event, BlockStored) else self.blocks.difference_update
                change(event.block_hashes)


class Scene:
    """A publisher of one cache after the other, with a reader."""

    def __init__(self, path: Path) -> None:
        self.cache: PrefixCache | None = None
        self.path = path
        self.publisher = KVEventPublisher(f"ipc://{path}/events", f"ipc://{path}/replay", "kv@here@model")
        self.desk = KVEventDesk(self.publisher, FleetKeys("s" * 32), PAGE, lambda: self.cache)
        self.reader = Reader(path)

    def pages(self, driver: Driver) -> int:
        return sum(node.edge_tokens for node in driver.cache.dump()) // PAGE

    async def agree(self, driver: Driver) -> None:
        await until(lambda: len(self.reader.blocks) == self.pages(driver))


@pytest.fixture(name="scene")
async def running_scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path)
    works = [asyncio.create_task(work) for work in (scene.reader.run(), scene.desk.run())]
    yield scene
    for work in works:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    scene.reader.context.destroy(linger=0)


async def test_a_reader_follows_one_cache_after_another(scene: Scene) -> None:
    first = Driver()
    first.serve(ANN, [1, 2, 3, 4])
    scene.cache = first.cache
    await scene.agree(first)
    first.serve(ANN, [1, 2, 5, 6])
    await scene.agree(first)
    first.cache.evict(1)
    await scene.agree(first)
    assert scene.reader.clearings == 1
    second = Driver()
    second.serve(ANN, [9] * 6)
    scene.cache = second.cache
    await until(lambda: scene.reader.clearings == 2)
    await scene.agree(second)
    assert scene.reader.numbers == list(range(len(scene.reader.numbers)))


async def test_lost_events_lead_to_a_new_description(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "EventBacklog", lambda: EventBacklog(limit=2))
    driver = Driver()
    scene.cache = driver.cache
    await until(lambda: scene.reader.clearings == 1)
    for token in range(1, 9):
        driver.serve(ANN, [token] * 4)
    await until(lambda: scene.reader.clearings == 2)
    await scene.agree(driver)


async def test_a_defect_leads_to_a_new_description(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defects, "FIRST_PAUSE_S", 0.0)
    driver = Driver()
    scene.cache = driver.cache
    await until(lambda: scene.reader.clearings == 1)
    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "apply", Mock(side_effect=KeyError("no such block")))
        driver.serve(ANN, [1, 2, 3, 4])
        await until(lambda: scene.reader.clearings >= 2)
    await scene.agree(driver)


async def test_a_late_reader_fetches_what_it_missed(scene: Scene) -> None:
    driver = Driver()
    scene.cache = driver.cache
    for token in range(1, 4):
        driver.serve(ANN, [token] * 4)
        await scene.agree(driver)
    late = Reader(scene.path)
    for first in (0, 2, 99):
        messages = await replayed(late, scene.path, first)
        assert [int.from_bytes(number, "big") for number, _ in messages] == scene.reader.numbers[first:]
        if first == 0:
            for number, payload in messages:
                late.read(number, payload)
    assert late.blocks == scene.reader.blocks
    late.context.destroy(linger=0)


async def replayed(reader: Reader, path: Path, first: int) -> list[tuple[bytes, bytes]]:
    """Return the numbers and payloads of the messages from `first` on."""
    socket = reader.context.socket(zmq.DEALER)
    socket.connect(f"ipc://{path}/replay")
    await socket.send(b"a request without a number")
    await socket.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[bytes, bytes]] = []
    while True:
        empty, number, payload = await socket.recv_multipart()
        assert empty == b""
        if number == END:
            return found
        found.append((number, payload))


async def test_an_endpoint_without_a_port_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    first = KVEventPublisher(f"ipc://{tmp_path}/events")
    with pytest.raises(
        ConfigurationError, match=r"scheduler\.kv_events\.replay_endpoint: cannot listen on tcp://nowhere"
    ):
        KVEventPublisher(f"ipc://{tmp_path}/others", "tcp://nowhere")
    first.close()
