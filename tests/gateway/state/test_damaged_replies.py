"""Replies in which bits have flipped: whatever a server seems to say, it counts as unavailable or is believed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis

from common.errors import UnavailableError
from common.fleet.state import FleetState, FleetStateAwayError, NamedEvidence, NamedWindow, PromotionRules
from common.limits import SubjectLimits
from common.types import RequestId, Subject
from gateway.answer_records.records import NewRecord
from gateway.answer_records.redis_records import RedisRecords
from gateway.answer_records.sealing import Sealing
from gateway.batches.redis_documents import RedisDocuments
from gateway.identity.caller import Caller
from gateway.ledger.entries import NOTHING, LedgerEntry, UsageQuery, Work
from gateway.ledger.redis_store import RedisLedger
from gateway.quotas.meters import ChargeKind, MeteredAccount
from gateway.quotas.redis_meters import RedisMeters
from gateway.state.aborts import SharedAborts, Signatures
from gateway.state.server import StateServer
from gateway.stored_responses.redis_responses import RedisResponses
from gateway.stored_responses.store import ResponseOwner
from tests.gateway.state.servers import new_metrics
from tests.gateway.support import faked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

REPLIES: list[Any] = [
    None, 0, 7, -1, b"", b"x", b"dd", b"\xff", b"[1", b"[[]]", [], [b"x"], [None] * 6, [[1]], {b"a": b"b"},
]  # fmt: skip
SUBJECT = Subject("acme", "user/ann")
OWNER = ResponseOwner("acme", "key/k1")
ACCOUNT = MeteredAccount("acme", None, SubjectLimits(requests_per_minute=5, tokens_per_minute=5, concurrent=1))
ENTRY = LedgerEntry(RequestId("r"), SUBJECT, Work("m"), 3600, NOTHING)
RULES = PromotionRules(3, 1, 4, 60.0)


@dataclass
class DamagedReplies:
    """In the place of a Redis client's connection: replies to each command, also in pipelines, with the same value."""

    reply: Any

    def __getattr__(self, _command: str) -> Callable[..., DamagedReplies]:
        return lambda *_arguments, **_options: self

    async def __aenter__(self) -> DamagedReplies:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    def __await__(self) -> Any:
        async def reply() -> Any:
            return self.reply

        return reply().__await__()


def calls(state: StateServer) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return calls of everything that reads a reply."""
    records = RedisRecords(state, Sealing(None), 60.0, 1 << 20)
    meters, ledger = RedisMeters(state, None, new_metrics()), RedisLedger(state, 60, "log")
    responses, documents = RedisResponses(state, 60.0, 1 << 20), RedisDocuments(state)
    generations = faked(None).context.answers.generations
    aborts = SharedAborts(state, generations, Signatures("a secret that has more than 32 characters"))
    record = NewRecord("name", None, SUBJECT, b"{}", "owner:1")
    return {
        "open": lambda: records.open(record),
        "claimed": lambda: records.claimed("claim"),
        "request": lambda: records.request("name"),
        "read": lambda: records.read("name"),
        "append": lambda: records.append("name", "owner:1", 0, [b"[]"]),
        "finish": lambda: records.finish("name", None, b"{}"),
        "take": lambda: records.take("name", None, "owner:1", 0),
        "orphans": records.orphans,
        "quotas": lambda: meters.take([ACCOUNT], 1, 1, ChargeKind.NEW),
        "flush": meters.flush,
        "ledger": lambda: ledger.write([ENTRY, ENTRY]),
        "hours": lambda: ledger.hours(UsageQuery(0, 7200)),
        "spent": lambda: ledger.spent("acme", None, 0),
        "take_records": lambda: ledger.take_records(0),
        "forget_records": lambda: ledger.forget_records(9),
        "response": lambda: responses.find(OWNER, "resp_1"),
        "delete": lambda: responses.delete(OWNER, "resp_1"),
        "documents": lambda: documents.get_many("folder", ["a", "b"]),
        "names": lambda: documents.names("folder"),
        "exchange": lambda: documents.exchange("folder", "a", None, b"x"),
        "abort": lambda: aborts.abort("request", Caller("acme", "user/ann")),
    }


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Redis, Any], None]:
    def damage_replies(redis: Redis, reply: Any) -> None:
        damaged = DamagedReplies(reply)
        monkeypatch.setattr(redis, "execute_command", lambda *_arguments, **_options: damaged)
        monkeypatch.setattr(redis, "pipeline", lambda **_options: damaged)

    return damage_replies


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
async def test_a_gateway_that_gets_nonsense_takes_the_server_for_away(
    damage: Callable[[Redis, Any], None], reply: Any
) -> None:
    names = list(calls(StateServer("redis://127.0.0.1:1", new_metrics(), prefix="p", timeout_s=5.0)))
    for name in names:
        state = StateServer("redis://127.0.0.1:1", new_metrics(), prefix="p", timeout_s=5.0)
        damage(state.redis, reply)
        try:
            await calls(state)[name]()
        except UnavailableError:
            assert not state.is_up
        except Exception as error:
            raise AssertionError(f"{name} raises {error!r}") from error
        await state.close()


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
async def test_so_does_a_group_of_its_fleet(damage: Callable[[Redis, Any], None], reply: Any) -> None:
    async with Redis.from_url("redis://127.0.0.1:1") as redis:
        fleet = FleetState(redis, "root")
        damage(redis, reply)
        for call in (
            fleet.incarnation,
            lambda: fleet.add_evidence([NamedEvidence(((b"n", b"t", False),))], RULES),
            lambda: fleet.count_windows(b"g", [NamedWindow(b"n", 1, (b"m",))], 60.0),
            lambda: fleet.look_up([b"a", b"b"]),
            lambda: fleet.read(b"0-0"),
            fleet.pin_names,
            lambda: fleet.pin(b"n"),
        ):
            with contextlib.suppress(FleetStateAwayError):
                await call()


async def test_believable_replies_are_read() -> None:
    """So the nonsense above is refused for what it says."""
    state = StateServer("redis://127.0.0.1:1", new_metrics(), prefix="p", timeout_s=5.0)
    for name, reply, result in (
        ("names", [b"b", b"a"], ["a", "b"]),
        ("documents", [b"1", None], [b"1", None]),
        ("spent", [b"4", None, b"5"], 9),
        ("orphans", [b"n"], ["n"]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            damaged = DamagedReplies(reply)
            patch.setattr(state.redis, "execute_command", lambda *_arguments, damaged=damaged, **_options: damaged)
            patch.setattr(state.redis, "pipeline", lambda damaged=damaged, **_options: damaged)
            assert await calls(state)[name]() == result
    await state.close()
