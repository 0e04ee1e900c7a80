"""A log of a cache with a host tier, made by a core that serves requests, comes out the same again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from common.types import Subject
from services.scheduler.cache.config import CacheConfig, Mode
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import encode, encode_header, replay
from services.scheduler.cache.factory import make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.tiers.config import HostConfig, PrefetchPolicy, StorageConfig, WritePolicy
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.queue import QueueOrder
from services.scheduler.storage_desk import Keyring
from tests.fakes.storing_worker import Objects, StoringWorker
from tests.services.scheduler.core.harness import Arrival, Harness
from tests.services.scheduler.core.test_host_tier import OTHER, PROMPT, serve
from tests.services.scheduler.core.test_storage import Server

if TYPE_CHECKING:
    from pathlib import Path


class RecordedHarness(Harness):
    """A harness whose cache notes everything."""

    def __init__(self, host: HostConfig, storage: StorageConfig | None = None) -> None:
        super().__init__(pages=16, host=host, cache="user_aware")
        rules = CacheConfig(mode=Mode.USER_AWARE)
        self.lines = [encode_header("user_aware", 4, 16, rules, host, storage)]
        allocator = PageAllocator(16)
        cache = make_cache("user_aware", allocator, 4, rules, host)
        self.cache = RecordedCache(
            cache, allocator, lambda decision: self.lines.append(encode(len(self.lines), decision))
        )
        self.core = SchedulerCore(self.config, allocator, self.cache, QueueOrder(Arrival()))


def recorded(policy: WritePolicy) -> list[bytes]:
    harness = RecordedHarness(HostConfig(pages=20, policy=policy))
    for number in range(3):
        serve(harness, f"cold{number}", PROMPT, user=f"user{number}")
        serve(harness, f"flood{number}", OTHER)
        serve(harness, f"warm{number}", PROMPT, user=f"user{number}")
        harness.cache.advance(number + 1)
    harness.cache.forget(Subject("tenant", "user1"))
    harness.lose_workers()
    serve(harness, "again", PROMPT)
    return harness.lines


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_log_with_transfers_comes_out_the_same(policy: WritePolicy) -> None:
    lines = recorded(policy)
    operations = {orjson.loads(line)["operation"] for line in lines}
    assert {"plan_backups", "finish", "lose_workers"} <= operations
    if policy is WritePolicy.WRITE_THROUGH:
        assert "load" in operations
    report = replay(lines)
    assert report.difference is None
    assert report.operations == len(lines) - 1


@pytest.mark.parametrize("policy", WritePolicy)
def test_all_that_the_device_holds_is_backed_up_before_its_memory_is_given_back(policy: WritePolicy) -> None:
    harness = RecordedHarness(HostConfig(pages=20, policy=policy))
    serve(harness, "first", PROMPT)
    serve(harness, "other", OTHER)
    harness.core.hold_all(held=True, puts_back=True)
    loads = harness.core.memory.loads
    assert loads is not None
    loads.host.back_up_all()
    harness.run()
    assert harness.core.is_at_rest
    assert not loads.is_copying
    harness.core.give_back_memory(keeps_host=True)
    harness.audit()
    accounts = harness.core.memory.account(harness.core.rows)
    assert (accounts.free, accounts.soft_free) == (accounts.capacity, 0)
    assert loads.host.account().evictable >= len(PROMPT) // 4
    harness.core.hold_all(held=False)
    serve(harness, "again", PROMPT)
    assert harness.outputs["again", 0] == harness.outputs["first", 0]
    operations = [orjson.loads(line)["operation"] for line in harness.lines]
    assert "load" in operations[operations.index("back_up_all") :], "what is on the host is loaded"
    assert replay(harness.lines).difference is None


def test_a_different_outcome_of_a_load_is_reported() -> None:
    lines = recorded(WritePolicy.WRITE_THROUGH)
    at = next(index for index, line in enumerate(lines) if orjson.loads(line)["operation"] == "load")
    facts = orjson.loads(lines[at])
    facts["outcome"]["transfer"]["host_pages"][0] += 1
    difference = replay([*lines[:at], orjson.dumps(facts), *lines[at + 1 :]]).difference
    assert difference is not None
    assert difference.operation == at
    assert difference.fields == ["outcome.transfer"]


def test_transfers_without_a_host_tier_are_a_difference() -> None:
    lines = recorded(WritePolicy.WRITE_THROUGH)
    header = orjson.loads(lines[0])
    del header["host"]
    assert replay([orjson.dumps(header), *lines[1:]]).difference is not None


@pytest.mark.parametrize("policy", [PrefetchPolicy.BEST_EFFORT, PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_a_log_with_storage_comes_out_the_same(tmp_path: Path, policy: PrefetchPolicy) -> None:
    keyring, objects = tmp_path / "keyring.db", Objects()
    Server(keyring, objects).serve("cold", PROMPT)
    host, storage = HostConfig(pages=20), StorageConfig(policy, min_pages=2, pages_per_s=30.0)
    harness = RecordedHarness(host, storage)
    harness.worker = StoringWorker(16, 4, 20, objects=objects)
    assert harness.cache.host is not None
    harness.cache.host.add_storage(storage, Keyring(keyring))
    for number, user in enumerate(("alice", "bob", "alice")):
        harness.now = number / 3
        serve(harness, f"r{number}", PROMPT, user=user)
        serve(harness, f"flood{number}", OTHER, user=user)
    harness.cache.forget(Subject("tenant", "alice"))
    serve(harness, "again", PROMPT)
    operations = {orjson.loads(line)["operation"] for line in harness.lines}
    assert {"prefetch", "plan_storage", "finish"} <= operations
    assert ("end_prefetch" in operations) == (policy is PrefetchPolicy.BEST_EFFORT)
    assert harness.cache.host.storage is not None
    assert harness.cache.host.storage.fetched_pages > 0
    report = replay(harness.lines)
    assert report.difference is None
    assert report.operations == len(harness.lines) - 1
