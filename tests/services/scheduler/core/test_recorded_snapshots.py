"""Logs of caches with snapshots of recurrent states, over all tiers, come out the same again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest
from hypothesis.stateful import invariant, rule

from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import encode, encode_header, replay
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.tiers.config import PrefetchPolicy
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.queue import QueueOrder
from tests.examples import examples
from tests.services.scheduler.cache.driver import PLAIN
from tests.services.scheduler.core.harness import Arrival, Harness, make_request
from tests.services.scheduler.core.read_turns import advance, submitted
from tests.services.scheduler.core.test_row_snapshots import SnapshotMachine
from tests.services.scheduler.core.test_storage import WAIT
from tests.services.scheduler.core.test_stored_snapshot_properties import StoredSnapshotMachine
from tests.services.scheduler.core.test_stored_snapshots import hybrid

if TYPE_CHECKING:
    from pathlib import Path

    from services.scheduler.cache.debug.replay import ReplayResult
    from services.scheduler.cache.tiers.config import HostConfig, StorageConfig
    from tests.fakes.storing_worker import Objects

PROMPT = list(range(10, 31))


class Recording:
    """Records all that happens to the cache of a harness from now on."""

    def __init__(self, harness: Harness) -> None:
        """Give the harness, which has done nothing yet, a core whose cache is recorded."""
        self.lines: list[bytes] = []
        allocator = harness.core.memory.allocator
        assert isinstance(harness.cache, RadixCache)
        self.cache = harness.cache
        harness.cache = RecordedCache(
            self.cache, allocator, lambda decision: self.lines.append(encode(len(self.lines) + 1, decision))
        )
        harness.core = SchedulerCore(harness.config, allocator, harness.cache, QueueOrder(Arrival()))

    def check(self, host: HostConfig | None = None, storage: StorageConfig | None = None) -> None:
        """Replay the log of a cache with these tiers, which comes out the same."""
        report = self.replay(host, storage)
        assert report.difference is None
        assert report.operations == len(self.lines)

    def replay(self, host: HostConfig | None = None, storage: StorageConfig | None = None) -> ReplayResult:
        cache = self.cache
        pages = cache.store.allocator.capacity
        header = encode_header(cache.config.mode.value, cache.page_size, pages, cache.config, host, storage)
        return replay([header, *self.lines])

    @property
    def operations(self) -> list[str]:
        return [orjson.loads(line)["operation"] for line in self.lines]


def serve(harness: Harness, name: str, prompt: list[int]) -> int:
    """Have a prompt answered; return how many of its tokens were cached."""
    harness.core.submit(make_request(name, prompt, max_tokens=9), 0.0)
    harness.run()
    return harness.cached[name, 0]


def test_prefixes_are_found_beside_a_log_which_comes_out_the_same() -> None:
    harness = Harness(pages=40, cache="user_aware", snapshots=8, interval=2)
    recording = Recording(harness)
    assert serve(harness, "cold", PROMPT) == 0
    assert serve(harness, "warm", PROMPT) == len(PROMPT) // harness.config.page_size * harness.config.page_size
    assert {"fill_slot", "keep_slot", "free_slot"} <= set(recording.operations)
    recording.check()


def test_pins_and_leases_of_snapshots_come_out_the_same_also_once_others_took_their_slots() -> None:
    harness = Harness(pages=40, cache="user_aware", snapshots=4, interval=2, rules=PLAIN)
    recording = Recording(harness)
    memory = harness.core.memory
    serve(harness, "first", PROMPT)
    request = make_request("next", PROMPT)
    lock = memory.pin(request.view, np.array(PROMPT, np.int32), priority=0, session=None)
    assert lock is not None
    entry = memory.try_lend_state(lock)
    assert entry is not None
    memory.cache.forget(request.view.subject)
    for number in range(4):
        serve(harness, f"other{number}", [number, *PROMPT])
    memory.take_back_state(entry)
    memory.unpin(lock)
    serve(harness, "again", PROMPT)
    memory.repair_snapshots()
    named = {"pin_snapshot", "lend_snapshot", "take_back_snapshot", "unpin_snapshot", "repair_slots"}
    assert named <= set(recording.operations)
    recording.check()


@pytest.mark.parametrize("pages", [1, [10**12]])
def test_a_line_whose_pages_were_damaged_is_where_the_replay_differs(pages: object) -> None:
    harness = Harness(pages=40, cache="user_aware", snapshots=4, interval=2, rules=PLAIN)
    recording = Recording(harness)
    serve(harness, "first", PROMPT)
    lock = harness.core.memory.pin(
        make_request("next", PROMPT).view, np.array(PROMPT, np.int32), priority=0, session=None
    )
    assert lock is not None
    at = recording.operations.index("pin_snapshot")
    line = orjson.loads(recording.lines[at])
    line["given"]["pages"] = pages
    recording.lines[at] = orjson.dumps(line)
    difference = recording.replay().difference
    assert difference is not None
    assert difference.operation == at + 1


@pytest.mark.parametrize("least", [0, 30, 100])
def test_look_ups_come_out_the_same_however_much_they_had_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Where not all of storage is waited for, the rates that were measured say how deep a snapshot has to be."""
    objects: Objects = {}
    hybrid(tmp_path / "keys.db", objects).serve("cold")
    server = hybrid(tmp_path / "keys.db", objects, config=replace(WAIT, policy=PrefetchPolicy.TIMEOUT))
    recording = Recording(server.harness)
    loads = server.harness.core.memory.loads
    assert loads is not None
    monkeypatch.setattr(loads.costs, "storage_pays", lambda *_: True)
    monkeypatch.setattr(loads.costs, "least_stored", lambda *_: least)
    assert server.serve("warm") == (44 if least <= 44 else 0)
    recording.check(loads.host.config, server.storage.config)


def test_turns_that_batches_leave_to_others_come_out_the_same(tmp_path: Path) -> None:
    objects: Objects = {}
    for user in ("alice", "bob"):
        hybrid(tmp_path / "keys.db", objects).serve(user, user=user)
    server = hybrid(tmp_path / "keys.db", objects, host_pages=20, max_rows=1)
    recording = Recording(server.harness)
    server.harness.core.submit(make_request("long", [1, 2, 3], user="carol", max_tokens=100), 0.0)
    advance(server, 2)
    batch = submitted(server, "alice", is_batch=True)
    advance(server)
    submitted(server, "bob")
    advance(server)
    assert batch.is_done
    assert batch.turn is None
    server.harness.run()
    loads = server.harness.core.memory.loads
    assert loads is not None
    recording.check(loads.host.config, server.storage.config)


class RecordedMachine(SnapshotMachine):
    """The random lives over the device alone, with sessions."""

    @invariant()
    def a_log_is_written(self) -> None:
        if hasattr(self, "harness") and not hasattr(self, "recording"):
            self.recording = Recording(self.harness)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "recording"):
            self.recording.check()


class RecordedTiersMachine(StoredSnapshotMachine):
    """The random lives over three tiers."""

    @invariant()
    def both_tiers_are_sound(self) -> None:
        if not hasattr(self, "recording"):
            self.recording = Recording(self.harness)
        self.attach()

    @invariant()
    def each_kept_snapshot_has_the_tokens_of_its_page(self) -> None:
        """Checked without a log."""

    @rule()
    def evict_snapshots(self) -> None:
        """Leave that out, which no part of a scheduler does."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "recording"):
            self.recording.check(self.host.config, self.storage_config)


TestRecorded = RecordedMachine.TestCase
TestRecorded.settings = examples(20, stateful_step_count=30)
TestRecordedTiers = RecordedTiersMachine.TestCase
TestRecordedTiers.settings = examples(20, stateful_step_count=40)
