"""Sessions, whose turns stay in the cache within quotas."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace

import pytest

from common.errors import InvalidRequestError, QueueFullError
from common.limits import Limits, SubjectLimits, TenantLimits
from common.settings import SchedulerSettings
from common.steps import EngineCapacity
from common.types import (
    CacheMode,
    ErrorCode,
    FinishReason,
    RequestFailure,
    RequestId,
    Resume,
    SessionTurn,
    SessionWish,
    Subject,
    View,
)
from services.scheduler.core.config import resolve_core
from services.scheduler.core.session import SessionRules
from tests.fakes.simulated_worker import expected_output
from tests.services.scheduler.core.harness import STOP_ID, Harness, make_request, with_options
from tests.services.scheduler.core.session_requests import ALICE, FIRST, RULES, harness_with, open_session, whole

BOB = View(Subject("tenant", "bob"))
CAPACITY = EngineCapacity(1024, 16, 2048, 1000, (0,), 512, "fingerprint", "cpu", 2)


def ask(
    harness: Harness,
    name: str,
    prompt: list[int],
    *,
    user: str = "alice",
    session: str | None = "chat",
    turn: SessionTurn | None = None,
    max_tokens: int = 6,
) -> RequestFailure | None:
    request = with_options(make_request(name, prompt, user=user, max_tokens=max_tokens), session=session, turn=turn)
    return harness.core.submit(request, harness.now).rejected


def flood(harness: Harness, requests: int = 12) -> None:
    """Let strangers' prompts go through all of the memory."""
    for number in range(requests):
        prompt = [500 + (number * 31 + i) % 400 for i in range(40)]
        name = f"stranger-{len(harness.outputs)}"
        assert ask(harness, name, prompt, user=name, session=None) is None
        harness.run()


def pinned(harness: Harness) -> list[int]:
    return [session.pinned_tokens for session in harness.core.sessions]


def test_a_session_s_second_turn_finds_its_first_after_a_flood() -> None:
    harness = harness_with(pages=40)
    for session in (None, "chat"):
        if session:
            open_session(harness)
        assert ask(harness, f"one-{session}", FIRST, session=session) is None
        harness.run()
        flood(harness)
        second = [*whole(harness, f"one-{session}", FIRST), 7, 8, 9]
        assert ask(harness, f"two-{session}", second, session=session) is None
        harness.run()
        harness.core.memory.cache.flush()
    assert harness.cached["two-None", 0] == 0
    # All whole pages whose KV was computed: the last token's never is.
    computed = len(FIRST) + len(harness.outputs["one-chat", 0]) - 1
    assert harness.cached["two-chat", 0] == computed // 4 * 4
    harness.audit()


def test_a_session_name_alone_opens_no_session() -> None:
    harness = harness_with()
    assert ask(harness, "one", FIRST) is None
    harness.run()
    assert pinned(harness) == []


def test_the_next_turn_takes_the_place_of_the_last_one() -> None:
    harness = harness_with()
    open_session(harness)
    for number, length in enumerate((10, 30, 18)):
        ask(harness, f"r{number}", FIRST[:1] * length)
        harness.run()
        assert pinned(harness) == [(length + len(harness.outputs[f"r{number}", 0]) - 1) // 4 * 4]
        assert [session.turns for session in harness.core.sessions] == [number + 1]


def test_closed_and_expired_sessions_release_their_pages() -> None:
    harness = harness_with(pages=40)
    open_session(harness)
    ask(harness, "one", FIRST)
    harness.run()
    assert pinned(harness) == [24]
    assert not harness.core.sessions.close(BOB, "chat"), "it is Alice's"
    assert harness.core.sessions.close(ALICE, "chat")
    assert not harness.core.sessions.close(ALICE, "chat")
    harness.core.memory.cache.flush()
    assert harness.core.memory.allocator.free_pages == 40

    open_session(harness)
    ask(harness, "two", FIRST)
    # A turn that runs is no silence.
    harness.core.expire(0.0)
    harness.run()
    for now, left in ((100.0, 1), (109.9, 1), (110.0, 0)):
        harness.core.expire(now)
        assert len(harness.core.sessions) == left
    harness.core.memory.cache.flush()
    assert harness.core.memory.allocator.free_pages == 40
    harness.audit()


def test_a_session_is_accessible_to_its_opener_only() -> None:
    """Somebody else's session of the same name is another session."""
    harness = harness_with()
    open_session(harness, view=ALICE)
    ask(harness, "one", FIRST)
    harness.run()
    turn = SessionTurn("mine", after="one")
    failure = ask(harness, "two", FIRST, user="bob", turn=turn)
    assert failure is not None
    assert "is not open" in failure.message
    open_session(harness, view=BOB)
    ask(harness, "three", FIRST, user="bob")
    harness.run()
    assert harness.cached["three", 0] == 0
    assert [session.turns for session in harness.core.sessions] == [1, 1]


def test_session_quotas_refuse_and_name_the_allowed_value() -> None:
    harness = harness_with()
    sessions = harness.core.sessions
    with pytest.raises(InvalidRequestError, match="96 tokens here, not 97") as refused:
        open_session(harness, capacity=97)
    assert refused.value.param == "capacity_of_str_len"
    with pytest.raises(InvalidRequestError, match="60 s"):
        sessions.open(SessionWish(ALICE, "chat", timeout_ms=61_000))
    assert sessions.open(SessionWish(ALICE, "chat")).capacity_tokens == 96
    with pytest.raises(InvalidRequestError, match="open already"):
        open_session(harness)
    # Views that one subject makes up count as one.
    sessions.open(SessionWish(View(ALICE.subject, "invented"), "chat"))
    with pytest.raises(QueueFullError, match="2 sessions of this user are open, of which 2 may be"):
        sessions.open(SessionWish(View(ALICE.subject, "made up"), "chat"))
    open_session(harness, view=BOB)
    with pytest.raises(QueueFullError, match="3 sessions are open"):
        open_session(harness, view=View(Subject("tenant", "carol")))
    with pytest.raises(InvalidRequestError, match="keeps no sessions"):
        Harness(sessions=SessionRules()).core.sessions.open(SessionWish(ALICE, "chat"))


def test_tokens_held_by_sessions_are_bounded_per_user_and_per_tenant() -> None:
    harness = harness_with()
    for name in ("a", "b"):
        open_session(harness, name)
        assert ask(harness, name, [ord(name)] * 44, session=name) is None
        harness.run()
    assert sum(pinned(harness)) == 96
    failure = ask(harness, "more", [1] * 60, session="b")
    assert failure is not None
    assert failure.code is ErrorCode.QUEUE_FULL
    assert "hold 96 tokens, and with this turn 108, of which 96 may be; close a session" in failure.message
    open_session(harness, "c", BOB)
    failure = ask(harness, "too much", [3] * 40, user="bob", session="c")
    assert failure is not None
    assert "this organization hold as many tokens as they may" in failure.message
    assert ask(harness, "fits", [3] * 30, user="bob", session="c") is None
    harness.run()
    # Output beyond the bound is not held.
    assert sum(pinned(harness)) == 128
    # Outside of sessions nobody is concerned.
    assert ask(harness, "alone", [1] * 60, session=None) is None
    harness.run()


@pytest.mark.parametrize(("total", "per_tenant"), [(0, 0), (1, 1), (2, 1), (8, 6), (1024, 768)])
def test_a_tenant_may_have_three_quarters_of_the_sessions_but_one_at_least(total: int, per_tenant: int) -> None:
    settings = SchedulerSettings.model_validate({"sessions": {"limit_total": total, "share_total": 0.5}})
    rules = resolve_core(settings, CAPACITY).sessions
    assert (rules.total, rules.per_tenant) == (total, per_tenant)
    assert (rules.total_tokens, rules.tenant_tokens) == (512 * 16, 384 * 16)


def test_sessions_of_one_tenant_leave_some_to_others_whatever_names_it_invents() -> None:
    rules = SessionRules(per_subject=2, per_tenant=4, total=6, subject_tokens=48, tenant_tokens=96, total_tokens=160)
    harness = harness_with(rules)
    for number in range(4):
        view = View(Subject("tenant", f"invented {number}"))
        open_session(harness, "chat", view)
        assert ask(harness, f"turn {number}", [50 + number] * 22, user=view.subject.name) is None
        harness.run()
    assert sum(pinned(harness)) == 96
    late = View(Subject("tenant", "invented 5"))
    with pytest.raises(QueueFullError, match="4 sessions of this organization are open, of which 4 may be"):
        open_session(harness, "chat", late)
    failure = ask(harness, "more", [1] * 46, user="invented 3")
    assert failure is not None
    assert "the sessions of this organization hold as many tokens" in failure.message
    other = View(Subject("other", "ann"))
    open_session(harness, "chat", other)
    request = make_request("other", [7] * 30, user="ann", tenant="other", max_tokens=2)
    assert harness.core.submit(with_options(request, session="chat"), 0.0).rejected is None
    harness.run()
    assert sum(pinned(harness)) > 96


def test_a_turn_beyond_the_capacity_is_refused_and_output_beyond_it_is_not_held() -> None:
    harness = harness_with()
    open_session(harness, capacity=24)
    failure = ask(harness, "long", [1] * 25)
    assert failure is not None
    assert failure.code is ErrorCode.INVALID_REQUEST
    assert "holds 24 tokens, and this turn begins with 25" in failure.message
    assert ask(harness, "one", FIRST, max_tokens=20) is None
    harness.run()
    assert pinned(harness) == [24]


def test_pins_yield_only_when_otherwise_nothing_could_run() -> None:
    harness = harness_with(pages=32)
    open_session(harness, "a")
    open_session(harness, "b", BOB)
    ask(harness, "one", FIRST, session="a")
    harness.run()
    harness.core.expire(1.0)
    ask(harness, "two", [token + 300 for token in FIRST], user="bob", session="b")
    harness.run()
    harness.core.expire(2.0)
    assert pinned(harness) == [24, 24]
    flood(harness)
    assert pinned(harness) == [24, 24]
    # This one needs more than what sessions leave: who has been idle for longest gives way.
    assert ask(harness, "large", [7] * 84, user="carol", session=None, max_tokens=8) is None
    harness.run()
    assert harness.finishes["large", 0].reason is not FinishReason.ERROR
    assert harness.outputs["large", 0] == expected_output([7] * 84, 92, (STOP_ID,))
    assert pinned(harness) == [0, 24]
    assert harness.core.sessions.yielded == 1
    # It is open still, and holds again after its next turn.
    ask(harness, "again", FIRST, session="a")
    harness.run()
    assert pinned(harness) == [24, 24]


def keep(harness: Harness, view: View, name: str, tokens: int) -> None:
    """Open a session and let its first turn leave `tokens` tokens pinned; each is idle for longer than the next."""
    open_session(harness, name, view)
    prompt = [(len(harness.outputs) * 37 + 5 * index) % 800 + 20 for index in range(tokens - 1)]
    request = make_request(name, prompt, tenant=view.tenant, user=view.subject.name, max_tokens=2)
    assert harness.core.submit(with_options(request, session=name), harness.now).rejected is None
    harness.run()
    harness.now += 1
    harness.core.expire(harness.now)


def yielding(harness: Harness) -> list[str]:
    """Return the names of the sessions in the order in which they lose what they hold."""
    order = []
    while harness.core.sessions.yield_pin():
        order += [each.name for each in harness.core.sessions if each.pin is None and each.name not in order]
    return order


MANY = replace(RULES, per_subject=8, total=20, subject_tokens=200, tenant_tokens=400, total_tokens=800)


def test_the_tenant_that_holds_most_yields_first_and_one_below_its_share_keeps_its_pins() -> None:
    """The longest idle session yielded, whoever's it was: a tenant that opened many took pins of others."""
    harness = harness_with(MANY, pages=400)
    keep(harness, View(Subject("modest", "ann")), "old", 40)
    for number in range(4):
        keep(harness, View(Subject("greedy", f"invented{number}")), f"g{number}", 32)
    assert sum(pinned(harness)) == 40 + 4 * 32
    # Until the greedy tenant holds less than the modest one.
    assert yielding(harness) == ["g0", "g1", "g2", "old", "g3"]


def test_pins_yield_by_weight_of_tenant_and_subject() -> None:
    harness = harness_with(MANY, pages=400)
    harness.core.adopt(
        Limits(
            tenants={
                "large": TenantLimits(weight=4, subjects={"user/vip": SubjectLimits(weight=3)}),
                "small": TenantLimits(),
            }
        )
    )
    for name in ("vip", "plain"):
        for number in range(2):
            keep(harness, View(Subject("large", f"user/{name}")), f"{name}{number}", 40)
    keep(harness, View(Subject("small", "ann")), "small0", 44)
    # 44 tokens of the small tenant against 160 / 4, then 40 + 40 of one subject against 80 / 3 of the other.
    assert yielding(harness) == ["small0", "plain0", "plain1", "vip0", "vip1"]


def test_a_row_that_grows_alone_takes_pages_held_by_sessions() -> None:
    harness = harness_with(pages=16, max_context=80)
    open_session(harness)
    ask(harness, "one", FIRST)
    harness.run()
    assert ask(harness, "long", [9] * 20, user="bob", session=None, max_tokens=40) is None
    harness.run()
    assert harness.outputs["long", 0] == expected_output([9] * 20, 60, (STOP_ID,))
    assert pinned(harness) == [0]
    assert harness.core.memory.retractions == 0


def test_forgetting_ends_the_session() -> None:
    harness = harness_with()
    open_session(harness, "a")
    open_session(harness, "b")
    for name in ("a", "b"):
        ask(harness, name, [ord(name)] * 20, session=name)
        harness.run()
    assert harness.core.forget(ALICE.subject, "a") == 6
    assert [session.name for session in harness.core.sessions] == ["b"]
    assert harness.core.forget(ALICE.subject) == 6
    assert len(harness.core.sessions) == 0
    assert harness.core.memory.allocator.free_pages == harness.config.device_pages
    harness.audit()


def test_sessions_outlive_their_workers_but_lose_their_pages() -> None:
    harness = harness_with()
    open_session(harness)
    ask(harness, "one", FIRST, turn=SessionTurn("one"))
    harness.run()
    harness.lose_workers()
    assert pinned(harness) == [0]
    assert ask(harness, "two", [5, 6], turn=SessionTurn("two", after="one")) is None
    harness.run()
    prompt = [*whole(harness, "one", FIRST), 5, 6]
    assert harness.outputs["two", 0] == expected_output(prompt, len(prompt) + 6, (STOP_ID,))


def test_log_probabilities_of_a_turn_are_bounded_by_its_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_with()
    open_session(harness)
    ask(harness, "one", FIRST, turn=SessionTurn("one"))
    harness.run()
    length = len(whole(harness, "one", FIRST)) + 2
    monkeypatch.setattr("common.prompt_limits.MAX_PROMPT_LOGPROBS", length - 2)

    def refusal(name: str, start: int) -> str | None:
        wanted = make_request(name, [5, 6], user="alice", scored_from=start)
        turn = SessionTurn(name, after="one")
        failure = harness.core.submit(with_options(wanted, session="chat", turn=turn), harness.now).rejected
        return failure.param if failure else None

    assert refusal("all", 0) == "prompt_logprobs"
    assert refusal("after", length + 1) == "logprob_start_len"
    assert refusal("enough", 1) is None


def test_a_turn_continues_another_with_only_its_new_tokens() -> None:
    harness = harness_with()
    open_session(harness)
    assert ask(harness, "r1", FIRST, turn=SessionTurn("one")) is None
    harness.run()
    assert ask(harness, "r2", [5, 6, 7], turn=SessionTurn("two", after="one")) is None
    harness.run()
    prompt = [*whole(harness, "r1", FIRST), 5, 6, 7]
    assert harness.outputs["r2", 0] == expected_output(prompt, len(prompt) + 6, (STOP_ID,))
    # Whole pages of all but the last token of the turn before.
    assert harness.cached["r2", 0] == (len(prompt) - 3 - 1) // 4 * 4
    # Branches: from the first turn again, without its output, or from its middle.
    for name, options, kept in (
        ("three", {"drop_previous_output": True}, FIRST),
        ("four", {"offset": 10}, FIRST[:10]),
    ):
        assert ask(harness, name, [8], turn=SessionTurn(name, after="one", **options)) is None
        harness.run()
        assert harness.outputs[name, 0] == expected_output([*kept, 8], len(kept) + 7, (STOP_ID,))


def test_replacing_a_turn_forgets_the_turns_after_it() -> None:
    harness = harness_with()
    open_session(harness)
    for name, after in (("one", None), ("two", "one"), ("three", "two")):
        assert ask(harness, name, [5, 6, 7], turn=SessionTurn(name, after=after)) is None
        harness.run()
    assert ask(harness, "r", [9], turn=SessionTurn("other", after="one", replace=True)) is None
    harness.run()
    (session,) = harness.core.sessions
    assert list(session.history) == ["one", "other"]
    assert ask(harness, "s", [9], turn=SessionTurn("new", replace=True)) is None
    harness.run()
    assert list(session.history) == ["new"]


def test_an_answer_to_a_first_turn_goes_on_in_a_scheduler_that_does_not_have_its_session() -> None:
    before, after = harness_with(), harness_with()
    open_session(before)
    assert ask(before, "one", FIRST, turn=SessionTurn("one")) is None
    before.run()
    whole = before.outputs["one", 0]
    for name, turn in (("again", SessionTurn("one")), ("other", SessionTurn("two", after="one"))):
        resumed = make_request(name, FIRST, max_tokens=6, resume=Resume(tuple(whole[:2]), 0))
        failure = after.core.submit(with_options(resumed, session="chat", turn=turn), after.now).rejected
        assert (failure is None) is (turn.after is None)
    after.run()
    assert after.outputs["again", 0] == whole
    assert len(after.core.sessions) == 0
    after.audit()


@pytest.mark.parametrize("has_session", [False, True])
@pytest.mark.parametrize("generated", [0, 2])
def test_an_answer_to_a_later_turn_goes_on_with_the_conversation_that_its_admission_has_reported(
    generated: int, *, has_session: bool
) -> None:
    before, after = harness_with(), harness_with()
    open_session(before)
    assert ask(before, "one", FIRST, turn=SessionTurn("one")) is None
    before.run()
    turn = SessionTurn("two", after="one", offset=-1, replace=True)
    second = with_options(make_request("two", [90, 91], max_tokens=6), session="chat", turn=turn)
    admission = before.core.submit(second, before.now)
    assert admission.conversation_ids == (*FIRST, *before.outputs["one", 0])[:-1]
    before.run()
    output = before.outputs["two", 0]
    if has_session:
        # Of the same name, which the client has opened after the scheduler's end.
        open_session(after)
    resumed = make_request("again", [90, 91], max_tokens=6, resume=Resume(tuple(output[:generated]), 0))
    known = replace(turn, conversation_ids=admission.conversation_ids)
    again = after.core.submit(with_options(resumed, session="chat", turn=known), after.now)
    assert (again.rejected, again.prompt_tokens) == (None, admission.prompt_tokens)
    assert again.conversation_ids == admission.conversation_ids
    after.run()
    assert after.outputs["again", 0] == output
    assert len(after.core.sessions) == has_session
    after.audit()


@pytest.mark.parametrize("opens", [False, True])
def test_a_turn_is_refused_as_one_of_another_scheduler_where_its_session_or_its_predecessor_is_not(
    *, opens: bool
) -> None:
    harness = harness_with()
    if opens:
        open_session(harness)
    for turn, resume, goes_on in (
        (SessionTurn("x", after="elsewhere"), None, False),
        (SessionTurn("x", after="elsewhere", conversation_ids=(7, 8)), None, True),
        (SessionTurn("x"), Resume((9,), 0), True),
    ):
        for strict in (True, False):
            has_all = opens and turn.after is None
            name = f"{turn}-{strict}"
            options = {"session": "chat", "turn": replace(turn, only_in_session=strict), "resume": resume}
            admission = harness.core.submit(with_options(make_request(name, FIRST), **options), harness.now)
            assert admission.lacks_session is (not has_all and (strict or not goes_on)), name
            assert (admission.rejected is not None) is admission.lacks_session
            harness.run()
    other = with_options(make_request("other", FIRST), session="chat")
    assert not harness.core.submit(other, harness.now).lacks_session, "it continues no turn"
    harness.run()


def test_a_session_is_found_by_its_view_its_name_and_a_turn_that_has_ended_in_it() -> None:
    harness = harness_with()
    sessions = harness.core.sessions
    open_session(harness)
    assert ask(harness, "one", FIRST, turn=SessionTurn("one")) is None
    assert not sessions.has(ALICE, "chat", "one"), "it has not ended"
    harness.run()
    assert sessions.has(ALICE, "chat", None)
    assert sessions.has(ALICE, "chat", "one")
    assert not sessions.has(ALICE, "chat", "two")
    assert not sessions.has(ALICE, "other", None)
    assert not sessions.has(BOB, "chat", None), "it is Alice's"
    sessions.close(ALICE, "chat")
    assert not sessions.has(ALICE, "chat", None)


def test_turns_that_cannot_be_continued_are_refused() -> None:
    harness = harness_with()
    open_session(harness)
    assert ask(harness, "one", FIRST, turn=SessionTurn("one")) is None
    for turn in (SessionTurn("x", after="nobody"), SessionTurn("x", after="one")):
        # The second one has not ended yet.
        failure = ask(harness, "two", FIRST, turn=turn)
        assert failure is not None
        assert failure.param == "session_params"
    assert harness.core.abort(RequestId("one"))
    failure = ask(harness, "three", FIRST, turn=SessionTurn("x", after="one"))
    assert failure is not None, "it had not even begun"
    request = with_options(make_request("four", FIRST, n=2), session="chat", turn=SessionTurn("x"))
    rejected = harness.core.submit(request, 0.0).rejected
    assert rejected is not None
    assert "one choice" in rejected.message
    assert not any(session.open_requests for session in harness.core.sessions)


def test_a_session_does_not_hold_pages_that_may_not_be_cached() -> None:
    harness = harness_with()
    open_session(harness)
    request = make_request("one", FIRST, cache_mode=CacheMode.NONE)
    harness.core.submit(with_options(request, session="chat"), 0.0)
    harness.run()
    assert pinned(harness) == [0]


def test_the_context_limit_of_a_user_applies_to_the_whole_session() -> None:
    harness = harness_with()
    open_session(harness)
    for name, after in (("one", None), ("two", "one")):
        request = make_request(name, FIRST, max_tokens=None)
        turn = SessionTurn(name, after=after)
        request = with_options(request, session="chat", turn=turn, max_context_tokens=30)
        rejected = harness.core.submit(request, 0.0).rejected
        harness.run()
        if after is None:
            assert rejected is None
            assert len(whole(harness, name, FIRST)) == 30
        else:
            assert rejected is not None
            assert rejected.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize("ended_by_itself", [False, True])
def test_tokens_after_a_stop_text_are_not_part_of_the_turn(*, ended_by_itself: bool) -> None:
    """The detokenizer finds a stop text some steps after it was sampled, perhaps when the row has ended."""
    harness = harness_with(target_plan_s=0.01)
    open_session(harness)
    ask(harness, "one", FIRST, turn=SessionTurn("one"), max_tokens=6 if ended_by_itself else 30)
    for _ in range(8):
        harness.plan()
        harness.result()
    if ended_by_itself:
        harness.run()
    assert len(harness.outputs["one", 0]) > 3
    assert (("one", 0) in harness.finishes) is ended_by_itself
    harness.core.end_silently(1, generated=3)
    assert ask(harness, "two", [5], turn=SessionTurn("two", after="one")) is None
    harness.run()
    prompt = [*FIRST, *harness.outputs["one", 0][:3], 5]
    assert harness.outputs["two", 0] == expected_output(prompt, len(prompt) + 6, (STOP_ID,))


def test_a_prompt_that_displaces_hundreds_of_session_pins_is_planned_without_recursion() -> None:
    sessions = 250
    rules = SessionRules(
        per_subject=sessions,
        per_tenant=sessions,
        total=sessions,
        subject_tokens=4_000,
        tenant_tokens=4_000,
        total_tokens=4_000,
    )
    harness = harness_with(rules, pages=1_000, max_context=4_000, max_step_tokens=512)
    for number in range(sessions):
        open_session(harness, f"s{number}")
        prompt = [20 + number, 21, 22, 23, 24]
        assert ask(harness, f"r{number}", prompt, session=f"s{number}", max_tokens=1) is None
        harness.run()
    assert sum(tokens > 0 for tokens in pinned(harness)) == sessions
    big = [(number * 7) % 800 + 20 for number in range(3_990)]
    assert ask(harness, "big", big, session=None, max_tokens=1) is None
    frames = len(inspect.stack())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(frames + 150)
    try:
        harness.plan()
    finally:
        sys.setrecursionlimit(limit)
    assert harness.core.sessions.yielded > 200
