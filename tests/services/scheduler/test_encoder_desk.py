"""The scheduler's use of workers that only encode images, over real gRPC."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigurationError
from common.images import image_ids
from common.rpc.server import RpcServer
from common.settings import Settings
from common.types import RowImage
from common.wire.requests import schedule_request_to_wire
from protos.gen.pando.v1 import scheduler_pb2, worker_pb2_grpc
from services.scheduler.__main__ import serve
from services.scheduler.core.encodings import Encoding
from services.scheduler.encoder_desk import BEAT_S
from services.scheduler.rank import ENCODE_TIMEOUT_S
from tests.fakes.simulated_worker import expected_output
from tests.fakes.worker_service import FakeWorkerService
from tests.services.scheduler.core.harness import make_request
from tests.services.scheduler.pipeline import ADMIN, Pipeline
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator
    from pathlib import Path

    from common.types import ScheduleRequest

STOP = 7


class Apart:
    """A pipeline whose two ranks read from an encoder."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(folder, encoders=(f"unix:{folder}/encoder.sock",))
        self.address = f"unix:{folder}/encoder.sock"
        self.encoder = FakeWorkerService()
        self.ranks = self.pipeline.workers
        for worker in (self.encoder, *self.ranks):
            worker.images.identity = "alike"
            worker.images.read = self.read
        self.server: RpcServer | None = None

    def read(self, encoder: str, ticket: bytes) -> bytes | None:
        assert encoder == self.address
        return self.encoder.images.tickets.get(ticket)

    async def start_encoder(self) -> None:
        self.server = RpcServer("pando.v1.Worker", self.address)
        self.server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self.encoder)
        await self.server.start()

    async def stop_encoder(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def encoder_ready(self) -> None:
        await until(lambda: REGISTRY.get_sample_value("pando_scheduler_encoders") == 1)

    async def submit(self, name: str, first: int, shade: float, user: str = "alice") -> ScheduleRequest:
        request = ask(name, first, shade, user)
        assert not (await self.pipeline.submit_wire(schedule_request_to_wire(request))).HasField("rejected")
        return request

    async def answered(self, request: ScheduleRequest) -> None:
        await self.pipeline.finished(request.request_id)
        expected = expected_output(request.token_ids.tolist(), len(request.token_ids) + 3, (STOP,))
        assert self.pipeline.detokenizer.output_of(request.request_id) == expected

    def encoded_by_ranks(self) -> list[list[int]]:
        assert self.ranks[0].simulated is not None
        return self.ranks[0].simulated.images.encoded


def ask(name: str, first: int, shade: float, user: str) -> ScheduleRequest:
    pixels = np.full((2, 3), shade, np.float32)
    image = RowImage(sha256(pixels.tobytes()).digest(), 1, 6, (1, 2), pixels)
    request = make_request(name, [first, *image_ids(image.digest, 6).tolist(), 9], user=user, max_tokens=3)
    return replace(request, images=(image,))


@pytest.fixture
def no_searches() -> Iterator[None]:
    """No garbage collection of cycles, after a last one: with many objects it stops heartbeats for seconds."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def apart(tmp_path: Path) -> AsyncIterator[Apart]:
    apart = Apart(tmp_path)
    await apart.start_encoder()
    await apart.pipeline.start()
    await apart.pipeline.ready()
    yield apart
    await apart.pipeline.stop()
    await apart.stop_encoder()


async def test_images_are_encoded_apart_and_read_by_all_ranks(apart: Apart) -> None:
    await apart.encoder_ready()
    (configured,) = apart.encoder.configured
    assert (configured.rank, configured.world_size) == (0, 1)
    assert configured.model == apart.ranks[0].configured[0].model
    one = await apart.submit("one", 20, 0.5)
    await apart.answered(one)
    assert apart.encoder.images.encoded == [6]
    assert apart.encoded_by_ranks() == []
    for rank in apart.ranks:
        assert rank.simulated is not None
        assert list(rank.simulated.images.kept.values()) == [one.images[0].digest]
        assert min(rank.simulated.images.kept) > 2**32, "numbers of another scheduler's outputs are others"
    await until(lambda: not apart.encoder.images.tickets)
    # Another question, and another user.
    await apart.answered(await apart.submit("two", 21, 0.5))
    assert apart.encoder.images.encoded == [6]
    await apart.answered(await apart.submit("other", 22, 0.5, user="bob"))
    assert apart.encoder.images.encoded == [6, 6]
    assert apart.encoded_by_ranks() == []


@pytest.mark.parametrize("what", ["encodes", "is read by one rank only", "is of another model", "is away"])
async def test_ranks_encode_what_the_encoder_cannot(apart: Apart, what: str) -> None:
    if what == "is away":
        await apart.encoder_ready()
        await apart.stop_encoder()
    elif what == "is of another model":
        apart.encoder.images.identity = "different"
        apart.encoder.process = "second"
        await until(lambda: len(apart.encoder.configured) > 1)
    elif what == "encodes":
        await apart.encoder_ready()
        apart.encoder.images.refusal = "out of luck"
    else:
        await apart.encoder_ready()
        apart.ranks[1].images.read = lambda _encoder, _ticket: None
    await apart.answered(await apart.submit("one", 20, 0.5))
    assert apart.encoded_by_ranks() == [[6]]


async def test_an_image_that_ranks_could_not_read_is_freed_without_a_search_for_cycles(
    no_searches: None, apart: Apart
) -> None:
    await apart.encoder_ready()
    apart.ranks[1].images.read = lambda _encoder, _ticket: None
    await apart.answered(await apart.submit("one", 20, 0.5))
    assert apart.encoder.images.encoded == [6]
    async with asyncio.timeout(60):
        while any(isinstance(each, Encoding) for each in gc.get_objects()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_texts_are_answered_while_an_image_is_encoded_and_an_abort_ends_its_wait(apart: Apart) -> None:
    await apart.encoder_ready()
    apart.encoder.images.gate.clear()
    await apart.submit("one", 20, 0.5)
    await until(lambda: apart.encoder.images.encoded == [6])
    await apart.pipeline.submit("text", max_tokens=3)
    await apart.pipeline.finished("text")
    await apart.pipeline.abort("one")
    await apart.pipeline.finished("one")
    apart.encoder.images.gate.set()
    await until(lambda: not apart.encoder.images.tickets)
    # It was encoded nonetheless, and is found.
    await apart.answered(await apart.submit("two", 21, 0.5))
    assert apart.encoder.images.encoded == [6]
    assert apart.encoded_by_ranks() == []


async def test_images_do_not_wait_for_an_encoder_that_answers_nothing_any_more(apart: Apart) -> None:
    await apart.encoder_ready()
    apart.encoder.images.gate.clear()
    apart.encoder.answers.clear()
    async with asyncio.timeout(ENCODE_TIMEOUT_S / 2):
        await apart.answered(await apart.submit("one", 20, 0.5))
    assert apart.encoder.images.encoded == [6]
    assert apart.encoded_by_ranks() == [[6]]
    apart.encoder.images.gate.set()
    apart.encoder.answers.set()
    await apart.encoder_ready()
    await apart.answered(await apart.submit("two", 21, 0.25))
    assert apart.encoder.images.encoded == [6, 6]
    await until(lambda: not apart.encoder.images.tickets)


async def test_an_encoder_that_hangs_is_not_asked_again_until_it_makes_progress(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.rank.ENCODE_TIMEOUT_S", 0.2)
    await apart.encoder_ready()
    apart.encoder.images.gate.clear()
    apart.encoder.heartbeat_age_s = 60.0
    await apart.answered(await apart.submit("one", 20, 0.5))
    assert apart.encoder.images.encoded == [6]
    # It answers heartbeats, but its engine does not get on.
    await asyncio.sleep(3 * BEAT_S)
    assert REGISTRY.get_sample_value("pando_scheduler_encoders") == 0
    await apart.answered(await apart.submit("two", 21, 0.25))
    assert apart.encoder.images.encoded == [6]
    assert len(apart.encoded_by_ranks()) == 2
    apart.encoder.heartbeat_age_s = 1e6
    await until(lambda: len(apart.encoder.configured) > 1)
    apart.encoder.heartbeat_age_s = 0.0
    apart.encoder.images.gate.set()
    await apart.encoder_ready()
    await apart.answered(await apart.submit("three", 22, 0.75))
    assert apart.encoder.images.encoded == [6, 6]


async def test_an_encoder_that_restarts_and_weights_that_are_replaced_are_configured_again(apart: Apart) -> None:
    await apart.encoder_ready()
    apart.encoder.process = "second"
    await until(lambda: len(apart.encoder.configured) == 2)
    await apart.encoder_ready()
    await apart.answered(await apart.submit("one", 20, 0.5))
    update = scheduler_pb2.UpdateWeightsRequest(model="other", mode=scheduler_pb2.WEIGHTS_UPDATE_MODE_DRAIN)
    await apart.pipeline.stub.UpdateWeights(update, timeout=60, metadata=ADMIN)
    await until(lambda: apart.encoder.configured[-1].model == "other")
    await apart.encoder_ready()
    await apart.answered(await apart.submit("two", 21, 0.5))
    assert apart.encoded_by_ranks() == []


async def test_an_encoder_sleeps_and_wakes_with_its_group(apart: Apart) -> None:
    await apart.encoder_ready()
    await apart.answered(await apart.submit("one", 20, 0.5))
    stub = apart.pipeline.stub
    await stub.Sleep(
        scheduler_pb2.SchedulerSleepRequest(level=1, mode=scheduler_pb2.SLEEP_MODE_DRAIN),
        timeout=60,
        metadata=ADMIN,
    )
    await until(lambda: apart.encoder.slept == [(1, False)])
    assert REGISTRY.get_sample_value("pando_scheduler_encoders") == 0
    await stub.WakeUp(scheduler_pb2.SchedulerWakeUpRequest(), timeout=60, metadata=ADMIN)
    await apart.encoder_ready()
    assert len(apart.encoder.configured) == 2
    await apart.answered(await apart.submit("two", 21, 0.5))
    # What the ranks kept is gone with their memory.
    assert apart.encoder.images.encoded == [6, 6]


async def test_an_encoder_sleeps_at_the_level_of_ranks_that_take_long_to_fall_asleep(apart: Apart) -> None:
    await apart.encoder_ready()
    apart.ranks[0].sleeps.clear()
    request = scheduler_pb2.SchedulerSleepRequest(level=1, mode=scheduler_pb2.SLEEP_MODE_DRAIN)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(awaited(apart.pipeline.stub.Sleep(request, timeout=60, metadata=ADMIN)))
        await until(lambda: apart.ranks[0].slept)
        await asyncio.sleep(2 * BEAT_S)
        assert apart.encoder.slept == []
        apart.ranks[0].sleeps.set()
    await until(lambda: apart.encoder.slept)
    assert apart.encoder.slept == [(1, False)]


async def awaited(call: Awaitable[object]) -> None:
    await call


@pytest.mark.parametrize(
    ("scheduler", "model", "reason"),
    [
        ({"vision": {"kept_embeddings": 0}}, {}, "kept_embeddings"),
        ({}, {"images": "off"}, "requires a model with images"),
        ({"device_turns": {"enabled": True, "directory": "/nowhere"}}, {}, "take turns"),
    ],
)
async def test_settings_with_which_encoders_would_have_nothing_to_do_are_refused(
    scheduler: dict[str, Any], model: dict[str, Any], reason: str
) -> None:
    section = {"encoders": ("unix:/nowhere/encoder",), "address": "unix:/nowhere/scheduler", **scheduler}
    with pytest.raises(ConfigurationError, match=reason):
        await serve(Settings.model_validate({"scheduler": section, "model": model}), asyncio.Event())
