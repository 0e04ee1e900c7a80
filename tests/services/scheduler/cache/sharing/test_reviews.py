from __future__ import annotations

from typing import Any

from services.scheduler.cache.types import CandidateId
from tests.services.scheduler.cache.driver import ANN, BOB, CID, DAN, PLAIN, Driver, with_rules

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def driver_with(**changes: Any) -> Driver:
    driver = Driver("user_aware", config=with_rules(PLAIN, content_check=True, **changes), capacity=100)
    for number, user in enumerate((ANN, BOB, CID)):
        driver.serve(user, [*PROMPT, 50 + number, 0])
    driver.next_epoch()
    return driver


def test_without_a_verdict_nothing_is_published() -> None:
    driver = driver_with()
    for _ in range(50):
        driver.next_epoch()
    assert driver.tenants == []


def test_candidate_is_handed_out_once_with_all_its_tokens_and_no_subject() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    assert candidate.token_ids.tolist() == PROMPT
    assert set(candidate.__slots__) == {"candidate_id", "token_ids", "tenant"}
    assert candidate.tenant == "tenant"
    assert driver.cache.take_candidates() == ()
    driver.serve(DAN, PROMPT)
    driver.next_epoch()
    assert driver.cache.take_candidates() == ()


def test_allowed_chain_is_published_at_the_next_boundary() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, len(candidate.token_ids))
    assert driver.tenants == []
    driver.next_epoch()
    assert driver.tenants == [PROMPT]
    driver.check()


def test_vetoed_chain_is_never_asked_about_again() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 0)
    driver.serve(DAN, PROMPT)
    driver.next_epoch()
    assert driver.tenants == []
    assert driver.cache.take_candidates() == ()


def test_part_before_the_finding_is_published() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 5)
    driver.next_epoch()
    assert driver.tenants == [[1, 2, 3, 4]]
    assert driver.peek(ANN, [*PROMPT, 0]) == 8
    assert driver.cache.take_candidates() == ()
    driver.check()


def test_a_verdict_does_not_replace_expired_evidence() -> None:
    driver = driver_with(promotion_epochs=3)
    (candidate,) = driver.cache.take_candidates()
    driver.next_epoch(5)
    driver.cache.resolve(candidate.candidate_id, len(candidate.token_ids))
    driver.next_epoch()
    assert driver.tenants == []


def test_invalid_verdicts_publish_nothing() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(CandidateId(999), 100)
    driver.cache.resolve(candidate.candidate_id, -5)
    driver.cache.resolve(candidate.candidate_id, 1_000_000)
    driver.next_epoch()
    assert driver.tenants == []
    driver.serve(DAN, [9, 9])
    driver.next_epoch()
    assert driver.tenants == []


def test_lost_verdict_is_asked_for_again() -> None:
    driver = driver_with(verdict_epochs=2)
    assert len(driver.cache.take_candidates()) == 1
    driver.next_epoch(3)
    driver.serve(DAN, PROMPT)
    driver.next_epoch()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 8)
    driver.next_epoch()
    assert driver.tenants == [PROMPT]


def test_continuation_of_a_published_chain_is_asked_about_with_its_prefix() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.resolve(candidate.candidate_id, 8)
    driver.next_epoch()
    for user in (ANN, BOB, CID):
        driver.serve(user, [*PROMPT, 90, 91])
    driver.next_epoch()
    (candidate,) = driver.cache.take_candidates()
    assert candidate.token_ids.tolist() == [*PROMPT, 90, 91]


def test_pins_need_no_check() -> None:
    driver = driver_with()
    driver.cache.pin(candidate_ids := driver.cache.take_candidates()[0].token_ids)
    driver.next_epoch()
    assert driver.public == [candidate_ids.tolist()]


def test_a_verdict_applies_to_the_current_holders_of_the_chain() -> None:
    driver = driver_with()
    (candidate,) = driver.cache.take_candidates()
    driver.cache.flush()
    for user in (ANN, BOB, CID):
        driver.serve(user, PROMPT)
    driver.next_epoch()
    assert driver.cache.take_candidates() == ()
    driver.cache.resolve(candidate.candidate_id, 8)
    driver.next_epoch()
    assert driver.tenants == [PROMPT]


def test_no_more_candidates_are_offered_than_are_remembered() -> None:
    driver = Driver("user_aware", config=with_rules(PLAIN, content_check=True, remembered_chains=2), capacity=100)
    for number in range(5):
        for user in (ANN, BOB, CID):
            driver.serve(user, [number, number])
    driver.next_epoch()
    assert len(driver.cache.take_candidates()) == 2
