"""State that outlives a request: in this process for a single gateway, in Redis or Valkey for several."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.section import read_secret
from gateway.answer_records.memory_records import MemoryRecords
from gateway.answer_records.redis_records import RedisRecords
from gateway.answer_records.sealing import Sealing
from gateway.batches.redis_documents import RedisDocuments
from gateway.batches.sqlite_documents import SqliteDocuments
from gateway.ledger.entries import DAY_S
from gateway.ledger.ledger import Ledger
from gateway.ledger.redis_store import RedisLedger
from gateway.ledger.sqlite_store import SqliteLedger
from gateway.quotas.memory_meters import MemoryMeters
from gateway.quotas.redis_meters import RedisMeters
from gateway.state.aborts import LocalAborts, SharedAborts, Signatures
from gateway.state.server import TIMEOUT_S, StateAwayError, StateServer
from gateway.stored_responses.redis_responses import RedisResponses
from gateway.stored_responses.sqlite_responses import SqliteResponses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from common.settings import GatewaySettings
    from gateway.answer_records.records import AnswerRecords
    from gateway.batches.documents import Documents
    from gateway.generation.generations import Generations
    from gateway.metrics import GatewayMetrics
    from gateway.quotas.meters import Meters
    from gateway.state.aborts import Aborts
    from gateway.stored_responses.store import ResponseStore

MEMORY = "memory"
LEAST_SECRET = 32


@dataclass(frozen=True, slots=True)
class State:
    """The stateful parts, a function that closes them, and background tasks that run until the process ends."""

    meters: Meters
    stored: ResponseStore
    documents: Documents
    aborts: Aborts
    records: AnswerRecords
    ledger: Ledger
    close: Callable[[], Awaitable[None]]
    background: tuple[Callable[[], Coroutine[None, None, None]], ...] = ()


def open_state(
    settings: GatewaySettings,
    generations: Generations,
    metrics: GatewayMetrics,
    limits_clock: Callable[[], float] | None = None,
) -> State:
    """Return the state that `settings` configure; tests pass `limits_clock` (seconds).

    Raises:
        ConfigurationError: the address, the secret or the responses file is wrong.
    """
    url = read_secret("gateway.state.url", settings.state.url)
    ledger_s = settings.ledger.lifetime_days * DAY_S
    lifetime_s = settings.responses.lifetime_days * DAY_S
    if url is None or url == MEMORY:
        stored = SqliteResponses(settings.responses.file, lifetime_s, settings.responses.max_bytes)
        records = MemoryRecords(settings.answers.lifetime_s, settings.answers.max_bytes)
        documents = SqliteDocuments(settings.batches.file)
        own_ledger = Ledger(
            SqliteLedger(settings.ledger.file, ledger_s), metrics, is_durable=settings.ledger.file is not None
        )

        async def close_files() -> None:
            await own_ledger.close()
            await stored.close()
            await documents.close()

        meters = MemoryMeters(limits_clock or time.monotonic)
        return State(meters, stored, documents, LocalAborts(generations), records, own_ledger, close_files)
    if settings.ledger.file is not None:
        raise ConfigurationError("gateway.ledger.file is of no use beside gateway.state.url, which holds the ledger")
    if settings.responses.file is not None:
        raise ConfigurationError(
            "gateway.responses.file is of no use beside gateway.state.url, which holds the responses"
        )
    if settings.batches.file is not None:
        raise ConfigurationError(
            "gateway.batches.file is of no use beside gateway.state.url, which holds files and batches"
        )
    server = StateServer(url, metrics, prefix=settings.state.prefix, timeout_s=TIMEOUT_S)
    own = MemoryMeters(limits_clock or time.monotonic) if settings.state.failure == "open" else None
    shared_meters = RedisMeters(server, own, metrics, clock=limits_clock)
    responses = RedisResponses(server, lifetime_s, settings.responses.max_bytes)
    secret = read_secret("gateway.state.secret", settings.state.secret, LEAST_SECRET)
    aborts = SharedAborts(server, generations, Signatures(secret))
    shared = RedisRecords(server, Sealing(secret), settings.answers.lifetime_s, settings.answers.max_bytes)

    ledger = Ledger(RedisLedger(server, ledger_s), metrics, is_lenient=settings.state.failure == "open")

    async def close() -> None:
        await ledger.close()
        with contextlib.suppress(StateAwayError, TimeoutError):
            async with asyncio.timeout(server.timeout_s):
                await shared_meters.flush()
                await responses.flush()
        await server.close()

    background = (server.run, shared_meters.run, responses.run, aborts.run)
    return State(shared_meters, responses, RedisDocuments(server), aborts, shared, ledger, close, background)
