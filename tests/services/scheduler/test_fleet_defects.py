"""The exchange with the shared state after defects, and failures of the server in the middle: no decision is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from common.errors import BrokenStateError
from common.fleet.state import FleetStateAwayError
from tests.fakes.redis_process import temporary_redis
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE
from tests.services.scheduler.fleet import groups_at
from tests.services.scheduler.test_fleet_desk import SYSTEM, probe, settle, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from tests.fakes.redis_process import RedisProcess
    from tests.services.scheduler.fleet import Group

OTHER = list(range(500, 580))
# Those that each exchange makes, in their order.
ALWAYS = ("incarnation", "add_evidence", "pin_names", "read")
SOMETIMES = ("count_windows", "look_up", "renew", "publish", "revoke", "pin", "set_pin")


@pytest.fixture(name="server", scope="module")
def running_server() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log, which takes long to show: tracebacks with all local variables."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture
def empty(server: RedisProcess) -> RedisProcess:
    """The server without any data."""
    server.kill()
    server.start()
    return server


def counted() -> float:
    return REGISTRY.get_sample_value("pando_scheduler_defects_total", {"part": "fleet"}) or 0.0


class Failing:
    """Lets one call of a group to the server fail until it is left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Group, call: str, error: Exception) -> None:
        self.times = 0
        self._patch = monkeypatch
        self._group, self._call, self._error = group, call, error

    async def _fail(self, *_arguments: object, **_named: object) -> None:
        self.times += 1
        raise self._error

    def __enter__(self) -> Failing:
        self._patch.setattr(self._group.state, self._call, self._fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.mark.parametrize("call", [*ALWAYS, *SOMETIMES])
@pytest.mark.parametrize("error", [FleetStateAwayError("away"), RuntimeError("a defect")], ids=["away", "defect"])
async def test_a_demotion_reaches_a_group_whatever_fails_while_it_is_read(
    empty: RedisProcess, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    async with groups_at(empty.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        assert groups[1].driver.tenants == [SYSTEM]
        before = counted()
        with Failing(monkeypatch, groups[1], call, error) as failing:
            # A prompt of its own, which it looks up.
            groups[1].driver.serve(ANN, [*OTHER, 900])
            await probe(groups, DAN, EVE)
            await groups.next_epoch()
        assert failing.times or call in SOMETIMES
        assert counted() - before == (failing.times if isinstance(error, RuntimeError) else 0)
        # It reads what it could not, and applies it at the next boundary.
        for _ in range(2):
            await groups.next_epoch()
        assert [group.driver.tenants for group in groups] == [[], [], []]
        for group in groups:
            group.driver.check()


@pytest.mark.parametrize("call", ALWAYS)
async def test_evidence_counts_again_after_a_defect(
    empty: RedisProcess, monkeypatch: pytest.MonkeyPatch, logged: list[MutableMapping[str, Any]], call: str
) -> None:
    async with groups_at(empty.url, 3) as groups:
        await settle(groups)
        with Failing(monkeypatch, groups[1], call, RuntimeError("a defect")) as failing:
            await groups.next_epoch()
        assert failing.times
        defects = [entry for entry in logged if entry["event"] == "scheduler.defect"]
        assert [(entry["part"], entry["exc_info"]) for entry in defects] == [("fleet", True)] * failing.times
        await spread(groups, ANN, BOB, CID)
        assert [group.driver.peek(DAN, [*SYSTEM, 7]) for group in groups] == [80, 80, 80]


async def test_a_defect_of_the_cache_is_a_broken_state(empty: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(_news: object) -> None:
        raise KeyError("node")

    async with groups_at(empty.url, 3) as groups:
        await spread(groups, ANN, BOB, CID)
        monkeypatch.setattr(groups[1].driver.cache, "learn", learn)
        with pytest.raises(BrokenStateError):
            await probe(groups, DAN, EVE)
