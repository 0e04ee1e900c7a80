"""Prompts with a prefix that the fleet shares go to few groups; other prompts stay with their users' groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from common.fleet.names import PREFIX_TOKENS, routing_digest
from common.fleet.state import open_fleet
from common.settings import FleetSettings
from services.tokenizer.routing.policies import PrefixAware, RoutingCandidate, affinity_key
from services.tokenizer.routing.shared_prefixes import (
    REQUESTS_A_GROUP,
    STALE_S,
    WINDOW_S,
    FleetPrefixes,
    PrefixTraffic,
    SharedPrefix,
)
from tests.fakes.redis_process import temporary_redis
from tests.services.tokenizer.routing.requests import schedule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.fakes.redis_process import RedisProcess

SYSTEM = list(range(100, 100 + PREFIX_TOKENS))
GROUPS = [RoutingCandidate(f"group-{number}", 0) for number in range(16)]
USERS = [f"user-{number}" for number in range(100)]


class Clock:
    """A clock that only moves when it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="server")
def running_server() -> Iterator[RedisProcess]:
    with temporary_redis() as process:
        yield process


class Shared:
    """What the fleet shares, and a tokenizer's knowledge of it."""

    def __init__(self, url: str) -> None:
        opened = open_fleet(FleetSettings(state=SecretStr(url), secret=SecretStr("s" * 32)))
        assert opened is not None
        self.state, self.keys = opened
        self.clock = Clock()
        self.prefixes = FleetPrefixes(self.state, self.keys, self.clock)

    async def share(self, *scope: str, is_shared: bool = True) -> None:
        digest = routing_digest(schedule("one", ids=SYSTEM).token_ids)
        assert digest is not None
        await self.state.share_forever(self.keys.routing(scope, digest), is_shared=is_shared)


@pytest.fixture(name="fleet")
async def shared_prefixes(server: RedisProcess) -> AsyncIterator[Shared]:
    shared = Shared(server.url)
    yield shared
    await shared.state.close()


def homes(prefix: SharedPrefix | None) -> set[str]:
    policy = PrefixAware(1.25)
    keys = [affinity_key(schedule("one", user=user, ids=SYSTEM)) for user in USERS]
    return {policy.choose(key, GROUPS, prefix) for key in keys}


def test_prompts_with_a_shared_prefix_go_to_as_many_groups_as_its_width() -> None:
    assert len(homes(None)) == len(GROUPS)
    for width in (1, 2, 4):
        assert len(homes(SharedPrefix(b"name", width))) == width


def test_a_wider_set_of_groups_contains_the_narrower_one() -> None:
    narrow, wide = homes(SharedPrefix(b"name", 2)), homes(SharedPrefix(b"name", 4))
    assert narrow < wide


def test_a_full_group_is_avoided_although_it_has_the_prefix() -> None:
    (home,) = homes(SharedPrefix(b"name", 1))
    loads = [RoutingCandidate(group.name, 100 if group.name == home else 0) for group in GROUPS]
    key = affinity_key(schedule("one", ids=SYSTEM))
    assert PrefixAware(1.25).choose(key, loads, SharedPrefix(b"name", 1)) != home


def test_a_prefix_gets_another_group_when_its_requests_pay_for_the_computation() -> None:
    clock = Clock()
    traffic = PrefixTraffic(clock)
    widths = [traffic.count(b"one") for _ in range(4 * REQUESTS_A_GROUP)]
    assert widths[2 * REQUESTS_A_GROUP - 2] == 1
    assert widths[2 * REQUESTS_A_GROUP - 1] == 2
    assert widths[-1] == 4
    assert traffic.count(b"other") == 1
    clock.now += WINDOW_S
    assert traffic.count(b"one") == 4
    clock.now += 2 * WINDOW_S
    assert traffic.count(b"one") == 1


async def test_a_prefix_steers_once_the_fleet_shares_it(fleet: Shared) -> None:
    request = schedule("one", ids=[*SYSTEM, 1])
    assert fleet.prefixes.find(request) is None
    await fleet.prefixes.look()
    assert fleet.prefixes.find(request) is None
    await fleet.share("acme")
    await fleet.prefixes.look()
    found = fleet.prefixes.find(request)
    assert found is not None
    assert fleet.prefixes.find(schedule("two", user="bob", ids=[*SYSTEM, 2])) == found
    await fleet.share("acme", is_shared=False)
    await fleet.prefixes.look()
    assert fleet.prefixes.find(request) is None


async def test_a_prefix_of_another_tenant_does_not_steer(fleet: Shared) -> None:
    await fleet.share("rival")
    for _ in range(2):
        assert fleet.prefixes.find(schedule("one", ids=SYSTEM)) is None
        await fleet.prefixes.look()


async def test_pins_steer_the_prompts_of_all_tenants(fleet: Shared) -> None:
    await fleet.share()
    requests = [schedule("one", tenant=tenant, ids=SYSTEM) for tenant in ("acme", "rival")]
    assert [fleet.prefixes.find(request) for request in requests] == [None, None]
    await fleet.prefixes.look()
    assert all(fleet.prefixes.find(request) is not None for request in requests)


async def test_short_prompts_are_not_looked_up(fleet: Shared) -> None:
    assert fleet.prefixes.find(schedule("one", ids=SYSTEM[:-1])) is None


async def test_answers_become_stale_while_the_server_is_away(fleet: Shared, server: RedisProcess) -> None:
    await fleet.share("acme")
    request = schedule("one", ids=SYSTEM)
    fleet.prefixes.find(request)
    await fleet.prefixes.look()
    server.kill()
    assert fleet.prefixes.find(request) is not None
    await fleet.prefixes.look()
    assert fleet.prefixes.find(request) is not None
    fleet.clock.now += STALE_S + 1
    assert fleet.prefixes.find(request) is None
