"""When a group without workers hands its requests back for another group."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from services.scheduler.hand_back import HAND_BACK_S, HandBack


class Group:
    """A group with one open request, and the time of its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = MagicMock(open_sequences=[object()])
        self.hand_back = HandBack(lambda: self.now)
        self.hand_back.note_others("tokenizer", serve=True)

    def hands_back(self, *, is_group_ready: bool = False, at_once: bool = False) -> bool:
        self.core.fail_all.reset_mock()
        self.hand_back.check(self.core, is_group_ready=is_group_ready, at_once=at_once)
        if self.core.fail_all.called:
            (error,) = self.core.fail_all.call_args.args
            assert error.to_failure().retryable
        return bool(self.core.fail_all.called)


def test_requests_are_handed_back_once_the_workers_have_been_away_for_a_while() -> None:
    group = Group()
    assert not group.hands_back()
    group.now += HAND_BACK_S / 2
    assert not group.hands_back()
    group.now += HAND_BACK_S / 2
    assert group.hands_back()


def test_the_time_away_begins_again_after_the_workers_were_ready() -> None:
    group = Group()
    assert not group.hands_back()
    group.now += HAND_BACK_S
    assert not group.hands_back(is_group_ready=True)
    assert not group.hands_back()
    group.now += HAND_BACK_S
    assert group.hands_back()


def test_workers_that_may_have_stopped_are_not_waited_for() -> None:
    assert Group().hands_back(at_once=True)


@pytest.mark.parametrize("order", [("tokenizer", "other"), ("other", "tokenizer")])
@pytest.mark.parametrize("at_once", [False, True])
def test_requests_stay_while_no_tokenizer_could_send_them_to_another_group(
    order: tuple[str, str], *, at_once: bool
) -> None:
    group = Group()
    group.hand_back.note_others("other", serve=True)
    for tokenizer in order:
        assert group.hand_back.has_others
        group.hand_back.note_others(tokenizer, serve=False)
    assert not group.hand_back.has_others
    assert not group.hands_back(at_once=at_once)
    group.now += HAND_BACK_S
    assert not group.hands_back(at_once=at_once)


def test_workers_are_not_waited_for_again_once_another_group_serves() -> None:
    group = Group()
    group.hand_back.note_others("tokenizer", serve=False)
    assert not group.hands_back(at_once=True)
    group.hand_back.note_others("tokenizer", serve=True)
    assert group.hands_back()


def test_without_open_requests_there_is_nothing_to_hand_back() -> None:
    group = Group()
    group.core.open_sequences = []
    assert not group.hands_back(at_once=True)
