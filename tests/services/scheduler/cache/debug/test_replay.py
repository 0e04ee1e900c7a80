from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
import pytest

from common.types import Sharing
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import (
    LogError,
    encode,
    encode_end,
    encode_header,
    replay,
)
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.sharing.fleet import DemotionFact, FleetNews, QuarantineFact
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, PLAIN, Driver, int32, with_rules

if TYPE_CHECKING:
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.debug.decisions import Decision

SYSTEM = [1, 2, 3, 4, 5, 6]
MODES: list[CacheName] = ["user_aware", "isolated_pinned", "isolated", "shared", "chunk"]


class RecordedDriver(Driver):
    """A driver whose every operation becomes a line."""

    def __init__(self, name: CacheName = "user_aware", *, capacity: int = 64, config: CacheConfig = PLAIN) -> None:
        self.allocator = PageAllocator(capacity)
        cache = make_cache(name, self.allocator, 2, config)
        self.lines = [encode_header(name, 2, capacity, replace(config, mode=getattr(cache, "config", config).mode))]
        self.cache = RecordedCache(cache, self.allocator, self.record)

    def record(self, decision: Decision) -> None:
        self.lines.append(encode(len(self.lines), decision))


def a_day(driver: Driver) -> None:
    """Everything a cache can be asked: chunks, duplicates, evictions, pins, promotion, quarantine, forgetting."""
    driver.cache.pin(int32([9, 9]))
    driver.next_epoch()
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SYSTEM, 7, 7])
    driver.next_epoch()
    rows = [driver.admit(DAN, [*SYSTEM, 8, 8, 9, 9]), driver.admit(DAN, [*SYSTEM, 8, 8, 9, 9], repeated=True)]
    for row in rows:
        driver.insert(row, 8)
        insertion = driver.insert(row, 10, prompt_tokens=9)
        if insertion.first_duplicate is not None:
            row.table[insertion.first_duplicate : len(insertion.pages)] = insertion.pages[insertion.first_duplicate :]
            driver.allocator.exchange(insertion.duplicates, insertion.canonical)
    none = driver.admit(ANN, [5, 5, 5], may_use_cache=False)
    driver.insert(none)
    driver.cache.forget(DAN.subject)
    for row in (*rows, none):
        driver.end(row)
    for number in range(30):
        driver.end(driver.admit(DAN, [*SYSTEM, 20 + number, 0, 1]))
    driver.next_epoch(2)
    driver.serve(DAN, list(range(40, 90)))
    driver.serve(ANN, [9, 9, 1, 1], may_promote=False, priority=3)
    driver.cache.evict(5)
    driver.cache.unpin(int32([9, 9]))
    driver.cache.flush()


def test_news_of_other_groups_are_replayed() -> None:
    driver = RecordedDriver(config=with_rules(PLAIN, has_fleet=True), capacity=200)
    driver.serve(ANN, [*SYSTEM, 7, 7])
    driver.next_epoch()
    (claim,) = driver.cache.take_report().claims
    driver.cache.learn(FleetNews(shared=tuple(("tenant", chain) for chain in claim.chains[:3])))
    driver.next_epoch()
    assert driver.tenants == [SYSTEM]
    demotion = DemotionFact(("tenant",), claim.chains[1], 1)
    quarantine = QuarantineFact(("tenant",), claim.chains[0], 7, "tenant", is_whole=False)
    driver.cache.learn(FleetNews(demotions=(demotion,), quarantines=(quarantine,)))
    driver.next_epoch()
    assert driver.tenants == [SYSTEM[:2]]
    driver.cache.learn(FleetNews(is_alone=True))
    driver.next_epoch()
    assert driver.tenants == []
    assert replay(driver.lines).difference is None


@pytest.mark.parametrize("name", MODES)
def test_replayed_log_gives_the_same_decisions_in_every_mode(name: CacheName) -> None:
    driver = RecordedDriver(name)
    a_day(driver)
    driver.serve(ANN, SYSTEM)
    report = replay(driver.lines)
    assert report.difference is None
    assert (report.operations, report.starts) == (len(driver.lines) - 1, 1)
    assert report.nodes == len(list(driver.cache.dump()))
    assert report.cached_pages == 64 - driver.allocator.free_pages


def test_constants_of_the_privacy_profile_are_recorded_and_replayed() -> None:
    driver = RecordedDriver(config=with_rules(PLAIN, hit_min=2, diversity_min=1.0, demotion_quarantines=1))
    header = orjson.loads(driver.lines[0])["config"]
    # The same names as before the profile existed, so that older logs stay readable.
    assert "profile" not in header
    assert (header["hit_min"], header["diversity_min"], header["creators_limit"]) == (2, 1.0, 32)
    for user in (ANN, BOB, CID):
        driver.serve(user, [*SYSTEM, 7, 7])
    driver.next_epoch()
    for _ in range(3):
        for _ in range(4):
            driver.end(driver.admit(DAN, [*SYSTEM, 8, 8]))
        driver.next_epoch()
    assert driver.tenants == []  # demoted: with the default constants four hits would not be judged
    assert replay(driver.lines).difference is None


def test_content_checks_are_replayed_with_their_verdicts() -> None:
    driver = RecordedDriver(config=replace(PLAIN, content_check=True))
    for user in (ANN, BOB, CID):
        driver.serve(user, SYSTEM)
    driver.next_epoch()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 4)
    driver.next_epoch()
    assert driver.tenants == [SYSTEM[:4]]
    assert replay(driver.lines).difference is None


def test_first_difference_is_reported_with_both_sides() -> None:
    driver = RecordedDriver()
    a_day(driver)
    commits = [number for number, line in enumerate(driver.lines) if orjson.loads(line)["operation"] == "commit"]
    at = commits[4]
    tampered = orjson.loads(driver.lines[at])
    tampered["outcome"]["pages"] = [1, 2, 3]
    driver.lines[at] = orjson.dumps(tampered)
    difference = replay(driver.lines).difference
    assert difference is not None
    assert (difference.line, difference.operation) == (at + 1, at)
    assert difference.fields == ["outcome.pages"]
    assert difference.logged["outcome"]["pages"] == [1, 2, 3]
    assert difference.replayed["outcome"]["pages"] != [1, 2, 3]


def test_a_changed_rule_is_found_at_its_first_difference() -> None:
    driver = RecordedDriver()
    a_day(driver)
    header = orjson.loads(driver.lines[0])
    header["config"]["promotion_subjects"] = 4
    difference = replay([orjson.dumps(header), *driver.lines[1:]]).difference
    assert difference is not None
    assert difference.logged["operation"] == "advance"
    assert "events" in difference.fields


def test_operation_that_cannot_be_done_again_is_a_difference() -> None:
    driver = RecordedDriver()
    driver.serve(ANN, SYSTEM)
    (at,) = [n for n, line in enumerate(driver.lines) if orjson.loads(line)["operation"] == "commit"]
    del driver.lines[at]
    difference = replay(driver.lines).difference
    assert difference is not None
    assert "outcome.error" in difference.fields


def test_a_second_header_restarts_the_replay() -> None:
    one, other = RecordedDriver(), RecordedDriver("shared")
    a_day(one)
    other.serve(ANN, SYSTEM)
    report = replay([*one.lines, b"", *other.lines])
    assert (report.starts, report.difference) == (2, None)
    assert (report.nodes, report.cached_pages) == (1, 3)


def test_a_log_ended_by_a_slow_writer_is_reported_as_incomplete() -> None:
    driver = RecordedDriver()
    driver.serve(ANN, SYSTEM)
    report = replay([*driver.lines, encode_end()])
    assert report.is_lost
    assert report.difference is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty"),
        ([b"{}"], "has to begin"),
        ([b"no json"], "line 1"),
        ([b"[1]"], "no JSON object"),
        ([b'{"operation": "open", "version": 99}'], "version 99"),
        ([b'{"operation": "open", "version": 3, "cache": "other", "config": {}}'], "unknown cache"),
        ([b'{"operation": "open", "version": 3, "cache": "shared"}'], "lacks or misnames"),
        ([encode_header("shared", 2, 4, PLAIN), b'{"operation": "dance", "number": 1}'], "unknown operation"),
    ],
)
def test_an_invalid_log_is_refused_with_its_line(lines: list[bytes], message: str) -> None:
    with pytest.raises(LogError, match=message):
        replay(lines)


def test_log_of_a_killed_process_is_replayed_up_to_its_half_line() -> None:
    driver = RecordedDriver()
    driver.serve(ANN, SYSTEM)
    half = driver.lines[-1][:20]
    report = replay([*driver.lines[:-1], half])
    assert (report.is_lost, report.difference, report.operations) == (True, None, len(driver.lines) - 2)
    assert not replay([*driver.lines[:-1], half, *driver.lines]).is_lost
    with pytest.raises(LogError, match=f"line {len(driver.lines)}"):
        replay([*driver.lines[:-1], half, driver.lines[-1]])


def test_ids_are_recorded_once_per_row() -> None:
    driver = RecordedDriver()
    row = driver.admit(ANN, SYSTEM)
    for end in (2, 4, 6):
        driver.insert(row, end)
    row.ids = int32([*SYSTEM, 7, 7])
    fresh = driver.allocator.try_allocate(1)
    assert fresh is not None
    row.table = int32([*row.table, *fresh])
    driver.insert(row)
    driver.end(row)
    recorded = [orjson.loads(line)["given"] for line in driver.lines[1:]]
    assert [given["token_ids"] for given in recorded if "token_ids" in given] == [SYSTEM]
    assert [given["new_ids"] for given in recorded if "new_ids" in given] == [[], [], [], [7, 7]]
    assert replay(driver.lines).difference is None


def test_sharing_choices_of_tenants_are_replayed() -> None:
    decisions: list[Decision] = []
    choices = {"tenant": Sharing.TENANT}
    asked = SharingChoices(lambda tenant: choices[tenant])
    allocator = PageAllocator(64)
    driver = Driver("user_aware")
    driver.allocator = allocator
    driver.cache = RecordedCache(
        make_cache("user_aware", allocator, 2, PLAIN, choices=asked), allocator, decisions.append, asked
    )
    for choice in (Sharing.TENANT, Sharing.NONE, Sharing.TENANT):
        choices["tenant"] = choice
        for user in (ANN, BOB, CID):
            driver.serve(user, SYSTEM)
        driver.next_epoch()
    changes = [decision.given["sharing"] for decision in decisions if "sharing" in decision.given]
    assert changes == [{"tenant": "none"}, {"tenant": "tenant"}]
    lines = [encode_header("user_aware", 2, 64, PLAIN)]
    lines += [encode(number, decision) for number, decision in enumerate(decisions, 1)]
    report = replay(lines)
    assert (report.difference, report.operations) == (None, len(decisions))
    # Without what was recorded of it, another tree comes of the same operations.
    assert replay([line.replace(b'"none"', b'"tenant"') for line in lines]).difference is not None
