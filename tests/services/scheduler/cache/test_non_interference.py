"""What is claimed of the user-aware cache: non-interference, threshold, revocation, whole pages (B1 to B4)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import Subject, View
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver
from tests.services.scheduler.cache.two_worlds import Ask, Deed, Pass, World

if TYPE_CHECKING:
    from services.scheduler.cache.factory import CacheName

VICTIM = View(Subject("tenant", "victim"))
OTHERS = (ANN, BOB)
# Everybody who must not notice the victim, and one who only looks on.
WATCHERS = (ANN, BOB, CID, DAN)
APP = (1, 1, 2, 2, 3, 3)
SECRET = (8, 9, 8, 9, 7, 7, 9, 9)
DECOY = (5, 6, 5, 6, 4, 4, 6, 6)

tails = st.lists(st.integers(0, 1), max_size=6).map(tuple)
answers = st.lists(st.integers(0, 1), max_size=3).map(tuple)
parts_of_the_secret = st.integers(0, len(SECRET)).map(lambda length: SECRET[:length])
passing = st.builds(Pass, st.sampled_from([1, 1, 1, 2, 40]))


def asks(users: st.SearchStrategy[View], ids: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Deed]:
    return st.builds(
        Ask,
        users,
        ids.filter(len),
        answers,
        chunk=st.integers(1, 6),
        stays=st.booleans(),
        may_promote=st.booleans(),
    )


def others(ids: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[list[Deed]]:
    deed = st.one_of(asks(st.sampled_from(OTHERS), ids), asks(st.sampled_from(OTHERS), ids), passing)
    return st.lists(deed, min_size=4, max_size=24)


def mixed(ours: list[Deed], victims: list[Deed], at: list[int]) -> list[Deed]:
    """Put the victim's deeds among everybody else's."""
    deeds = list(ours)
    for deed, place in zip(victims, at, strict=False):
        deeds.insert(place % (len(deeds) + 1), deed)
    return deeds


places = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


def both_worlds(one: list[Deed], other: list[Deed], k: int, name: CacheName = "user_aware") -> tuple[World, World]:
    config = replace(PLAIN, promotion_subjects=k, hit_min=2, jump_factor=2, continuation_limit=4)
    before: list[Deed] = [*(Ask(View(Subject("tenant", f"early {n}")), APP) for n in range(k)), Pass()]
    return World(name, config).do([*before, *one]), World(name, config).do([*before, *other])


def assert_nobody_notices(one: list[Deed], other: list[Deed], *, k: int = 3, name: CacheName = "user_aware") -> None:
    left, right = both_worlds(one, other, k, name)
    assert left.observations_but(VICTIM) == right.observations_but(VICTIM)
    assert left.log_but(VICTIM) == right.log_but(VICTIM)
    assert left.views_of(WATCHERS) == right.views_of(WATCHERS)


class TestNonInterference:
    """B1, by paired runs: what everybody else observes is equal to the last bit."""

    @settings(max_examples=80, deadline=None)
    @given(others(tails), st.lists(asks(st.just(VICTIM), tails.map(lambda tail: SECRET + tail)), max_size=4), places)
    def test_victim_may_as_well_be_absent(self, ours: list[Deed], victims: list[Deed], at: list[int]) -> None:
        assert_nobody_notices(mixed(ours, victims, at), ours)

    @settings(max_examples=80, deadline=None)
    @given(others(st.one_of(tails, parts_of_the_secret)), st.lists(answers, min_size=1, max_size=4), places)
    def test_guesses_change_nothing(self, ours: list[Deed], endings: list[tuple[int, ...]], at: list[int]) -> None:
        """One victim and two who guess are fewer than the four that a promotion asks for."""
        one, other = (mixed(ours, [Ask(VICTIM, text, ending) for ending in endings], at) for text in (SECRET, DECOY))
        assert_nobody_notices(one, other, k=4)

    @settings(max_examples=80, deadline=None)
    @given(
        others(st.one_of(tails, tails.map(lambda tail: APP + tail), parts_of_the_secret.map(lambda part: APP + part))),
        st.lists(answers, min_size=1, max_size=4),
        places,
    )
    def test_secret_below_a_public_prompt_stays_one(
        self, ours: list[Deed], endings: list[tuple[int, ...]], at: list[int]
    ) -> None:
        one, other = (mixed(ours, [Ask(VICTIM, APP + text, end) for end in endings], at) for text in (SECRET, DECOY))
        assert_nobody_notices(one, other, k=4)

    @settings(max_examples=80, deadline=None)
    @given(
        others(st.one_of(tails, parts_of_the_secret)), st.sampled_from(["opted out", "no cache", "generated"]), places
    )
    def test_what_is_no_evidence_may_be_what_everybody_else_asks(
        self, ours: list[Deed], why: str, at: list[int]
    ) -> None:
        """Also with as many others as a promotion asks for, who do without the victim."""
        secret = {
            "opted out": Ask(VICTIM, SECRET, may_promote=False),
            "no cache": Ask(VICTIM, SECRET, may_use_cache=False),
            "generated": Ask(VICTIM, SECRET[:1], SECRET[1:]),
        }[why]
        crowd: list[Deed] = [*ours, Ask(CID, SECRET), Ask(DAN, SECRET[:4]), Pass(), Ask(ANN, SECRET)]
        assert_nobody_notices(mixed(crowd, [secret] * 4, at), crowd)

    @pytest.mark.parametrize("name", ["isolated", "isolated_pinned"])
    @settings(max_examples=30, deadline=None)
    @given(ours=others(st.one_of(tails, parts_of_the_secret)), at=places)
    def test_isolated_caches_show_nothing_at_all(self, name: CacheName, ours: list[Deed], at: list[int]) -> None:
        victims: list[Deed] = [Ask(VICTIM, SECRET), Ask(VICTIM, APP + SECRET)]
        assert_nobody_notices(mixed(ours, victims, at), ours, name=name)

    def test_shared_cache_is_seen_to_leak(self) -> None:
        """Otherwise equal worlds would prove nothing."""
        with pytest.raises(AssertionError):
            assert_nobody_notices([Ask(VICTIM, SECRET), Ask(ANN, SECRET)], [Ask(ANN, SECRET)], name="shared")

    def test_one_guesser_too_many_is_seen_to_leak(self) -> None:
        guesses: list[Deed] = [Ask(ANN, SECRET), Ask(BOB, SECRET), Pass(), Ask(CID, SECRET)]
        with pytest.raises(AssertionError):
            assert_nobody_notices([Ask(VICTIM, SECRET), *guesses], [Ask(VICTIM, DECOY), *guesses])


class TestThreshold:
    """B2: `a` who collude learn whether `n` others hold a chain exactly where n + a > k."""

    @pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
    def test_sweep_leaks_exactly_beyond_the_threshold(self, k: int) -> None:
        leaks = {(a, n): self.leaks(a, n, k) for a in range(1, 7) for n in range(1, 7)}
        assert leaks == {(a, n): n + a > k for a, n in leaks}

    def leaks(self, a: int, n: int, k: int) -> bool:
        """Whether any number of the attackers who compute the chain lets the others tell if it is held."""
        return any(self.found(a, computing, n, k) != self.found(a, computing, 0, k) for computing in range(a + 1))

    def found(self, a: int, computing: int, n: int, k: int) -> list[int]:
        driver = Driver("user_aware", config=replace(PLAIN, promotion_subjects=k), capacity=400)
        for number in range(n):
            driver.serve(View(Subject("victims", f"{number}")), list(SECRET))
        attackers = [View(Subject("attackers", f"{number}")) for number in range(a)]
        for attacker in attackers[:computing]:
            driver.serve(attacker, list(SECRET))
        driver.next_epoch()
        return [driver.peek(attacker, [*SECRET, 0]) for attacker in attackers]

    @settings(max_examples=80, deadline=None)
    @given(
        others(st.one_of(tails, parts_of_the_secret, parts_of_the_secret.map(lambda part: APP + part))),
        st.lists(answers, min_size=1, max_size=4),
        places,
        st.sampled_from([(), APP]),
    )
    def test_colluders_at_the_threshold_observe_nothing(
        self, ours: list[Deed], endings: list[tuple[int, ...]], at: list[int], stem: tuple[int, ...]
    ) -> None:
        """A victim and two colluders make it public, when both have computed it: then neither has anything to learn."""
        one, other = (mixed(ours, [Ask(VICTIM, stem + text, end) for end in endings], at) for text in (SECRET, DECOY))
        left, right = both_worlds(one, other, k=3)
        assert left.observations_but(VICTIM) == right.observations_but(VICTIM)
        found = [[set(view) for view in world.views_of(OTHERS)] for world in (left, right)]
        assert found[0] == found[1]

    def test_invented_users_of_one_tenant_do_not_help_where_tenants_count(self) -> None:
        driver = Driver("user_aware", config=replace(PLAIN, tenant_counts_as_one=True), capacity=400)
        driver.serve(View(Subject("victims", "one")), list(SECRET))
        for number in range(20):
            driver.serve(View(Subject("attackers", f"{number}")), list(SECRET))
        driver.next_epoch()
        assert driver.peek(View(Subject("attackers", "the last")), [*SECRET, 0]) == 0


class TestRevocation:
    """B3: after a wrong promotion, a prober loses its fast hits within two closed windows and one epoch."""

    @settings(max_examples=60, deadline=None)
    @given(
        hits=st.lists(st.integers(16, 60), min_size=4, max_size=4),
        probers=st.sampled_from([(EVE,), (DAN, EVE)]),
        quiet_epochs=st.integers(0, 3),
        jump_factor=st.sampled_from([10, 1_000_000]),
    )
    def test_prober_sees_nothing_after_two_closed_windows(
        self, hits: list[int], probers: tuple[View, ...], quiet_epochs: int, jump_factor: int
    ) -> None:
        driver = Driver("user_aware", config=replace(PLAIN, jump_factor=jump_factor), capacity=4_000)
        for user in (ANN, BOB, CID):
            driver.serve(user, list(SECRET))
        driver.next_epoch()
        for _ in range(quiet_epochs):
            driver.next_epoch()
        for window, count in enumerate(hits):
            for prober in probers:
                found = [self.probe(driver, prober) for _ in range(count)]
                if window >= 2:
                    assert not any(found)
            driver.next_epoch()
        assert all(driver.peek(user, [*SECRET, 0]) == len(SECRET) for user in (ANN, BOB, CID))

    def probe(self, driver: Driver, prober: View) -> int:
        row = driver.admit(prober, [*SECRET, 0])
        driver.end(row)
        return row.lease.matched_tokens


class TestGuessCost:
    """B4: only whole pages match, so that a page has to be guessed at once."""

    @settings(max_examples=100, deadline=None)
    @given(page_size=st.sampled_from([1, 2, 4, 16]), data=st.data())
    def test_page_with_one_wrong_token_looks_like_any_other(self, page_size: int, data: st.DataObject) -> None:
        driver = Driver("user_aware", config=PLAIN, capacity=400, page_size=page_size)
        text = [7] * (4 * page_size)
        for user in (ANN, BOB, CID):
            driver.serve(user, text)
        driver.next_epoch()
        guess = data.draw(st.lists(st.sampled_from([7, 7, 7, 7, 8]), min_size=len(text), max_size=len(text)))
        right_pages = next((at for at in range(4) if guess[at * page_size :][:page_size] != text[:page_size]), 4)
        assert driver.peek(EVE, [*guess, 0]) == right_pages * page_size
        row = driver.admit(EVE, [*guess, 0])
        assert row.lease.matched_tokens == right_pages * page_size
