"""Three levels: what a view has of its own, of its tenant and of the public; who makes it so, and who can undo it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.types import Sharing, Subject, View
from services.scheduler.cache.node import Account
from services.scheduler.cache.types import Visibility
from tests.services.scheduler.cache.driver import PLAIN, Driver, int32, with_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = [1, 2, 3, 4, 5, 6]


def people(tenant: str, count: int, salt: str = "") -> list[View]:
    return [View(Subject(tenant, f"user/{number}"), salt) for number in range(count)]


ACME, BLUE, CYAN = people("acme", 6), people("blue", 6), people("cyan", 6)
STRANGER = View(Subject("dust", "user/0"))


def driver_with(sharing: dict[str, Sharing] | None = None, **changes: Any) -> Driver:
    choices = {} if sharing is None else sharing
    config = with_rules(PLAIN, **changes)
    return Driver("user_aware", config=config, capacity=600, sharing_of=lambda name: choices.get(name, Sharing.TENANT))


def serve_all(driver: Driver, views: Iterable[View], ids: list[int] = TEXT) -> None:
    for view in views:
        driver.serve(view, [*ids, 9, 9])


def probe(driver: Driver, view: View, times: int = 20) -> int:
    """Ask for the text and compute nothing of it; return how often it was found."""
    hits = 0
    for _ in range(times):
        row = driver.admit(view, [*TEXT, 7, 7])
        hits += row.lock.matched_tokens >= len(TEXT)
        driver.end(row)
    return hits


def finds(driver: Driver, *views: View) -> list[int]:
    return [driver.peek(view, [*TEXT, 0]) for view in views]


def global_driver(**changes: Any) -> tuple[Driver, dict[str, Sharing]]:
    """Acme and Blue have made a text public together."""
    choices = dict.fromkeys(("acme", "blue", "cyan"), Sharing.GLOBAL)
    driver = driver_with(choices, share_across_tenants=True, **changes)
    serve_all(driver, ACME[:3])
    serve_all(driver, BLUE[:3])
    driver.next_epoch()
    assert [*TEXT, 9, 9] in driver.public
    return driver, choices


class TestNobodyIsInvented:
    """What issue 12 found: evidence counts subjects of one tenant, whatever names, salts and keys requests have."""

    def test_three_unnamed_turns_of_one_chat_share_nothing(self) -> None:
        """Point 1.1: an unnamed request is its credential, and one of an anonymous client proves nothing."""
        driver = driver_with()
        key, anonymous = Subject("acme", "key/1"), Subject("default", "anonymous")
        for turn in range(3):
            driver.serve(View(key), TEXT)
            driver.serve(View(anonymous, f"request={turn}"), TEXT, may_promote=False)
        driver.next_epoch()
        assert driver.tenants == driver.public == []
        assert finds(driver, View(key), STRANGER, ACME[0], View(anonymous, "request=9")) == [6, 0, 0, 0]

    def test_three_conversations_of_one_subject_share_nothing(self) -> None:
        """Point 1.2: salts narrow what is found, and are no people."""
        driver = driver_with()
        for number in range(20):
            driver.serve(View(ACME[0].subject, f"user=conversation-{number}"), TEXT)
        driver.next_epoch()
        assert driver.tenants == driver.public == []
        assert finds(driver, ACME[1], View(ACME[0].subject, "user=other"), STRANGER) == [0, 0, 0]

    @pytest.mark.parametrize("across", [False, True])
    def test_invented_names_of_another_tenant_learn_nothing(self, across: bool) -> None:
        """Point 1.3: one victim, and more invented people than a promotion asks for."""
        held, lacking = (
            driver_with(dict.fromkeys(("acme", "blue"), Sharing.GLOBAL), share_across_tenants=across) for _ in range(2)
        )
        held.serve(ACME[0], TEXT)
        for driver in (held, lacking):
            serve_all(driver, people("blue", 2))
            driver.next_epoch()
            serve_all(driver, people("blue", 20)[2:])
            driver.next_epoch()
        views = [*people("blue", 25), View(Subject("blue", "key/1"))]
        assert finds(held, *views) == finds(lacking, *views)
        assert finds(held, ACME[0], ACME[1]) == [6, 0]

    def test_one_tenant_cannot_remove_another_s_shared_prefix(self) -> None:
        """Point 1.5: neither what the other tenant shares in itself nor what both have made public."""
        driver, _ = global_driver()
        driver.next_epoch()
        for first in range(0, 12, 2):
            found = [probe(driver, name) for name in people("cyan", 12)[first : first + 2]]
            assert found == ([20, 20] if first == 0 else [0, 0])
            driver.next_epoch()
        assert finds(driver, *people("cyan", 12)) == [0] * 12
        assert finds(driver, ACME[5], BLUE[5], STRANGER) == [6, 6, 6]
        driver.check()


class TestLevels:
    def test_a_prefix_with_evidence_in_one_tenant_is_shared_in_that_tenant_only(self) -> None:
        driver = driver_with()
        serve_all(driver, ACME[:3])
        driver.next_epoch()
        assert driver.tenants == [[*TEXT, 9, 9]]
        assert finds(driver, ACME[5], BLUE[0], STRANGER) == [6, 0, 0]
        row = driver.admit(ACME[5], [*TEXT, 0])
        assert (row.lock.public_tokens, row.lock.tenant_tokens) == (0, 6)
        driver.end(row)
        assert {(owner.view, owner.tenant) for owner in driver.cache.owners() if owner.nodes} == {(None, "acme")}
        assert driver.cache.usage.tenant_pages == 4
        driver.check()

    def test_subjects_of_several_tenants_are_no_evidence_together(self) -> None:
        driver = driver_with(dict.fromkeys(("acme", "blue", "cyan"), Sharing.GLOBAL), share_across_tenants=True)
        for users in (ACME, BLUE, CYAN):
            serve_all(driver, users[:2])
        driver.next_epoch()
        assert driver.tenants == driver.public == []

    def test_tenants_share_the_same_text_side_by_side(self) -> None:
        driver = driver_with()
        for users in (ACME, BLUE):
            serve_all(driver, users[:3])
        driver.next_epoch()
        assert len(driver.tenants) == 2
        assert finds(driver, ACME[5], BLUE[5], CYAN[0]) == [6, 6, 0]
        driver.next_epoch()
        # One copy of the pages for both.
        assert driver.cache.usage.merged_pages == 4
        driver.check()

    def test_a_prefix_shared_by_two_tenants_becomes_public_if_both_share_globally(self) -> None:
        driver, _ = global_driver()
        assert driver.tenants == []
        assert finds(driver, STRANGER) == [6]
        (node,) = [node for node in driver.cache.dump() if node.visibility is Visibility.PUBLIC]
        assert (node.promoted_by, node.promoted_tenants) == (6, 2)
        driver.check()

    @pytest.mark.parametrize("other", [Sharing.TENANT, Sharing.NONE])
    def test_a_tenant_without_global_sharing_makes_nothing_public(self, other: Sharing) -> None:
        driver = driver_with({"acme": Sharing.GLOBAL, "blue": other}, share_across_tenants=True)
        for users in (ACME, BLUE):
            serve_all(driver, users[:3])
        driver.next_epoch()
        assert driver.public == []
        assert finds(driver, ACME[5], STRANGER) == [6, 0]

    def test_global_sharing_requires_the_operator_s_permission(self) -> None:
        driver = driver_with(dict.fromkeys(("acme", "blue"), Sharing.GLOBAL))
        for users in (ACME, BLUE):
            serve_all(driver, users[:3])
        driver.next_epoch()
        assert driver.public == []
        assert finds(driver, STRANGER) == [0]

    def test_a_third_tenant_does_not_influence_prefixes_made_public_by_two(self) -> None:
        """Otherwise they would learn what it holds."""
        seen = []
        for has_third in (False, True):
            driver = driver_with(dict.fromkeys(("acme", "blue"), Sharing.GLOBAL), share_across_tenants=True)
            if has_third:
                serve_all(driver, CYAN[:4], TEXT[:4])
                driver.serve(View(Subject("dust", "user/9")), TEXT[:2])
            for users in (ACME, BLUE):
                serve_all(driver, users[:3])
            driver.next_epoch()
            driver.check()
            seen.append(finds(driver, ACME[5], BLUE[5], STRANGER))
        assert seen == [[6, 6, 6]] * 2

    def test_pinned_text_is_public_for_all_tenants(self) -> None:
        driver = driver_with({"blue": Sharing.NONE})
        serve_all(driver, ACME[:3])
        driver.next_epoch()
        driver.cache.pin(int32(TEXT))
        driver.next_epoch()
        assert finds(driver, BLUE[0], STRANGER) == [6, 6]
        driver.check()

    def test_private_pages_below_shared_prefixes_are_merged_across_tenants(self) -> None:
        driver = driver_with()
        for users in (ACME, BLUE):
            serve_all(driver, users[:3])
        driver.next_epoch()
        for view in (ACME[0], BLUE[0]):
            driver.serve(view, [*TEXT, 9, 9, 5, 5, 5, 5])
        before = driver.cache.usage.merged_pages
        driver.next_epoch()
        assert driver.cache.usage.merged_pages == before + 2
        driver.check()


class TestChoices:
    def test_a_tenant_with_sharing_none_shares_nothing_and_finds_public_prefixes(self) -> None:
        driver, choices = global_driver()
        choices["cyan"] = Sharing.NONE
        serve_all(driver, CYAN[:5], [5, 5, 5, 5])
        driver.next_epoch()
        assert driver.peek(CYAN[5], [5, 5, 5, 5, 0]) == 0
        assert finds(driver, CYAN[5]) == [6]

    def test_shared_prefixes_return_to_their_creators_when_a_tenant_stops_sharing(self) -> None:
        choices: dict[str, Sharing] = {}
        driver = driver_with(choices)
        for users in (ACME, BLUE):
            serve_all(driver, users[:3])
        driver.next_epoch()
        running = driver.admit(ACME[5], [*TEXT, 1, 1])
        choices["acme"] = Sharing.NONE
        driver.next_epoch()
        assert finds(driver, *ACME[:3], ACME[5], BLUE[5]) == [6, 6, 6, 0, 6]
        driver.check(running)
        driver.end(running)
        # Text sent meanwhile is no evidence later, and neither is what they kept.
        serve_all(driver, ACME[3:])
        choices["acme"] = Sharing.TENANT
        driver.next_epoch()
        serve_all(driver, ACME[3:5])
        driver.next_epoch()
        assert finds(driver, View(Subject("acme", "user/new"))) == [0]

    def test_a_public_prefix_returns_to_its_tenants_when_too_few_share_it(self) -> None:
        driver, choices = global_driver()
        choices["blue"] = Sharing.TENANT
        driver.next_epoch()
        assert finds(driver, ACME[5], BLUE[5], STRANGER) == [6, 6, 0]
        driver.check()
        choices["blue"] = Sharing.GLOBAL
        driver.next_epoch()
        assert finds(driver, STRANGER) == [6]


class TestTenantsAreJudgedAlone:
    def test_a_probing_tenant_loses_sight_of_public_text_and_others_do_not(self) -> None:
        driver, _ = global_driver()
        driver.next_epoch()
        for view in CYAN[:2]:
            assert probe(driver, view) == 20
        driver.next_epoch()
        assert finds(driver, *CYAN, ACME[5], BLUE[5], STRANGER) == [0] * 6 + [6, 6, 6]
        # Whoever computes it itself sees it again; when enough have, the tenant does.
        serve_all(driver, CYAN[:5])
        assert finds(driver, CYAN[0], CYAN[5]) == [6, 0]
        driver.next_epoch()
        assert finds(driver, CYAN[5]) == [0]
        driver.serve(CYAN[5], TEXT)
        driver.next_epoch()
        assert finds(driver, View(Subject("cyan", "user/new"))) == [6]

    def test_requests_that_may_not_promote_do_not_end_a_tenant_s_quarantine(self) -> None:
        """Private requests were counted like those of subjects that share what they ask."""
        driver, _ = global_driver()
        driver.next_epoch()
        for view in CYAN[:2]:
            probe(driver, view)
        driver.next_epoch()
        for view in CYAN[:5]:
            driver.serve(view, TEXT, may_promote=False)
        for view in people("cyan", 10)[6:]:
            driver.serve(view, TEXT, may_promote=False)
        driver.next_epoch()
        # Each of them sees what it has computed itself, and nobody else does.
        assert finds(driver, CYAN[0], CYAN[4], CYAN[5]) == [6, 6, 0]
        newcomer = View(Subject("cyan", "user/new"))
        serve_all(driver, people("cyan", 16)[11:])
        driver.next_epoch()
        assert finds(driver, newcomer) == [0]
        # With the sixth whose text may be shared, there are enough.
        driver.serve(CYAN[5], TEXT)
        driver.next_epoch()
        assert finds(driver, newcomer) == [6]
        driver.check()

    def test_several_probing_tenants_return_a_public_prefix_to_the_tenants_that_shared_it(self) -> None:
        driver, _ = global_driver()
        driver.serve(ACME[4], [*TEXT, 9, 9, 4, 4])
        driver.next_epoch()
        dust = people("dust", 3)
        for view in (*CYAN[:2], *dust[:2]):
            assert probe(driver, view) == 20
        driver.next_epoch()
        assert finds(driver, ACME[5], BLUE[5], CYAN[5], dust[2], View(Subject("else", "user/0"))) == [6, 6, 0, 0, 0]
        assert driver.peek(ACME[4], [*TEXT, 9, 9, 4, 4, 0]) == 10
        driver.check()

    def test_a_tenant_that_probes_a_prefix_it_shared_loses_it(self) -> None:
        driver, _ = global_driver()
        driver.next_epoch()
        for view in (*BLUE[3:5], *CYAN[:2]):
            assert probe(driver, view) == 20
        driver.next_epoch()
        assert finds(driver, ACME[5], BLUE[0], BLUE[5], CYAN[5]) == [6, 6, 0, 0]
        driver.check()

    def test_a_demotion_in_one_tenant_does_not_raise_the_bar_in_another(self) -> None:
        driver = driver_with()
        serve_all(driver, ACME[:3])
        driver.next_epoch()
        driver.next_epoch()
        for view in ACME[3:5]:
            probe(driver, view)
        driver.next_epoch()
        assert driver.tenants == []
        serve_all(driver, BLUE[:3])
        serve_all(driver, ACME[3:5])
        driver.next_epoch()
        assert finds(driver, ACME[5], BLUE[5]) == [0, 6]
        driver.check()

    def test_subjects_of_a_tenant_with_none_do_not_judge_each_other(self) -> None:
        driver, choices = global_driver()
        choices["cyan"] = Sharing.NONE
        driver.next_epoch()
        for view in CYAN[:4]:
            assert probe(driver, view) == 20
        driver.next_epoch()
        assert finds(driver, *CYAN) == [0, 0, 0, 0, 6, 6]


def test_verdicts_of_another_tenant_are_not_used() -> None:
    """Otherwise the time of a promotion would show whether another tenant has the same text."""
    driver = driver_with(content_check=True)
    serve_all(driver, ACME[:3])
    driver.next_epoch()
    for candidate in driver.cache.take_candidates():
        driver.cache.resolve(candidate.candidate_id, len(candidate.token_ids))
    driver.next_epoch()
    serve_all(driver, BLUE[:3])
    driver.next_epoch()
    assert finds(driver, ACME[5], BLUE[5]) == [6, 0]
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 2)
    driver.next_epoch()
    assert finds(driver, ACME[5], BLUE[5]) == [6, 2]


def test_views_of_one_subject_count_as_one_and_differ_between_kinds() -> None:
    views = [View(Subject("acme", "user/1"), salt) for salt in ("", "a", "b")]
    accounts = [Account((view.tenant, view.subject.name, view.salt)) for view in views]
    assert len({account.fingerprint for account in accounts}) == 1
    assert Account(("acme", "key/1", "")).fingerprint != accounts[0].fingerprint


def test_forgetting_a_subject_forgets_all_its_views_and_keeps_shared_prefixes() -> None:
    driver = driver_with()
    serve_all(driver, ACME[:3])
    driver.next_epoch()
    for salt in ("", "one", "other"):
        driver.serve(View(ACME[0].subject, salt), [*TEXT, 9, 9, 8, 8])
    driver.cache.forget(ACME[0].subject)
    assert [driver.peek(View(ACME[0].subject, salt), [*TEXT, 9, 9, 8, 8, 0]) for salt in ("", "one")] == [8, 8]
    (node,) = [node for node in driver.cache.dump() if node.visibility is Visibility.TENANT]
    assert node.creators == 2
    driver.check()
