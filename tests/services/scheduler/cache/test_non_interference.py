"""What is claimed of the user-aware cache (B1 to B5; see docs/privacy.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Sharing, Subject, View
from tests.examples import examples
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, EVE, PLAIN, Driver, int32, with_rules
from tests.services.scheduler.cache.two_worlds import Ask, Deed, Pass, World, pages_of

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
    config = with_rules(PLAIN, promotion_subjects=k, hit_min=2, jump_factor=2, continuation_limit=4)
    before: list[Deed] = [*(Ask(View(Subject("tenant", f"early {n}")), APP) for n in range(k)), Pass()]
    return World(name, config).do([*before, *one]), World(name, config).do([*before, *other])


def assert_nobody_notices(one: list[Deed], other: list[Deed], *, k: int = 3, name: CacheName = "user_aware") -> None:
    left, right = both_worlds(one, other, k, name)
    assert left.observations_but(VICTIM) == right.observations_but(VICTIM)
    assert left.log_but(VICTIM) == right.log_but(VICTIM)
    assert left.views_of(WATCHERS) == right.views_of(WATCHERS)


class TestNonInterference:
    """B1, by paired runs: what everybody else observes is equal to the last bit."""

    @examples(40)
    @given(others(tails), st.lists(asks(st.just(VICTIM), tails.map(lambda tail: SECRET + tail)), max_size=4), places)
    def test_others_do_not_notice_whether_a_victim_is_present(
        self, ours: list[Deed], victims: list[Deed], at: list[int]
    ) -> None:
        assert_nobody_notices(mixed(ours, victims, at), ours)

    @examples(40)
    @given(others(st.one_of(tails, parts_of_the_secret)), st.lists(answers, min_size=1, max_size=4), places)
    def test_guesses_do_not_reveal_a_victim_s_text(
        self, ours: list[Deed], endings: list[tuple[int, ...]], at: list[int]
    ) -> None:
        """One victim and two who guess are fewer than the four that a promotion asks for."""
        one, other = (mixed(ours, [Ask(VICTIM, text, ending) for ending in endings], at) for text in (SECRET, DECOY))
        assert_nobody_notices(one, other, k=4)

    @examples(40)
    @given(
        others(st.one_of(tails, tails.map(lambda tail: APP + tail), parts_of_the_secret.map(lambda part: APP + part))),
        st.lists(answers, min_size=1, max_size=4),
        places,
    )
    def test_a_secret_below_a_public_prompt_stays_secret(
        self, ours: list[Deed], endings: list[tuple[int, ...]], at: list[int]
    ) -> None:
        one, other = (mixed(ours, [Ask(VICTIM, APP + text, end) for end in endings], at) for text in (SECRET, DECOY))
        assert_nobody_notices(one, other, k=4)

    @examples(40)
    @given(
        others(st.one_of(tails, parts_of_the_secret)), st.sampled_from(["opted out", "no cache", "generated"]), places
    )
    def test_requests_without_evidence_stay_unnoticeable_when_others_ask_the_same(
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
    @examples(20)
    @given(ours=others(st.one_of(tails, parts_of_the_secret)), at=places)
    def test_isolated_caches_show_nothing_at_all(self, name: CacheName, ours: list[Deed], at: list[int]) -> None:
        victims: list[Deed] = [Ask(VICTIM, SECRET), Ask(VICTIM, APP + SECRET)]
        assert_nobody_notices(mixed(ours, victims, at), ours, name=name)

    def test_the_shared_cache_fails_the_non_interference_check(self) -> None:
        """Otherwise equal worlds would prove nothing."""
        with pytest.raises(AssertionError):
            assert_nobody_notices([Ask(VICTIM, SECRET), Ask(ANN, SECRET)], [Ask(ANN, SECRET)], name="shared")

    def test_with_one_guesser_too_many_the_leak_is_detected(self) -> None:
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
        driver = Driver("user_aware", config=with_rules(PLAIN, promotion_subjects=k), capacity=400)
        for number in range(n):
            driver.serve(View(Subject("tenant", f"victim {number}")), list(SECRET))
        attackers = [View(Subject("tenant", f"attacker {number}")) for number in range(a)]
        for attacker in attackers[:computing]:
            driver.serve(attacker, list(SECRET))
        driver.next_epoch()
        return [driver.peek(attacker, [*SECRET, 0]) for attacker in attackers]

    @examples(40)
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

    @pytest.mark.parametrize("k", [1, 2, 3])
    @pytest.mark.parametrize("n", [1, 5])
    def test_subjects_of_other_tenants_learn_nothing_however_many_there_are(self, k: int, n: int) -> None:
        driver = Driver("user_aware", config=with_rules(PLAIN, promotion_subjects=k), capacity=400)
        for number in range(n):
            driver.serve(View(Subject("victims", f"{number}")), list(SECRET))
        attackers = [View(Subject("attackers", f"{number}"), f"{number % 3}") for number in range(20)]
        for attacker in attackers[: k - 1]:
            driver.serve(attacker, list(SECRET))
        driver.next_epoch()
        assert [driver.peek(attacker, [*SECRET, 0]) for attacker in attackers[k:]] == [0] * (20 - k)


class TestRevocation:
    """B3: after a wrong promotion, a prober loses its fast hits within two closed windows and one epoch."""

    @examples(30)
    @given(
        hits=st.lists(st.integers(16, 60), min_size=4, max_size=4),
        probers=st.sampled_from([(EVE,), (DAN, EVE)]),
        quiet_epochs=st.integers(0, 3),
        jump_factor=st.sampled_from([10, 1_000_000]),
    )
    def test_prober_sees_nothing_after_two_closed_windows(
        self, hits: list[int], probers: tuple[View, ...], quiet_epochs: int, jump_factor: int
    ) -> None:
        driver = Driver("user_aware", config=with_rules(PLAIN, jump_factor=jump_factor), capacity=4_000)
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
        return row.lock.matched_tokens


CROWD = (1, 2, 1, 2, 1, 2, 1, 2)
INVENTED = [
    View(Subject("rival", name), salt)
    for name in ("key/1", "user/a", "user/b", "user/c", "user/d")
    for salt in ("", "s")
]
ACME = [View(Subject("acme", f"user/{number}"), salt) for number in range(4) for salt in ("", "s")]
QUIET = [View(Subject("quiet", f"user/{number}"), salt) for number in range(6) for salt in ("", "s")]
texts = st.one_of(
    parts_of_the_secret,
    tails,
    st.sampled_from([APP, CROWD]).flatmap(
        lambda stem: st.one_of(tails, parts_of_the_secret).map(lambda end: stem + end)
    ),
)
choices = st.sampled_from(Sharing)


def deeds_of(views: list[View], ids: st.SearchStrategy[tuple[int, ...]] = texts) -> st.SearchStrategy[list[Deed]]:
    """Asks of any of the views, some of them many times in a row as a prober does it."""
    runs = st.tuples(asks(st.sampled_from(views), ids), st.sampled_from([1, 1, 1, 6])).map(
        lambda run: [run[0]] * run[1]
    )
    return st.lists(runs, max_size=16).map(lambda lists: [deed for run in lists for deed in run])


class TestNoInventions:
    """B5: whatever names, salts and keys somebody makes up, in another tenant or in one that shares nothing."""

    def worlds(self, one: list[Deed], other: list[Deed], sharing: dict[str, Sharing]) -> tuple[World, World]:
        """Pinned text, and text that two further tenants have made public by evidence, are there before."""
        chosen = {"one": Sharing.GLOBAL, "two": Sharing.GLOBAL, "quiet": Sharing.NONE, **sharing}
        config = with_rules(PLAIN, share_across_tenants=True, hit_min=2, jump_factor=2, continuation_limit=4)
        crowd = [View(Subject(tenant, f"user/{number}")) for tenant in ("one", "two") for number in range(3)]
        before: list[Deed] = [*(Ask(view, CROWD) for view in crowd), Ask(crowd[0], APP), Pass()]
        pair = []
        for deeds in (one, other):
            world = World("user_aware", config, chosen)
            world.cache.pin(int32(APP))
            pair.append(world.do([*before, Pass(), *deeds, Pass(), Pass()]))
        left, right = pair
        for world in pair:
            assert world.peek(View(Subject("else", "key/1")), [*CROWD, 0]) == len(CROWD)
            assert world.peek(View(Subject("else", "key/1")), [*APP, 0]) == len(APP)
        return left, right

    def assert_equal_for(self, users: list[View], left: World, right: World) -> None:
        assert left.observations_of(users) == right.observations_of(users)
        for user in users:
            seen = [
                {path: (page[0], page[1]) for path, page in pages_of(world.cache.dump(user)).items()}
                for world in (left, right)
            ]
            assert seen[0] == seen[1]

    @examples(30)
    @given(deeds_of(INVENTED), deeds_of(ACME), places, choices, st.sampled_from([Sharing.TENANT, Sharing.NONE]))
    def test_a_rival_tenant_changes_no_view_of_another(
        self, rivals: list[Deed], ours: list[Deed], at: list[int], rival: Sharing, victim: Sharing
    ) -> None:
        ours = mixed(ours, [Pass(), Pass(0)] * 2, at)
        both = interleaved(ours, rivals, at)
        self.assert_equal_for(ACME, *self.worlds(both, ours, {"rival": rival, "acme": victim}))

    @examples(30)
    @given(
        deeds_of(INVENTED),
        deeds_of(ACME),
        deeds_of(ACME),
        places,
        choices,
        st.sampled_from([Sharing.TENANT, Sharing.NONE]),
    )
    def test_a_rival_tenant_learns_nothing_of_another_s_private_or_shared_text(
        self, rivals: list[Deed], one: list[Deed], other: list[Deed], at: list[int], rival: Sharing, victim: Sharing
    ) -> None:
        rivals = mixed(rivals, [Pass(), Pass(0)] * 2, at)
        left, right = (interleaved(rivals, ours, at) for ours in (one, other))
        self.assert_equal_for(INVENTED, *self.worlds(left, right, {"rival": rival, "acme": victim}))

    @examples(30)
    @given(deeds_of(QUIET[2:]), deeds_of(QUIET[:2]), deeds_of(QUIET[:2]), places)
    def test_subjects_of_a_tenant_that_shares_nothing_neither_learn_nor_change_anything(
        self, rivals: list[Deed], one: list[Deed], other: list[Deed], at: list[int]
    ) -> None:
        rivals = mixed(rivals, [Pass(), Pass(0)] * 2, at)
        left, right = (interleaved(rivals, ours, at) for ours in (one, other))
        self.assert_equal_for(QUIET[2:], *self.worlds(left, right, {}))
        alone = mixed(one, [Pass(), Pass(0)] * 2, at)
        self.assert_equal_for(QUIET[:2], *self.worlds(interleaved(alone, rivals_without_time(rivals), at), alone, {}))

    def test_global_sharing_of_two_tenants_is_observable(self) -> None:
        """Otherwise equal worlds would prove nothing."""
        rivals: list[Deed] = [Ask(view, SECRET) for view in INVENTED]
        ours: list[Deed] = [Ask(view, SECRET) for view in ACME]
        both = dict.fromkeys(("rival", "acme"), Sharing.GLOBAL)
        with pytest.raises(AssertionError):
            self.assert_equal_for(INVENTED, *self.worlds([*ours, *rivals], rivals, both))


def interleaved(ours: list[Deed], theirs: list[Deed], at: list[int]) -> list[Deed]:
    """Put further deeds among ours."""
    deeds = list(ours)
    for number, deed in enumerate(theirs):
        deeds.insert(at[number % len(at)] * (number + 1) % (len(deeds) + 1), deed)
    return deeds


def rivals_without_time(deeds: list[Deed]) -> list[Deed]:
    return [deed for deed in deeds if isinstance(deed, Ask)]


class TestGuessCost:
    """B4: only whole pages match, so that a page has to be guessed at once."""

    @examples(50)
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
        assert row.lock.matched_tokens == right_pages * page_size
