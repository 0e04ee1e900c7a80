"""Pixels that a scheduler keeps are not sent to it again; those that it lacks are, without the gateway's notice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from common import recent_images
from common.errors import UnavailableError
from common.recent_images import KEPT_S
from common.rpc.channel import open_channel
from common.rpc.server import RpcServer
from common.types import CacheMode, ErrorCode, RequestId, RequestOptions, RowImage, Subject, View
from protos.gen.pando.v1 import scheduler_pb2_grpc
from services.tokenizer.scheduler_link import SchedulerLink
from tests.fakes.scheduler import FakeScheduler
from tests.services.tokenizer.routing.requests import schedule
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from common.types import Admission, LoadReport, ScheduleRequest

SCHEDULER = "pando.v1.Scheduler"
PIXELS = np.arange(8, dtype=np.float32).reshape(4, 2)
ANN, BOB = View(Subject("acme", "ann")), View(Subject("acme", "bob"))


class Listener:
    def __init__(self) -> None:
        self.admissions: list[Admission] = []
        self.losses = 0

    def on_admissions(self, admissions: Iterable[Admission]) -> None:
        self.admissions += admissions

    def on_load(self, load: LoadReport) -> None:
        """Ignore it."""

    def on_scheduler_lost(self, lost: Iterable[RequestId] | None = None) -> None:
        self.losses += 1


class Bench:
    def __init__(self, folder: Path) -> None:
        self.scheduler = FakeScheduler()  # type: ignore[abstract]  # the generated base answers what it doesn't
        self.scheduler.keeps_images = True
        self.listener = Listener()
        self._address = f"unix:{folder / 'scheduler.sock'}"
        self.channel = open_channel(self._address)
        self.link = SchedulerLink(self.channel)
        self._server: RpcServer | None = None

    async def start(self) -> None:
        self._server = RpcServer(SCHEDULER, self._address)
        self._server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self.scheduler)
        await self._server.start()
        await until(lambda: self.link.is_connected)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace_s=0)
            self._server = None
            await until(lambda: not self.link.is_connected)

    async def send(self, *requests: ScheduleRequest) -> list[Admission]:
        """Submit requests, and return their answers."""
        self.listener.admissions.clear()
        self.link.submit(requests)
        await until(lambda: len(self.listener.admissions) == len(requests))
        return list(self.listener.admissions)

    def pixels(self) -> list[tuple[str, list[bool]]]:
        """Return the requests that the scheduler got, and which of their images had pixels."""
        return [(each.request_id, [bool(image.shape) for image in each.images]) for each in self.scheduler.requests]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked through a hundred times a second."""
    monkeypatch.setattr(recent_images, "EXPIRY_S", 0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    running = asyncio.create_task(bench.link.run(bench.listener))
    await bench.start()
    try:
        yield bench
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await bench.stop()
        await bench.channel.close()


def seen(
    name: str, *digests: bytes, view: View = ANN, mode: CacheMode = CacheMode.DEFAULT, grid: tuple[int, ...] = (1, 2, 2)
) -> ScheduleRequest:
    images = tuple(RowImage(digest, offset, 1, grid, PIXELS) for offset, digest in enumerate(digests))
    return replace(schedule(name), view=view, images=images, options=RequestOptions(cache_mode=mode))


async def test_pixels_that_the_scheduler_keeps_for_the_view_are_sent_once(bench: Bench) -> None:
    await bench.send(seen("1", b"a"))
    answers = await bench.send(seen("2", b"a", b"b"), seen("3", b"a", view=BOB), seen("4", b"a", grid=(1, 4, 1)))
    await bench.send(seen("5", b"a", b"b"))
    assert bench.pixels() == [
        ("1", [True]), ("2", [False, True]), ("3", [True]), ("4", [True]), ("5", [False, False]),
    ]  # fmt: skip
    # The refusal for want of pixels, and what the scheduler keeps, are nothing to those above.
    assert [(each.request_id, each.rejected, each.keeps_images) for each in answers] == [
        ("2", None, False), ("3", None, False), ("4", None, False),
    ]  # fmt: skip


async def test_nothing_is_left_out_for_requests_that_use_no_cache_or_if_nothing_is_kept(bench: Bench) -> None:
    await bench.send(seen("1", b"a"))
    await bench.send(seen("2", b"a", mode=CacheMode.NONE))
    bench.scheduler.keeps_images = False
    await bench.send(seen("3", b"new"))
    await bench.send(seen("4", b"new"))
    assert bench.pixels() == [("1", [True]), ("2", [True]), ("3", [True]), ("4", [True])]


async def test_pixels_are_sent_after_all_if_the_scheduler_lacks_them(bench: Bench) -> None:
    await bench.send(seen("1", b"a", b"b"))
    bench.scheduler.lacks_images, bench.scheduler.keeps_images = True, False
    bench.scheduler.messages.clear()
    (answer,) = await bench.send(seen("2", b"a", b"b"))
    assert bench.pixels() == [("2", [False, False]), ("2", [True, True])]
    assert (answer.rejected, answer.lacks_images) == (None, False)
    await bench.send(seen("3", b"a"))
    assert bench.pixels()[2:] == [("3", [True])]


async def test_a_request_that_is_refused_with_all_pixels_is_not_sent_again(bench: Bench) -> None:
    await bench.send(seen("1", b"a"))
    bench.scheduler.lacks_all_images = True
    for name, attempts in (("2", [[False], [True]]), ("3", [[True]])):
        bench.scheduler.messages.clear()
        (answer,) = await bench.send(seen(name, b"a"))
        assert answer.rejected is not None
        assert (answer.rejected.code, answer.lacks_images) == (ErrorCode.UNAVAILABLE, False)
        assert bench.pixels() == [(name, attempt) for attempt in attempts]
    bench.scheduler.lacks_all_images = False
    (answer,) = await bench.send(seen("4", b"a"))
    assert answer.rejected is None


async def test_a_request_that_was_aborted_meanwhile_is_not_sent_again(bench: Bench) -> None:
    await bench.send(seen("1", b"a"))
    bench.scheduler.lacks_images = True
    bench.scheduler.messages.clear()
    bench.listener.admissions.clear()
    bench.link.submit([seen("2", b"a")])
    bench.link.abort([RequestId("2")])
    await until(lambda: bench.listener.admissions)
    await bench.send(seen("3", b"new"))
    assert [name for name, _ in bench.pixels()] == ["2", "3"]
    (answer,) = [each for each in [*bench.listener.admissions] if each.request_id == "3"]
    assert answer.rejected is None


async def test_another_scheduler_process_is_sent_everything(bench: Bench) -> None:
    await bench.send(seen("1", b"a"))
    await bench.stop()
    await bench.start()
    await bench.send(seen("2", b"a"))
    assert bench.pixels() == [("1", [True]), ("2", [True])]


@pytest.mark.usefixtures("often")
async def test_names_of_images_are_dropped_in_time_without_further_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.send(seen("1", b"a"))
    kept = bench.link._kept_images
    assert len(kept) == 1
    monkeypatch.setattr(kept, "_clock", lambda: time.monotonic() + KEPT_S)
    await until(lambda: not len(kept))


async def test_a_request_that_cannot_be_sent_again_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.send(seen("1", b"a"))
    bench.scheduler.lacks_images = True
    bench.listener.admissions.clear()
    bench.link.submit([seen("2", b"a")])

    def refuse(_message: object) -> None:
        raise UnavailableError("the scheduler does not keep up")

    monkeypatch.setattr(bench.link._link, "send", refuse)
    await until(lambda: bench.listener.admissions)
    (answer,) = bench.listener.admissions
    assert answer.rejected is not None
    assert (answer.rejected.code, answer.lacks_images) == (ErrorCode.UNAVAILABLE, False)
    assert "keep up" in answer.rejected.message
