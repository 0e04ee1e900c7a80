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
from gateway.ledger.usage_log import NoUsageLog, UsageLog, open_directory
from gateway.quotas.memory_meters import MemoryMeters
from gateway.quotas.redis_meters import RedisMeters
from gateway.state.aborts import LocalAborts, SharedAborts, Signatures
from gateway.state.server import TIMEOUT_S, StateAwayError, StateServer
from gateway.stored_responses.redis_responses import RedisResponses
from gateway.stored_responses.sqlite_responses import SqliteResponses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from common.settings import GatewaySettings
    from gateway.answer_records.records import AnswerRecords
    from gateway.batches.documents import Documents
    from gateway.generation.generations import Generations
    from gateway.ledger.entries import LedgerStore
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
    if url is None or url == MEMORY:
        return _open_own(settings, generations, metrics, limits_clock)
    return _open_shared(url, settings, generations, metrics, limits_clock)


def _open_own(
    settings: GatewaySettings,
    generations: Generations,
    metrics: GatewayMetrics,
    limits_clock: Callable[[], float] | None,
) -> State:
    directory = settings.ledger.log_directory
    if directory is not None and settings.ledger.file is None:
        raise ConfigurationError("gateway.ledger.log_directory needs gateway.ledger.file or gateway.state.url")
    lifetime_s = settings.responses.lifetime_days * DAY_S
    stored = SqliteResponses(settings.responses.file, lifetime_s, settings.responses.max_bytes)
    records = MemoryRecords(settings.answers.lifetime_s, settings.answers.max_bytes)
    documents = SqliteDocuments(settings.batches.file)
    ledger_s = settings.ledger.lifetime_days * DAY_S
    store = SqliteLedger(settings.ledger.file, ledger_s, has_log=directory is not None)
    ledger = Ledger(store, metrics, is_durable=settings.ledger.file is not None)
    usage_log = _open_log(directory, store)

    async def close() -> None:
        await ledger.settle()
        await usage_log.close()
        await ledger.close()
        await stored.close()
        await documents.close()

    meters = MemoryMeters(limits_clock or time.monotonic)
    return State(meters, stored, documents, LocalAborts(generations), records, ledger, close, (usage_log.run,))


def _open_shared(
    url: str,
    settings: GatewaySettings,
    generations: Generations,
    metrics: GatewayMetrics,
    limits_clock: Callable[[], float] | None,
) -> State:
    for file, name, what in (
        (settings.ledger.file, "ledger", "the ledger"),
        (settings.responses.file, "responses", "the responses"),
        (settings.batches.file, "batches", "files and batches"),
    ):
        if file is not None:
            message = f"gateway.{name}.file is of no use beside gateway.state.url, which holds {what}"
            raise ConfigurationError(message)
    server = StateServer(url, metrics, prefix=settings.state.prefix, timeout_s=TIMEOUT_S)
    is_lenient = settings.state.failure == "open"
    own = MemoryMeters(limits_clock or time.monotonic) if is_lenient else None
    meters = RedisMeters(server, own, metrics, clock=limits_clock)
    lifetime_s = settings.responses.lifetime_days * DAY_S
    responses = RedisResponses(server, lifetime_s, settings.responses.max_bytes)
    secret = read_secret("gateway.state.secret", settings.state.secret, LEAST_SECRET)
    aborts = SharedAborts(server, generations, Signatures(secret))
    records = RedisRecords(server, Sealing(secret), settings.answers.lifetime_s, settings.answers.max_bytes)
    directory = settings.ledger.log_directory
    log_name = None if directory is None else open_directory(directory)
    store = RedisLedger(server, settings.ledger.lifetime_days * DAY_S, log_name)
    ledger = Ledger(store, metrics, is_lenient=is_lenient)
    usage_log = _open_log(directory, store)

    async def close() -> None:
        await ledger.close()
        await usage_log.close()
        with contextlib.suppress(StateAwayError, TimeoutError):
            async with asyncio.timeout(server.timeout_s):
                await meters.flush()
                await responses.flush()
        await server.close()

    background = (server.run, meters.run, responses.run, aborts.run, usage_log.run)
    return State(meters, responses, RedisDocuments(server), aborts, records, ledger, close, background)


def _open_log(directory: Path | None, store: LedgerStore) -> UsageLog | NoUsageLog:
    if directory is None:
        return NoUsageLog()
    open_directory(directory)
    return UsageLog(directory, store)
