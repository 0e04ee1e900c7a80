"""Unexpected exceptions: work of one part begins again, a half changed core ends the service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import REGISTRY

from common.errors import BrokenStateError, ConfigurationError, UnavailableError
from common.settings import SchedulerSettings, Settings
from common.types import RequestId
from services.scheduler.__main__ import engine_spec
from services.scheduler.core.output import EndedChoice
from services.scheduler.defects import begin_again, changing_state
from services.scheduler.encoder_desk import EncoderDesk
from services.scheduler.loop import SchedulerLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def counted(part: str) -> float:
    return REGISTRY.get_sample_value("pando_scheduler_defects_total", {"part": part}) or 0.0


class Work:
    """Raises one exception after the other, then ends."""

    def __init__(self, *errors: BaseException) -> None:
        self.times = 0
        self._errors = list(errors)

    async def __call__(self) -> None:
        self.times += 1
        if self._errors:
            raise self._errors.pop(0)


class Pauses:
    """Takes the place of `asyncio.sleep`."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr("services.scheduler.defects.asyncio.sleep", pauses)
    return pauses


async def test_work_begins_again_after_growing_pauses_and_each_defect_is_counted(pauses: Pauses) -> None:
    before, work = counted("a test"), Work(*(KeyError("x") for _ in range(8)))
    await begin_again("a test", work)
    assert work.times == 9
    assert counted("a test") - before == 8
    assert pauses.seconds == [0.5, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("error", [BrokenStateError("x"), ConfigurationError("x"), asyncio.CancelledError()])
async def test_what_must_end_the_service_does(error: BaseException, pauses: Pauses) -> None:
    work = Work(error)
    with pytest.raises(type(error)):
        await begin_again("a test", work)
    assert (work.times, pauses.seconds) == (1, [])


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("x"), ValueError("x")])
def test_an_interrupted_change_is_a_broken_state(error: Exception) -> None:
    with pytest.raises(BrokenStateError) as raised, changing_state():
        raise error
    assert raised.value.__cause__ is error


def test_a_refusal_is_no_broken_state() -> None:
    with pytest.raises(UnavailableError), changing_state():
        raise UnavailableError("later")


CHANGES: dict[str, Callable[[SchedulerLoop], object]] = {
    "end_silently": lambda loop: loop.on_choices_ended([EndedChoice(1, None)]),
    "abort": lambda loop: loop.abort(RequestId("one")),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_defect_of_the_core_ends_the_service_whichever_peer_has_led_to_it(change: str) -> None:
    loop, core = SchedulerLoop(SchedulerSettings()), MagicMock()
    getattr(core, change).side_effect = KeyError("row")
    loop.core = core
    with pytest.raises(BrokenStateError):
        CHANGES[change](loop)
    with pytest.raises(ExceptionGroup) as raised:
        await loop.run()
    assert raised.group_contains(BrokenStateError)


class Encodings:
    """The core's book of encodings, whose `finish` fails or not."""

    def __init__(self, *, fails: bool) -> None:
        self.finished = asyncio.Event()
        self._fails = fails

    def finish(self, _encoding: object, *, is_kept: bool) -> None:
        assert not is_kept
        self.finished.set()
        if self._fails:
            raise KeyError("output")


def encoder_desk(servers: Iterable[str] = ()) -> EncoderDesk:
    group = MagicMock()
    group.spec = engine_spec(Settings())
    return EncoderDesk(list(servers), MagicMock(), MagicMock(), group, 1, 1.0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_defect_of_a_call_to_an_encoder_leaves_the_image_to_the_workers_and_one_of_the_core_ends_the_service(
    monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    desk, core, encodings = encoder_desk(), MagicMock(), Encodings(fails=fails)
    core.memory.images.encodings = encodings

    async def encode(*_arguments: Any) -> bool:
        raise TypeError("a defect")

    monkeypatch.setattr(desk, "_encode", encode)
    monkeypatch.setattr(desk, "_serving", lambda: [MagicMock(embeddings=0)])
    before, running = counted("encoders"), asyncio.create_task(desk.run())
    desk.start(core, MagicMock())
    await encodings.finished.wait()
    assert counted("encoders") - before == 1
    if fails:
        with pytest.raises(ExceptionGroup) as raised:
            await running
        assert raised.group_contains(BrokenStateError)
    else:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
