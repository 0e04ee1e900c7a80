"""Clients of the real gateway: each has one streamed answer open, and asks again when it has ended."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deploy.evaluation.bench.client import AnswerReader, OpenAIClient, RequestTemplate
from deploy.evaluation.bench.clock import SystemClock
from deploy.evaluation.bench.prompts import PromptMaker
from deploy.evaluation.bench.records import BenchRequest, Segment
from deploy.evaluation.bench.transport import HttpClient, TransportError
from deploy.evaluation.experiments.cell.gateways import MODEL, Prompts

if TYPE_CHECKING:
    from deploy.evaluation.experiments.cell.plan import CellPlan

TIMEOUT_S = 3600.0
# Answers that begin at the same time, so that none waits for the beginning of all others.
BEGINNING = 32


@dataclass(slots=True)
class Exchange:
    """One request and what has come of its answer."""

    sent_s: float
    reader: AnswerReader
    failure: str | None = None
    # Set with the first output.
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def feed(self, piece: bytes) -> None:
        """Read the next bytes of the answer."""
        self.reader.feed(piece)
        if self.reader.chunks_s:
            self.begun.set()


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """The answers that clients received in a window."""

    events: int
    """Server-sent events with output."""
    requests: int
    ttft_ms: tuple[float, float]
    """p50 and p99 of those sent within the window."""
    gap_ms: tuple[float, float]
    """p50 and p99 of the times between events."""
    failures: int


class Clients:
    """All clients of one gateway."""

    def __init__(self, plan: CellPlan, url: str) -> None:
        """Prepare as many streams as `plan` gives one gateway."""
        self.exchanges: list[Exchange] = []
        self._plan = plan
        self._http = HttpClient(url)
        template = RequestTemplate(MODEL)
        self._client = OpenAIClient(self._http, PromptMaker(), template, SystemClock())
        self._prompts = Prompts(plan.prompt_words, "clients")
        self._numbers = itertools.count()
        self._beginning = asyncio.Semaphore(BEGINNING)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.streams):
                tasks.create_task(self._ask_on())

    @property
    def begun(self) -> int:
        """Number of answers that have begun."""
        return sum(exchange.begun.is_set() for exchange in self.exchanges)

    def figures(self, begin_s: float, end_s: float) -> ClientFigures:
        """Return the answers received from `begin_s` to `end_s`, in seconds of `time.perf_counter`'s clock."""
        firsts, gaps, events = [], [], 0
        for exchange in self.exchanges:
            times = np.array(exchange.reader.chunks_s)
            within = (times >= begin_s) & (times < end_s)
            events += int(within.sum())
            gaps.append(np.diff(times)[within[1:]])
            if exchange.sent_s >= begin_s and len(times) and times[0] < end_s:
                firsts.append(times[0] - exchange.sent_s)
        return ClientFigures(
            events,
            sum(begin_s <= exchange.sent_s < end_s for exchange in self.exchanges),
            _percentiles_ms(np.array(firsts)),
            _percentiles_ms(np.concatenate(gaps)),
            sum(exchange.failure is not None for exchange in self.exchanges),
        )

    async def _ask_on(self) -> None:
        """Ask one request after the other, the first one for a part of an answer, so that not all end at once."""
        tokens = random.randint(1, self._plan.answer_tokens)
        async with self._beginning:
            exchange, asking = self._begin(tokens)
            await exchange.begun.wait()
        while True:
            await asking
            _, asking = self._begin(self._plan.answer_tokens)

    def _begin(self, tokens: int) -> tuple[Exchange, asyncio.Task[None]]:
        exchange = Exchange(now(), AnswerReader(now))
        self.exchanges.append(exchange)
        return exchange, asyncio.create_task(self._ask(exchange, tokens))

    async def _ask(self, exchange: Exchange, tokens: int) -> None:
        number = next(self._numbers)
        segment = Segment(f"{number}", self._plan.prompt_words, text=self._prompts.draw())
        request = BenchRequest((segment,), tokens, user=f"client-{number}")
        try:
            response = await self._client.exchange(request, exchange.feed)
            exchange.failure = exchange.reader.error or (None if response.status == 200 else f"{response.status}")
        except TransportError as error:
            exchange.failure = str(error)
        exchange.begun.set()


def now() -> float:
    """Return the time by which clients measure, in seconds."""
    return time.perf_counter()


def _percentiles_ms(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.percentile(values, (50, 99)) * 1000
    return float(low), float(high)
