"""Quotas and floors of tenants and of their subjects: what a flood under any names can push out, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import Limits, SubjectLimits, TenantLimits
from common.transfers import TransferAck
from common.types import Sharing, Subject, View
from services.scheduler.cache.accounts import Accounts
from services.scheduler.cache.config import CacheConfig
from services.scheduler.cache.debug.invariants import queue_violations
from services.scheduler.cache.debug.replay import replay
from services.scheduler.cache.eviction import EvictionQueue
from services.scheduler.cache.tiers.config import HostConfig
from services.scheduler.cache.types import NodeState
from tests.examples import examples
from tests.services.scheduler.cache.debug.test_replay import RecordedDriver
from tests.services.scheduler.cache.driver import PLAIN, Driver, int32

if TYPE_CHECKING:
    from services.scheduler.cache.node import Account

VICTIM = View(Subject("tenant", "user/victim"))
KEY = Subject("tenant", "key/rival")
NAMES = 64
TOKENS, CACHED = 625, 624


def ids(number: int, tokens: int = TOKENS) -> list[int]:
    return [number, *range(1, tokens)]


def pages_of(driver: Driver, tenant: str) -> int:
    nodes = [node for node in driver.cache.dump() if node.owner is not None and node.owner.tenant == tenant]
    return sum(len(node.pages) for node in nodes if node.state is NodeState.LIVE)


def flooded(config: CacheConfig, *, by: list[View], rounds: int = 3) -> Driver:
    """The victim has 624 cached tokens; then each of `by` asks for as many, several times."""
    driver = Driver("user_aware", capacity=256, page_size=16, config=config)
    driver.serve(VICTIM, ids(0))
    assert driver.peek(VICTIM, ids(0)) == CACHED
    for turn in range(rounds):
        for number, view in enumerate(by):
            driver.serve(view, ids(1 + number + turn * len(by)))
    driver.check()
    return driver


class TestInventedNames:
    """Issue 12, 1.4: 64 invented names pushed a victim's 624 cached tokens out."""

    def test_names_under_a_key_that_does_not_vouch_evict_nothing(self) -> None:
        """Such a name is a salt: all views are of one subject, with one quota."""
        driver = flooded(CacheConfig(), by=[View(KEY, f"user=name {number}") for number in range(NAMES)])
        assert driver.peek(VICTIM, ids(0)) == CACHED

    def test_names_under_another_tenant_s_vouching_key_evict_nothing(self) -> None:
        names = [View(Subject("rival", f"user/name {number}")) for number in range(NAMES)]
        driver = flooded(CacheConfig(), by=names)
        assert driver.peek(VICTIM, ids(0)) == CACHED
        # What the victim's tenant leaves of its half is the flood's, too.
        assert pages_of(driver, "rival") > 128

    def test_a_vouching_key_can_evict_pages_above_the_floor_in_its_own_tenant(self) -> None:
        """The control: such a key is trusted to name its tenant's people, each of whom counts."""
        names = [View(Subject("tenant", f"user/name {number}")) for number in range(NAMES)]
        assert flooded(CacheConfig(floor_share=0.0), by=names).peek(VICTIM, ids(0)) == 0
        kept = flooded(CacheConfig(floor_share=20 / 256), by=names, rounds=1).peek(VICTIM, ids(0))
        assert kept == pytest.approx(20 * 16, abs=4 * 16)

    def test_floors_of_invented_names_protect_nothing_against_other_tenants(self) -> None:
        """Each name's floor counts within its tenant: together they hold no more than the tenant may."""
        config = CacheConfig(floor_share=1 / 64, tenant_floor_share=1 / 64)
        driver = Driver("user_aware", capacity=256, page_size=16, config=config)
        for number in range(NAMES):
            # 64 names with 4 pages each, which is all memory, and each name's floor.
            driver.serve(View(Subject("rival", f"user/name {number}")), ids(number, 65))
        for number in range(8):
            driver.serve(View(Subject("tenant", f"user/{number}")), ids(1_000 + number, 257))
        assert pages_of(driver, "tenant") >= 112
        found = [driver.peek(View(Subject("tenant", f"user/{n}")), ids(1_000 + n, 257)) for n in range(7)]
        assert found == [256] * 7


class TestTenants:
    def test_a_tenant_alone_may_use_all_memory(self) -> None:
        driver = Driver("user_aware", capacity=64, config=replace(PLAIN, quota_share=0.25))
        for number in range(4):
            driver.serve(View(Subject("tenant", f"user/{number}")), ids(number, 32))
        assert pages_of(driver, "tenant") == 64
        assert driver.cache.soft_free_pages == 0

    def test_memory_is_divided_among_active_tenants_when_both_want_it(self) -> None:
        driver = Driver("user_aware", capacity=64, config=PLAIN)
        large, small = View(Subject("large", "user/a")), View(Subject("small", "user/b"))
        for number in range(40):
            driver.serve(large, ids(number, 4))
        assert pages_of(driver, "large") == 64
        for number in range(100, 112):
            driver.serve(small, ids(number, 4))
        for number in range(200, 260):
            driver.serve(large, ids(number, 4))
        # The small one keeps what it has; it takes more as it asks for more, up to one half.
        assert (pages_of(driver, "large"), pages_of(driver, "small")) == (40, 24)
        for number in range(300, 340):
            driver.serve(small, ids(number, 4))
        for number in range(400, 440):
            driver.serve(large, ids(number, 4))
        assert (pages_of(driver, "large"), pages_of(driver, "small")) == pytest.approx((32, 32), abs=2)

    def test_pages_of_idle_tenants_go_to_active_ones(self) -> None:
        driver = Driver("user_aware", capacity=64, config=replace(PLAIN, active_epochs=2))
        for number in range(30):
            driver.serve(View(Subject(f"tenant {number % 3}", "user/a")), ids(number, 4))
        driver.next_epoch(4)
        for number in range(100, 140):
            driver.serve(View(Subject("late", "user/a")), ids(number, 4))
        assert pages_of(driver, "late") == 64

    def test_tenants_get_their_stated_shares_and_the_others_divide_the_rest(self) -> None:
        driver = Driver("user_aware", capacity=64, config=PLAIN)
        driver.cache.adopt(Limits(tenants={"gold": TenantLimits(cache_share=0.5)}))
        names = ("gold", "one", "two")
        for number in range(200):
            for index, tenant in enumerate(names):
                driver.serve(View(Subject(tenant, "user/a")), ids(3 * number + index, 4))
            if number > 40:
                for extra in range(3):
                    driver.serve(View(Subject("one", "user/a")), ids(1_000 + 3 * number + extra, 4))
        # Up to a request's pages, which count when they are computed.
        assert [pages_of(driver, tenant) for tenant in names] == pytest.approx([32, 16, 16], abs=2)
        driver.check()

    def test_public_text_is_in_no_tenant_s_quota(self) -> None:
        driver = Driver("user_aware", capacity=64, config=replace(PLAIN, public_bonus_epochs=50))
        system = list(range(1, 41))
        for number in range(3):
            driver.serve(View(Subject("tenant", f"user/{number}")), system)
        driver.next_epoch()
        for number in range(4):
            driver.serve(View(Subject("tenant", f"user/{number}")), [*system, 50])
        driver.next_epoch()
        for number in range(60):
            driver.serve(View(Subject("a", "user/a")), ids(100 + number, 4))
            driver.serve(View(Subject("b", "user/b")), ids(100 + number, 4))
        assert driver.peek(VICTIM, [*system, 51]) == 40
        assert (pages_of(driver, "a"), pages_of(driver, "b")) == pytest.approx((22, 22), abs=2)

    @pytest.mark.parametrize("share", [None, 0.25])
    def test_text_that_two_rival_tenants_make_public_takes_one_tenant_s_part(self, share: float | None) -> None:
        rivals = {"one": Sharing.GLOBAL, "other": Sharing.GLOBAL}
        driver = Driver(
            "user_aware",
            capacity=200,
            config=CacheConfig(share_across_tenants=True),
            sharing_of=lambda tenant: rivals.get(tenant, Sharing.TENANT),
        )
        driver.cache.adopt(Limits(default=TenantLimits(cache_share=share)))
        driver.serve(VICTIM, ids(0, 81))
        for first in range(0, 32, 4):
            for number in range(first, first + 4):
                for view in (View(Subject(tenant, f"user/{name}")) for tenant in rivals for name in range(3)):
                    driver.serve(view, ids(100 + number, 20))
            driver.next_epoch(2)
            # Many subjects keep public text longer than the victim's, which is in use as well.
            for number in range(first + 4):
                for name in range(3, 11):
                    driver.serve(View(Subject("one", f"user/{name}")), ids(100 + number, 20))
            if first % 8:
                assert driver.serve(VICTIM, ids(0, 81)) >= 70
        assert driver.public
        driver.check()


class TestSubjects:
    def test_all_views_of_a_subject_share_its_quota(self) -> None:
        driver = Driver("isolated", capacity=64, config=replace(PLAIN, quota_share=8 / 64))
        for number in range(10):
            driver.serve(View(KEY, f"salt {number}"), ids(number, 5))
        assert pages_of(driver, "tenant") == 8
        found = [driver.peek(View(KEY, f"salt {number}"), [*ids(number, 5), 0]) > 0 for number in range(10)]
        # What is over the quota is soft-free, and still found as long as nobody wants the memory.
        assert found == [True] * 10
        driver.cache.evict(44 + 8)
        assert driver.peek(View(KEY, "salt 0"), [*ids(0, 5), 0]) == 0

    def test_the_subject_with_most_of_a_tenant_s_part_gives_up_first(self) -> None:
        """Its quota of the tier would let it: of a smaller part its quota is a smaller one."""
        driver = Driver("user_aware", capacity=64, config=replace(PLAIN, quota_share=0.5))
        modest, greedy = View(Subject("a", "user/modest")), View(Subject("a", "user/greedy"))
        driver.serve(modest, ids(0, 9))
        for number in range(60):
            driver.serve(greedy, ids(100 + number, 4))
            driver.serve(View(Subject("b", "user/b")), ids(100 + number, 4))
        assert driver.peek(modest, [*ids(0, 9), 0]) == 8
        assert pages_of(driver, "a") == pytest.approx(32, abs=2)

    def test_stated_quotas_and_floors_of_subjects_hold(self) -> None:
        driver = Driver("isolated", capacity=64, config=PLAIN)
        named = {"user/small": SubjectLimits(cache_share=4 / 64), "user/kept": SubjectLimits(cache_floor=8 / 64)}
        driver.cache.adopt(Limits(tenants={"tenant": TenantLimits(subjects=named)}))
        small, kept = View(Subject("tenant", "user/small")), View(Subject("tenant", "user/kept"))
        driver.serve(kept, ids(0, 17))
        for number in range(10):
            driver.serve(small, ids(10 + number, 4))
        live = [node for node in driver.cache.dump(small) if node.state is NodeState.LIVE]
        assert sum(len(node.pages) for node in live) == 4
        for number in range(60):
            driver.serve(View(Subject("tenant", f"user/{number}")), ids(100 + number, 4))
        assert driver.peek(kept, [*ids(0, 17), 0]) == 16

    def test_other_limits_count_from_the_next_operation_on(self) -> None:
        driver = Driver("isolated", capacity=64, config=PLAIN)
        ann = View(Subject("tenant", "user/ann"))
        for number in range(20):
            driver.serve(ann, ids(number, 4))
        assert pages_of(driver, "tenant") == 40
        driver.cache.adopt(Limits(default=TenantLimits(each_subject=SubjectLimits(cache_share=0.25))))
        driver.serve(ann, ids(99, 4))
        assert pages_of(driver, "tenant") == 16
        driver.check()


class TestHost:
    """The host tier counts and evicts by the same rules."""

    def flooded(self, views: list[View], **rules: float) -> int:
        """Return how many of the victim's 16 tokens are still on the host after others have had 400 pages copied."""
        config = replace(PLAIN, **{"quota_share": 0.25, **rules})  # type: ignore[arg-type]  # shares
        driver = Driver("user_aware", capacity=16, config=config, host=HostConfig(pages=64))
        host = driver.radix.host
        assert host is not None
        for number, view in enumerate([VICTIM, *(views * 200)[:200]]):
            driver.serve(view, ids(number, 17 if view is VICTIM else 5))
            for transfer in host.plan_backups():
                host.finish(TransferAck(transfer.transfer_id, transfer.pages), 0.0)
        driver.cache.evict(16)
        assert driver.violations() == []
        return host.find(VICTIM, int32(ids(0, 17))).host_tokens

    def test_salts_of_one_subject_do_not_evict_a_victim_s_host_copies(self) -> None:
        assert self.flooded([View(KEY, f"{number}") for number in range(NAMES)]) == 16

    def test_subjects_of_a_rival_tenant_do_not_evict_a_victim_s_host_copies(self) -> None:
        assert self.flooded([View(Subject("rival", f"user/{number}")) for number in range(NAMES)]) == 16

    def test_subjects_of_the_same_tenant_can_evict_a_victim_s_host_copies(self) -> None:
        assert self.flooded([View(Subject("tenant", f"user/{number}")) for number in range(NAMES)]) == 0


VIEWS = [
    View(Subject(tenant, subject), salt)
    for tenant in ("a", "b", "c")
    for subject in ("user/x", "user/y")
    for salt in ("", "s")
]
SHARES = st.none() | st.sampled_from([0.1, 0.25, 0.5, 1.0])
subject_limits = st.builds(SubjectLimits, cache_share=SHARES)
tenant_limits = st.builds(
    TenantLimits,
    cache_share=SHARES,
    each_subject=subject_limits,
    subjects=st.just({}) | st.fixed_dictionaries({"user/x": subject_limits}),
)
limits = st.builds(Limits, default=tenant_limits, tenants=st.just({}) | st.fixed_dictionaries({"a": tenant_limits}))


@examples(30)
@given(
    st.lists(
        st.tuples(st.sampled_from(VIEWS), st.integers(0, 6), st.integers(2, 14))
        | st.tuples(st.just("epoch"), st.integers(1, 4), st.just(0))
        | st.tuples(st.just("evict"), st.integers(1, 9), st.just(0))
        | st.tuples(st.just("limits"), limits, st.just(0)),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.1]),
)
def test_accounts_and_eviction_order_hold_for_any_tenants_subjects_and_limits(steps: list[Any], floor: float) -> None:
    """After every operation, counts of subjects and tenants are those of their nodes, and the right one goes next."""
    config = CacheConfig(floor_share=floor, tenant_floor_share=floor, active_epochs=2, headroom_share=0.0)
    driver = Driver("user_aware", capacity=24, config=config)
    for what, first, tokens in steps:
        if what == "epoch":
            driver.next_epoch(first)
        elif what == "evict":
            driver.cache.evict(first)
        elif what == "limits":
            driver.cache.adopt(first)
        else:
            driver.serve(what, ids(first, tokens))
        driver.check()


@examples(20)
@given(
    kind=st.sampled_from(["salts", "subjects of a rival tenant", "views of a rival tenant"]),
    names=st.integers(1, 80),
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    victim_pages=st.integers(1, 16),
    epochs=st.booleans(),
)
def test_a_victim_s_nodes_survive_a_flood_under_any_names(
    kind: str, names: int, lengths: list[int], victim_pages: int, *, epochs: bool
) -> None:
    """One other credential, of the same tenant or of another, asks for whatever it likes under `names` names."""
    driver = Driver("user_aware", capacity=64, config=CacheConfig())
    prompt = ids(0, 2 * victim_pages + 1)
    driver.serve(VICTIM, prompt)
    for number in range(120):
        name = f"name {number % names}"
        views = {
            "salts": View(KEY, name),
            "subjects of a rival tenant": View(Subject("rival", f"user/{name}")),
            "views of a rival tenant": View(Subject("rival", "key/1"), name),
        }
        driver.serve(views[kind], ids(1 + number, lengths[number % len(lengths)]))
        if epochs and number % 50 == 49:
            driver.next_epoch()
    assert driver.peek(VICTIM, prompt) == 2 * victim_pages
    driver.check()


@dataclass(eq=False)
class Leaf:
    """A candidate without a tree."""

    owner: Account
    last_access: int
    pages: int = 1
    queued: int = 0
    pinned: bool = False
    priority: int = 0
    epoch: int = 0
    u_pre: int = 0
    uses: int = 0


@examples(30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=60),
    looks=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_eviction_victims_do_not_depend_on_how_often_the_queue_is_inspected(
    steps: list[tuple[int, int, int, bool]], looks: list[bool]
) -> None:
    """Two queues with equal operations, one of which is looked at in between, agree on every victim."""

    def play(looks: list[bool]) -> list[tuple[tuple[str, ...], int]]:
        accounts = Accounts(PLAIN)
        queue: EvictionQueue[Leaf] = EvictionQueue(replace(PLAIN, quota_share=0.3), 40, accounts)
        victims = []
        held: set[Leaf] = set()
        for clock, ((tenant, subject, pages, take), look) in enumerate(zip(steps, looks, strict=False)):
            account = accounts.open(("t" + str(tenant), "s" + str(subject), ""), 0)
            leaf = Leaf(account, clock, pages)
            queue.charge(account, pages)
            queue.push(leaf)
            held.add(leaf)
            if look:
                queue.first()
            if take and (victim := queue.first()) is not None:
                victims.append((victim.owner.scope, victim.last_access))
                queue.discard(victim)
                queue.charge(victim.owner, -victim.pages)
                held.remove(victim)
        counted: dict[Any, int] = {}
        for leaf in held:
            for holder in (leaf.owner.holder, leaf.owner.holder.tenant):
                counted[holder] = counted.get(holder, 0) + leaf.pages
        assert list(queue_violations(queue, counted, held)) == []
        return victims

    assert play(looks) == play([False] * 60)


def test_changes_cost_little_however_many_subjects_there_are() -> None:
    """No look goes through all subjects: a thousand of them are ranked once, and then a few at each look."""
    accounts = Accounts(PLAIN)
    queue: EvictionQueue[Leaf] = EvictionQueue(PLAIN, 100_000, accounts)
    looked = 0
    for number in range(2_000):
        account = accounts.open((f"t{number % 20}", f"s{number}", ""), 0)
        queue.charge(account, 1)
        queue.push(Leaf(account, number))
    measured = queue._subject_urgency

    def counting(subject: Any) -> Any:
        nonlocal looked
        looked += 1
        return measured(subject)

    for tenant in queue._tenants.values():
        tenant.by_urgency._urgency = counting
    queue.first()
    looked = 0
    for _ in range(1_000):
        victim = queue.first()
        assert victim is not None
        queue.discard(victim)
        queue.charge(victim.owner, -1)
    assert looked < 10_000


@pytest.mark.parametrize("mode", ["user_aware", "shared", "isolated"])
def test_a_replay_repeats_changes_of_limits(mode: str) -> None:
    driver = RecordedDriver(mode, capacity=16)  # type: ignore[arg-type]  # named above
    half = Limits(tenants={"a": TenantLimits(cache_share=0.25, each_subject=SubjectLimits(cache_share=0.125))})
    for number in range(30):
        if number == 10:
            driver.cache.adopt(half)
        for view in VIEWS[:6]:
            driver.serve(view, ids(number, 5))
        if number % 7 == 0:
            driver.next_epoch()
    report = replay(driver.lines)
    assert report.difference is None
    assert report.operations > 200
    without = [line for line in driver.lines if b'"adopt"' not in line]
    assert len(without) == len(driver.lines) - 1
    assert (replay(without).difference is None) == (mode == "shared")
