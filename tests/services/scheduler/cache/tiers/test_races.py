"""What happens to the tree while copies are under way, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.transfers import TransferAck
from services.scheduler.cache.debug.audit import account, audit
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.radix import RadixCache
from services.scheduler.cache.sharing.demotion import Demoter
from services.scheduler.cache.sharing.fleet import FleetLedger
from services.scheduler.cache.tiers.config import HostConfig, WritePolicy
from services.scheduler.cache.types import NodeState
from tests.services.scheduler.cache.driver import ANN, BOB, CID, PLAIN, Driver, Row, int32

if TYPE_CHECKING:
    from common.transfers import Transfer
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import NodeSnapshot

A, B, C = list(range(10, 22)), list(range(30, 42)), list(range(50, 62))  # six pages each


class TieredDriver(Driver):
    def __init__(
        self, capacity: int = 64, host_pages: int = 64, policy: WritePolicy = WritePolicy.WRITE_THROUGH
    ) -> None:
        self.allocator = PageAllocator(capacity)
        rules = replace(PLAIN, promotion_subjects=2, quota_share=1.0)
        self.cache = RadixCache(self.allocator, 2, rules, HostConfig(pages=host_pages, policy=policy))

    @property
    def tier(self) -> HostTier:
        assert self.radix.host is not None
        return self.radix.host

    def done(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            assert self.tier.finish(TransferAck(transfer.transfer_id, transfer.pages), 0.0) is transfer

    def back_up(self) -> list[Transfer]:
        started = self.tier.plan_backups()
        self.done(*started)
        return started

    def load(self, ids: list[int]) -> Transfer:
        transfer = self.tier.load(ANN, int32([*ids, 0]), self.allocator.try_allocate)
        assert transfer is not None
        return transfer

    def on_host(self, ids: list[int]) -> int:
        match = self.tier.find(ANN, int32([*ids, 0]))
        assert match.device_tokens == self.peek(ANN, [*ids, 0])
        return match.host_tokens

    def check(self, *rows: Row) -> None:
        assert self.violations() == []
        tables = {f"{number}": row.table for number, row in enumerate(rows)} | self.tier.ledger.tables()
        assert audit(self.allocator, self.cache, tables).is_clean
        assert account(self.allocator, self.cache, sum(map(len, tables.values()))).is_exact

    def views(self) -> list[NodeSnapshot]:
        return list(self.cache.dump())


def hosted(ids: list[int]) -> TieredDriver:
    """Return a cache in which ANN has `ids` on the host alone."""
    driver = TieredDriver()
    driver.serve(ANN, ids)
    driver.back_up()
    driver.cache.evict(64)
    assert driver.on_host(ids) == len(ids)
    return driver


def test_a_split_divides_an_open_backup() -> None:
    driver = TieredDriver()
    driver.serve(ANN, A)
    (backup,) = driver.tier.plan_backups()
    driver.serve(ANN, [*A[:6], 1, 1])
    driver.done(backup)
    upper, lower = (node for node in driver.views() if node.host_pages is not None)
    assert upper.host_pages is not None
    assert lower.host_pages is not None
    assert [*upper.host_pages, *lower.host_pages] == backup.host_pages.tolist()
    assert [*upper.pages, *lower.pages] == backup.device_pages.tolist()
    driver.check()


def test_a_split_divides_an_open_load() -> None:
    driver = hosted(A)
    load = driver.load(A)
    row = driver.admit(ANN, [*A[:6], 1, 1])
    driver.insert(row)  # computes three pages of what is being loaded
    driver.check(row)
    driver.done(load)
    driver.check(row)
    assert driver.peek(ANN, [*A, 0]) == len(A)
    node = next(node for node in driver.views() if node.token_ids.tolist() == A[6:])
    assert node.pages.tolist() == load.device_pages[3:].tolist()
    driver.end(row)


def test_pages_computed_during_a_load_are_kept() -> None:
    driver = hosted(A)
    row = driver.admit(ANN, [*A, 0])
    load = driver.load(A)
    driver.insert(row)
    before = [node.pages.tolist() for node in driver.views()]
    driver.done(load)
    assert [node.pages.tolist() for node in driver.views()] == before
    driver.check(row)
    driver.end(row)
    driver.check()


def test_a_node_being_loaded_keeps_its_host_copy_when_the_host_is_full() -> None:
    driver = TieredDriver(capacity=64, host_pages=12)
    for ids in (A, B):
        driver.serve(ANN, ids)
        driver.back_up()
    driver.cache.evict(64)
    load = driver.load(A)  # the colder one
    driver.serve(ANN, C)
    driver.check()
    driver.back_up()
    driver.check()
    assert (driver.on_host(B), len(load.host_pages)) == (0, 6)
    driver.done(load)
    assert driver.peek(ANN, [*A, 0]) == len(A)


def test_a_backup_is_dropped_when_the_host_copy_of_its_parent_is_gone() -> None:
    driver = TieredDriver()
    for user in (ANN, BOB):
        driver.serve(user, A)
    driver.next_epoch()
    assert driver.tenants == [A]
    driver.back_up()
    driver.serve(ANN, [*A, *B])
    (backup,) = driver.tier.plan_backups()
    (shared,) = (node for node, _ in driver.radix.store.tree.walk() if node.is_shared)
    Demoter(driver.radix.store, driver.radix.locks, FleetLedger(driver.radix.store)).demote(shared)
    driver.check()
    driver.done(backup)
    driver.check()
    assert not any(node.host_pages is not None for node in driver.views())
    assert driver.tier.pages.allocator.free_pages == 64


def test_backups_that_are_done_out_of_order_are_kept_in_order() -> None:
    driver = TieredDriver()
    driver.serve(ANN, A)
    (first,) = driver.tier.plan_backups()
    driver.serve(ANN, [*A, *B])
    (second,) = driver.tier.plan_backups()
    driver.done(second)
    assert not any(node.host_pages is not None for node in driver.views())
    driver.done(first)
    assert len(driver.views()) > 1
    assert all(node.host_pages is not None for node in driver.views())
    driver.check()


def test_a_subject_forgotten_during_transfers_leaves_no_pages() -> None:
    driver = hosted(A)
    driver.serve(ANN, B)
    transfers = [driver.load(A), *driver.tier.plan_backups()]
    assert len(transfers) == 2
    driver.cache.forget(ANN.subject)
    driver.check()
    driver.done(*transfers)
    driver.check()
    assert driver.views() == []
    assert (driver.allocator.free_pages, driver.tier.pages.allocator.free_pages) == (64, 64)


def test_a_promotion_takes_over_the_host_copy_and_voids_the_open_load() -> None:
    driver = hosted(A)
    load = driver.load(A)
    driver.serve(BOB, A)
    driver.serve(ANN, A)
    driver.next_epoch()
    assert driver.tenants == [A]
    driver.check()
    driver.done(load)
    driver.check()
    (node,) = driver.views()
    assert node.host_pages is not None
    assert driver.peek(CID, [*A, 0]) == len(A)


def test_pages_of_a_demoted_node_stay_protected_until_their_backup_is_done() -> None:
    driver = TieredDriver()
    for user in (ANN, BOB):
        driver.serve(user, A)
    driver.next_epoch()
    (backup,) = driver.tier.plan_backups()
    (shared,) = (node for node, _ in driver.radix.store.tree.walk())
    assert shared.is_shared
    Demoter(driver.radix.store, driver.radix.locks, FleetLedger(driver.radix.store)).demote(shared)
    assert [node.pages.tolist() for node in driver.views()] == [backup.device_pages.tolist()] * 2
    driver.check()
    assert (driver.radix.protected_pages, driver.cache.evict(64)) == (len(A) // 2, 0)
    driver.check()
    driver.done(backup)
    driver.check()
    assert (driver.radix.protected_pages, driver.on_host(A)) == (0, 0)


def test_a_shared_prefix_that_is_only_on_the_host_is_found_by_others() -> None:
    driver = TieredDriver()
    for user in (ANN, BOB):
        driver.serve(user, A)
    driver.back_up()
    driver.cache.evict(64)
    driver.next_epoch()
    (node,) = driver.views()
    assert node.state is NodeState.ON_HOST
    assert driver.tier.find(CID, int32([*A, 0])).host_tokens == len(A)
    driver.check()


def test_a_flush_keeps_pages_in_transfer() -> None:
    driver = hosted(A)
    driver.serve(ANN, B)
    driver.back_up()
    load = driver.load(A)
    driver.cache.flush()
    driver.check()
    driver.done(load)
    assert driver.peek(ANN, [*A, 0]) == len(A)
    assert driver.peek(ANN, [*B, 0]) == driver.on_host(B) == 0
    driver.cache.flush()
    assert (driver.allocator.free_pages, driver.tier.pages.allocator.free_pages) == (64, 64)


def test_a_node_evicted_page_by_page_becomes_one_node_again() -> None:
    driver = TieredDriver()
    driver.serve(ANN, A)
    driver.back_up()
    for _ in range(6):
        driver.cache.evict(1)
    assert len(driver.views()) > 1
    driver.next_epoch()
    (node,) = driver.views()
    assert (node.state, node.token_ids.tolist()) == (NodeState.ON_HOST, A)
    driver.check()
    driver.done(driver.load(A))
    assert driver.peek(ANN, [*A, 0]) == len(A)


def test_a_copy_that_is_being_read_stays_when_another_node_takes_it_over() -> None:
    driver = hosted(A)
    load = driver.load(A)
    driver.serve(BOB, A)
    driver.next_epoch()
    assert driver.tenants == [A]
    driver.check()
    driver.cache.flush()
    driver.check()
    driver.done(load)
    driver.cache.flush()
    assert (driver.allocator.free_pages, driver.tier.pages.allocator.free_pages) == (64, 64)
