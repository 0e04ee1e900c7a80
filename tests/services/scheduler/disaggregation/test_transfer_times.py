"""How much of the transfers' time is hidden behind a remote prefill, with workers and a clock that are simulated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import REGISTRY

from common.types import RequestId
from protos.gen.pando.v1 import scheduler_pb2
from services.scheduler.cache.tiers.config import HostConfig
from services.scheduler.core.costs import FIRST_PEER_TOKENS
from services.scheduler.disaggregation import prefill_client
from services.scheduler.disaggregation.prefill_client import PrefillClient
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request
from tests.waiting import until

if TYPE_CHECKING:
    from common.transfers import PeerPages, TransferId
    from tests.fakes.simulated_worker import Content

PAGE = 4
CHUNKS, PAGES_OF_CHUNK = 4, 3
PROMPT = [(13 * position) % 900 + 10 for position in range(CHUNKS * PAGES_OF_CHUNK * PAGE + 1)]
MOST_SECONDS = 200


def lend(peer: PeerPages) -> list[Content]:
    """Return pages of the prompt: number i holds its tokens from i * PAGE on."""
    return [
        [(PROMPT[position], position) for position in range(page * PAGE, (page + 1) * PAGE)]
        for page in peer.device_pages.tolist()
    ]


@dataclass
class FakeLoop:
    """The decode group's loop, as far as the client uses it."""

    harness: Harness

    @property
    def now(self) -> float:
        return self.harness.now

    def can_use_pages(self, _fingerprint: str, _kv_identity: str) -> bool:
        return True

    def wake(self) -> None:
        """The test plans by itself."""


class FakeCall:
    """The prefill group's answer to a call."""

    def __init__(self, computing_us: int | None = None) -> None:
        """Say with the last message that the prompt took so long to compute."""
        self._computing_us = computing_us
        self._messages: asyncio.Queue[scheduler_pb2.PrefillResponse] = asyncio.Queue()

    def answer(self, chunk: int) -> None:
        """Offer the pages of a chunk of the prompt."""
        pages = range(chunk * PAGES_OF_CHUNK, (chunk + 1) * PAGES_OF_CHUNK)
        self._messages.put_nowait(
            scheduler_pb2.PrefillResponse(
                workers=["worker"],
                lease=bytes(16),
                device_pages=pages,
                is_last=chunk == CHUNKS - 1,
                computing_us=self._computing_us if chunk == CHUNKS - 1 else None,
            )
        )

    async def read(self) -> scheduler_pb2.PrefillResponse:
        return await self._messages.get()

    def cancel(self) -> None:
        """Nothing is kept."""


class Simulation:
    """A prompt whose chunks take `chunk_s` to compute, and whose transfers `transfer_s` each."""

    def __init__(self, chunk_s: int, transfer_s: int, computing_s: int | None = None, rate: float = 0.0) -> None:
        """The prefill group says that the prompt took `computing_s`; `rate` are tokens per second of this group."""
        self.harness = Harness(host=HostConfig(pages=32), prefill_tokens_per_s=rate)
        self.harness.worker.read_peer = lend
        self._chunk_s, self._transfer_s = chunk_s, transfer_s
        self._call, channel = FakeCall(computing_s and computing_s * 1_000_000), MagicMock()
        channel.unary_stream.return_value = lambda _request: self._call
        loop: Any = FakeLoop(self.harness)
        self._client = PrefillClient(loop, lambda _address, _name: channel, 1)
        self._ends: dict[TransferId, float] = {}

    async def run(self) -> None:
        """Serve one request; a second of the clock goes by after the other."""
        core = self.harness.core
        request = replace(make_request("one", PROMPT, max_tokens=2), prefill_group="unix:/elsewhere")
        assert core.submit(request, 0.0).rejected is None
        sequence = core.leader_of(RequestId("one"))
        assert sequence is not None
        self._client.consider(core, sequence)
        fetch = sequence.remote
        assert fetch is not None
        while not fetch.is_done:
            self.harness.now += 1
            assert self.harness.now < MOST_SECONDS
            self._complete_transfers()
            chunk, rest = divmod(int(self.harness.now), self._chunk_s)
            if not rest and 0 < chunk <= CHUNKS:
                self._call.answer(chunk - 1)
                await until(lambda: fetch.is_complete or len(fetch.offered) == chunk * PAGES_OF_CHUNK)  # noqa: B023
            self._plan()
        await until(lambda: not self._client._tasks)
        self.harness.run()
        assert self.harness.outputs["one", 0] == expected_output(PROMPT, len(PROMPT) + 2, (STOP_ID,))

    def _plan(self) -> None:
        self.harness.plan()
        while self.harness.result():
            pass
        for transfer_id in self.harness.worker.open:
            self._ends.setdefault(transfer_id, self.harness.now + self._transfer_s)

    def _complete_transfers(self) -> None:
        for transfer_id in list(self.harness.worker.open):
            if self._ends[transfer_id] <= self.harness.now:
                self.harness.complete(transfer_id, 0)


def learned(simulation: Simulation) -> int:
    assert simulation.harness.core.memory.loads is not None
    return simulation.harness.core.memory.loads.costs.least_peer_tokens()


def totals() -> tuple[float, float, float]:
    """Return fetched prompts, and the seconds of their transfers and those that they waited for, since start."""
    name = "pando_scheduler_remote_prefill"
    fetched = REGISTRY.get_sample_value(f"{name}s_total", {"outcome": "fetched"}) or 0.0
    transfer, exposed = (REGISTRY.get_sample_value(f"{name}_{kind}_seconds_total") for kind in ("transfer", "exposed"))
    assert transfer is not None
    assert exposed is not None
    return fetched, transfer, exposed


@pytest.mark.parametrize(
    ("chunk_s", "transfer_s", "expected"),
    [
        # All transfers but the last one run while the next chunk is computed.
        pytest.param(10, 2, (1, 4 * 2, 2), id="a slow prefill hides transfers"),
        # The prompt is computed at 4 s; one transfer brings the first chunk by 11 s, another the rest by 21 s.
        pytest.param(1, 10, (1, 2 * 10, 21 - 4), id="a slow link exposes them"),
    ],
)
async def test_time_hidden_behind_the_prefill(
    monkeypatch: pytest.MonkeyPatch, chunk_s: int, transfer_s: int, expected: tuple[float, float, float]
) -> None:
    monkeypatch.setattr(prefill_client, "WATCH_S", 0.0)
    before = totals()
    await Simulation(chunk_s, transfer_s).run()
    assert tuple(after - first for after, first in zip(totals(), before, strict=True)) == pytest.approx(expected)


async def test_a_prompt_whose_pages_cannot_be_read_counts_as_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_client, "WATCH_S", 0.0)
    before, simulation = totals(), Simulation(1, 10)
    simulation.harness.worker.read_peer = lambda _peer: []
    await simulation.run()
    assert totals() == before


@pytest.mark.parametrize(
    ("chunk_s", "transfer_s", "computing_s", "delay_s"),
    [
        pytest.param(10, 2, 40, 2, id="the last transfer, after the prompt was computed"),
        pytest.param(1, 10, 4, 17, id="a slow link"),
        pytest.param(10, 2, 15, 27, id="a queue of the prefill group"),
    ],
)
async def test_what_leaving_a_prompt_to_another_group_takes_decides_from_which_length_on_it_is(
    monkeypatch: pytest.MonkeyPatch, chunk_s: int, transfer_s: int, computing_s: int, delay_s: int
) -> None:
    monkeypatch.setattr(prefill_client, "WATCH_S", 0.0)
    simulation = Simulation(chunk_s, transfer_s, computing_s, rate=100.0)
    # Passes of the simulated worker are not to change the rate.
    monkeypatch.setattr(simulation.harness.core.memory.loads.costs, "saw_prefill", lambda *_: None)  # type: ignore[union-attr]  # it has a host tier
    assert learned(simulation) == FIRST_PEER_TOKENS
    await simulation.run()
    assert learned(simulation) == 100 * delay_s


async def test_prompts_with_images_teach_nothing_as_they_may_wait_for_an_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_client, "WATCH_S", 0.0)
    simulation = Simulation(10, 2, 40, rate=100.0)
    note = simulation._client._note_fetched
    noted: list[None] = []

    def with_image(core: Any, sequence: Any, *given: Any) -> None:
        noted.append(note(core, MagicMock(request=MagicMock(images=(1,)), arrived_at=sequence.arrived_at), *given))

    monkeypatch.setattr(simulation._client, "_note_fetched", with_image)
    await simulation.run()
    assert noted == [None]
    assert learned(simulation) == FIRST_PEER_TOKENS


async def test_a_prefill_group_that_does_not_say_how_long_it_computed_teaches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of an earlier version."""
    monkeypatch.setattr(prefill_client, "WATCH_S", 0.0)
    simulation = Simulation(10, 2, rate=100.0)
    await simulation.run()
    assert learned(simulation) == FIRST_PEER_TOKENS
