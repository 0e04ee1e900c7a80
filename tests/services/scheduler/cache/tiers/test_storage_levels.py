"""What two caches with one storage find of each other's text: that of the view, of its tenant, and of the public."""

from __future__ import annotations

import hmac
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfers import TransferAck, TransferDirection
from common.types import Sharing, Subject, View
from services.scheduler.cache.object_keys import ObjectKeys
from services.scheduler.cache.tiers.config import HostConfig, PrefetchPolicy, StorageConfig
from tests.services.scheduler.cache.driver import PLAIN, Driver, int32

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.factory import CacheName
    from services.scheduler.cache.types import Scope

TEXT = [1, 2, 3, 4, 5, 6]
PAGE_SIZE = 2


class SharedNames:
    """What a keyring file does for several schedulers: names by subject, tenant or public, and generation."""

    def __init__(self) -> None:
        self.generations: Counter[Scope] = Counter()

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        name = repr((scope, self.generations[scope[:2]])).encode()
        return ObjectKeys(tuple(hmac.digest(b"secret", name + chain, "sha256") for chain in hashes))

    def revoke(self, scope: Scope) -> None:
        self.generations[scope[:2]] += 1

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


class Group(Driver):
    """A scheduler group: its own cache and host tier, over a storage that others use, too."""

    def __init__(
        self,
        names: SharedNames,
        stored: set[bytes],
        sharing: dict[str, Sharing],
        *,
        mode: CacheName = "user_aware",
        config: CacheConfig = PLAIN,
    ) -> None:
        super().__init__(
            mode,
            config=config,
            capacity=600,
            page_size=PAGE_SIZE,
            sharing_of=lambda tenant: sharing.get(tenant, Sharing.TENANT),
            host=HostConfig(pages=400),
        )
        self.stored = stored
        self.now = 0.0
        assert self.cache.host is not None
        self.host = self.cache.host
        self.host.add_storage(StorageConfig(PrefetchPolicy.WAIT_COMPLETE, min_pages=1), names)

    def settle(self) -> None:
        """Do all transfers that are due."""
        while True:
            self.now += 1
            due = [*self.host.plan_backups(), *self.host.plan_storage(self.now)]
            if not due:
                return
            for transfer in due:
                done = transfer.pages
                if transfer.direction is TransferDirection.HOST_TO_STORAGE:
                    self.stored.update(transfer.object_keys)
                elif transfer.direction is TransferDirection.DROP_FROM_STORAGE:
                    self.stored.difference_update(transfer.object_keys)
                elif transfer.direction is TransferDirection.STORAGE_TO_HOST:
                    missing = (number for number, key in enumerate(transfer.object_keys) if key not in self.stored)
                    done = next(missing, done)
                self.host.finish(TransferAck(transfer.transfer_id, done), self.now)

    def ask(self, view: View, ids: list[int]) -> int:
        """Run a request as a scheduler does; return how many of its tokens were found on any tier."""
        self.host.prefetch(view, int32(ids))
        self.settle()
        match = self.host.find(view, int32(ids))
        self.serve(view, ids)
        self.settle()
        return match.device_tokens + match.host_tokens


def groups(sharing: dict[str, Sharing] | None = None) -> tuple[Group, Group]:
    names, stored = SharedNames(), set[bytes]()
    one, other = (Group(names, stored, {} if sharing is None else sharing) for _ in range(2))
    return one, other


def people(tenant: str, count: int) -> list[View]:
    return [View(Subject(tenant, f"user/{number}")) for number in range(count)]


def shared_by(group: Group, tenant: str, ids: Sequence[int] = TEXT) -> None:
    for view in people(tenant, 3):
        group.ask(view, [*ids, 0])
    group.next_epoch()
    group.settle()


def test_another_group_finds_a_tenant_s_shared_prefix_for_that_tenant_only() -> None:
    one, other = groups()
    shared_by(one, "acme")
    assert other.ask(View(Subject("acme", "user/new")), [*TEXT, 7]) == 6
    assert [token for edge in other.tenants for token in edge] == TEXT
    assert other.ask(View(Subject("blue", "user/0")), [*TEXT, 7]) == 0
    other.check()


def test_a_view_s_stored_pages_are_found_by_that_view_only() -> None:
    one, other = groups()
    ann, salted, bob = View(Subject("acme", "ann")), View(Subject("acme", "ann"), "s"), View(Subject("acme", "bob"))
    one.ask(ann, [*TEXT, 0])
    assert [other.ask(view, [*TEXT, 7]) for view in (salted, bob, ann)] == [0, 0, 6]


def test_a_tenant_that_shares_nothing_finds_nothing_of_the_tenant() -> None:
    sharing: dict[str, Sharing] = {}
    one, other = groups(sharing)
    shared_by(one, "acme")
    sharing["acme"] = Sharing.NONE
    assert other.ask(View(Subject("acme", "user/new")), [*TEXT, 7]) == 0
    # Also where the tenant is known already, from the next epoch on; and for good.
    one.next_epoch()
    one.settle()
    sharing["acme"] = Sharing.TENANT
    third = Group(one.host.storage._names, one.stored, sharing)  # type: ignore[union-attr, arg-type]  # the same
    assert third.ask(View(Subject("acme", "user/newer")), [*TEXT, 7]) == 0


@pytest.mark.parametrize("tenant", ["acme", "blue"])
def test_public_prefixes_in_storage_are_found_by_all_tenants(tenant: str) -> None:
    one, other = groups(dict.fromkeys(("acme", "blue"), Sharing.NONE))
    one.cache.pin(int32(TEXT))
    one.next_epoch()
    one.ask(View(Subject("acme", "user/0")), [*TEXT, 0])
    assert other.ask(View(Subject(tenant, "user/new")), [*TEXT, 7]) == 6


@pytest.mark.parametrize("mode", ["user_aware", "isolated_pinned"])
def test_text_that_a_cache_in_shared_mode_has_stored_is_not_public_in_other_modes(mode: CacheName) -> None:
    """As after a trial of `shared`, or beside a deployment with it that uses the same storage."""
    names, stored = SharedNames(), set[bytes]()
    shared = Group(names, stored, {}, mode="shared")
    shared.ask(View(Subject("acme", "user/ann")), [*TEXT, 0])
    assert Group(names, stored, {}, mode="shared").ask(View(Subject("blue", "user/0")), [*TEXT, 7]) == 6
    other = Group(names, stored, {}, mode=mode)
    assert other.ask(View(Subject("blue", "user/0")), [*TEXT, 7]) == 0


def test_a_tenant_that_ends_global_sharing_ends_it_for_text_that_is_only_in_storage() -> None:
    sharing = dict.fromkeys(("acme", "blue"), Sharing.GLOBAL)
    names, stored, config = SharedNames(), set[bytes](), replace(PLAIN, share_across_tenants=True)
    one = Group(names, stored, sharing, config=config)
    for tenant in sharing:
        shared_by(one, tenant)
    one.next_epoch()
    one.settle()
    assert [token for edge in one.public for token in edge] == TEXT
    sharing.update(dict.fromkeys(sharing, Sharing.TENANT))
    # A scheduler that starts now has nothing in memory, so nothing to demote.
    other = Group(names, stored, sharing, config=config)
    assert other.ask(View(Subject("rival", "key/r")), [*TEXT, 7]) == 0
    # The tenants' own copies stay theirs.
    assert other.ask(View(Subject("acme", "user/new")), [*TEXT, 7]) == 6
    other.check()


def test_an_unpinned_prompt_is_not_public_in_storage_any_more() -> None:
    one, other = groups()
    kept = [9, *TEXT]
    for ids in (TEXT, kept[:6]):
        one.cache.pin(int32(ids))
    one.next_epoch()
    for ids in (TEXT, kept[:6]):
        one.ask(View(Subject("acme", "user/0")), [*ids, 0])
    one.cache.unpin(int32(TEXT))
    one.settle()
    assert other.ask(View(Subject("blue", "user/new")), [*TEXT, 7]) == 0
    assert other.ask(View(Subject("blue", "user/new")), [*kept[:6], 7]) == 6


def test_forgetting_includes_pages_that_are_only_in_storage() -> None:
    one, other = groups()
    ann = View(Subject("acme", "ann"), "salt")
    one.ask(ann, [*TEXT, 0])
    # This group has nothing of hers in memory.
    other.cache.forget(ann.subject)
    third = Group(one.host.storage._names, one.stored, {})  # type: ignore[union-attr, arg-type]  # the same
    assert third.ask(ann, [*TEXT, 7]) == 0


asks = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 3), st.lists(st.integers(0, 1), max_size=3)),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(asks, asks, st.sampled_from(Sharing), st.sampled_from([Sharing.TENANT, Sharing.NONE]))
def test_no_tenant_sees_in_storage_or_elsewhere_whether_another_is_there(
    ours: list[tuple[int, int, int, list[int]]],
    theirs: list[tuple[int, int, int, list[int]]],
    rival: Sharing,
    victim: Sharing,
) -> None:
    """B5 over two groups and their storage: what Acme finds is the same with and without a rival's requests."""

    def run(with_rival: bool) -> list[int]:
        pair = groups({"acme": victim, "rival": rival})
        found = []
        for number in range(max(len(ours), len(theirs))):
            for tenant, deeds in (("rival", theirs if with_rival else []), ("acme", ours)):
                for which, name, length, tail in deeds[number : number + 1]:
                    ids = [*TEXT[: 2 * length], *tail, 9]
                    seen = pair[which].ask(View(Subject(tenant, f"user/{name}"), f"{len(tail) % 2}"), ids)
                    found += [seen] if tenant == "acme" else []
            if number % 4 == 3:
                for group in pair:
                    group.next_epoch()
                    group.settle()
        for group in pair:
            group.check()
        return found

    assert run(with_rival=True) == run(with_rival=False)
