"""Random lives of many requests: whatever happens, tokens are right, memory adds up, everybody gets one answer."""

from __future__ import annotations

import contextlib

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import PandoError
from common.types import CacheMode, FinishReason, Pooling, RequestId, SessionWish, Subject, View
from services.scheduler.core.session import SessionRules
from tests.examples import examples
from tests.fakes.simulated_worker import embedding_of, expected_output, score_of
from tests.services.scheduler.core.harness import BOUND, STOP_ID, Harness, make_request, with_options

# Few distinct prompts that share prefixes, so that the cache is hit, split and contended.
PROMPTS = st.builds(
    lambda stem, length, tail: [(13 * i + stem) % 900 + 10 for i in range(length)] + tail,
    st.integers(0, 1),
    st.integers(1, 30),
    st.lists(st.integers(10, 12), max_size=3),
)

USERS = st.sampled_from(["alice", "bob"])
SESSIONS = st.sampled_from(["s", "t", "u"])


class CoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, tuple[list[int], int, int]] = {}
        self.scored_from: dict[str, int | None] = {}
        self.embedded: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.session_time = 0.0

    @initialize(
        pages=st.integers(14, 40),
        depth=st.integers(1, 3),
        lock=st.sampled_from([0.0, 0.004]),
        cache=st.sampled_from(["isolated", "shared", "chunk"]),
        preemptions=st.sampled_from([None, 0, 2]),
        jump=st.sampled_from([0, 1, 2, 9]),
        draft=st.sampled_from([0, 1, 3, 9]),
    )
    def start(
        self, pages: int, depth: int, lock: float, cache: str, preemptions: int | None, jump: int, draft: int
    ) -> None:
        self.harness = Harness(
            pages=pages,
            depth=depth,
            target_plan_s=lock,
            max_rows=4,
            max_step_tokens=40 if jump > 2 else 12,
            max_context=56,
            cache=cache,  # type: ignore[arg-type]  # drawn from its names
            policy=None if preemptions is None else "priority",
            max_preemptions=preemptions or 0,
            sessions=SessionRules(
                per_subject=2, total=3, subject_tokens=32, tenant_tokens=40, total_tokens=40, timeout_s=10.0
            ),
            jump_tokens=jump,
            draft_tokens=draft,
            # Long enough that drafts pay.
            compute_us=20_000 if draft else 1000,
        )

    @rule(
        prompt=PROMPTS,
        user=st.sampled_from(["alice", "bob"]),
        max_tokens=st.sampled_from([0, *range(1, 23)]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        mode=st.sampled_from([CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.NONE]),
        scored=st.none() | st.integers(0, 34),
        bound=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        user: str,
        max_tokens: int,
        n: int,
        priority: int,
        mode: CacheMode,
        scored: int | None,
        bound: bool,
    ) -> None:
        name = f"r{len(self.requests)}"
        # Log probabilities from a later token on are refused.
        scored = None if scored is None else min(scored, len(prompt))
        request = make_request(
            name,
            prompt,
            user=user,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            cache_mode=mode,
            scored_from=scored,
            grammar=BOUND if bound else None,
        )
        self.scored_from[name] = scored
        assert self.harness.core.submit(request, 0.0).rejected is None
        self.requests[name] = (prompt, max_tokens, n)

    @rule(prompt=PROMPTS, user=st.sampled_from(["alice", "bob"]), pooling=st.sampled_from([Pooling.LAST, Pooling.MEAN]))
    def embed(self, prompt: list[int], user: str, pooling: Pooling) -> None:
        name = f"e{len(self.embedded)}"
        assert self.harness.core.submit(make_request(name, prompt, user=user, pooling=pooling), 0.0).rejected is None
        self.embedded[name] = prompt

    @rule(prompt=PROMPTS, user=USERS, session=SESSIONS, max_tokens=st.integers(1, 10))
    def take_turn(self, prompt: list[int], user: str, session: str, max_tokens: int) -> None:
        name = f"r{len(self.requests)}"
        request = with_options(make_request(name, prompt, user=user, max_tokens=max_tokens), session=session)
        rejected = self.harness.core.submit(request, 0.0).rejected
        assert rejected is None or rejected.param == "session_id", "only a session may have no room"
        if rejected is None:
            self.requests[name] = (prompt, max_tokens, 1)
            self.scored_from[name] = None

    @rule(user=USERS, name=SESSIONS, capacity=st.sampled_from([None, 12]))
    def open_session(self, user: str, name: str, capacity: int | None) -> None:
        with contextlib.suppress(PandoError):
            self.harness.core.sessions.open(SessionWish(View(Subject("tenant", user)), name, capacity))

    @rule(user=USERS, name=SESSIONS)
    def close_session(self, user: str, name: str) -> None:
        self.harness.core.sessions.close(View(Subject("tenant", user)), name)

    @rule(user=USERS, name=st.none() | SESSIONS)
    def forget(self, user: str, name: str | None) -> None:
        self.harness.core.forget(Subject("tenant", user), name)

    @rule(seconds=st.sampled_from([6.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.session_time += seconds
        self.harness.core.sessions.expire(self.session_time)

    @rule(count=st.integers(1, 6))
    def work(self, count: int) -> None:
        for _ in range(count):
            self.harness.plan()
            self.harness.result()

    @rule()
    def plan_only(self) -> None:
        self.harness.plan()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests or self.embedded:
            name = data.draw(st.sampled_from(sorted([*self.requests, *self.embedded])))
            if self.harness.core.abort(RequestId(name)):
                self.aborted.add(name)
            self.harness.collect()

    @rule()
    def lose_workers(self) -> None:
        self.harness.lose_workers()

    @rule()
    def flush(self) -> None:
        self.harness.core.memory.cache.flush()

    @invariant()
    def memory_adds_up(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_accounts()
            self.harness.audit()

    @invariant()
    def sessions_hold_no_more_than_they_may(self) -> None:
        if hasattr(self, "harness"):
            sessions = list(self.harness.core.sessions)
            for user in ("alice", "bob"):
                mine = [session for session in sessions if session.view.subject == Subject("tenant", user)]
                assert len(mine) <= 2
                assert sum(session.pinned_tokens for session in mine) <= 32
            assert sum(session.pinned_tokens for session in sessions) <= 40
            assert all(session.pinned_tokens <= session.grant.capacity_tokens for session in sessions)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for name, (prompt, max_tokens, n) in self.requests.items():
            limit = min(len(prompt) + max_tokens, 56, self.harness.config.capacity_tokens)
            for index in range(n):
                finish = self.harness.finishes[name, index]
                if name in self.aborted:
                    continue
                assert finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
                if max_tokens == 0:
                    assert finish.reason is FinishReason.LENGTH
                    assert not self.harness.outputs[name, index]
                else:
                    assert self.harness.outputs[name, index] == expected_output(prompt, limit, (STOP_ID,))
                self.check_scores(name, index, prompt)
        for name, prompt in self.embedded.items():
            finish = self.harness.finishes[name, 0]
            assert name in self.aborted or finish.embedding == embedding_of(prompt)
            assert not self.harness.outputs[name, 0], "nothing is generated"
        assert self.harness.core.rows.running == 0
        assert not any(session.open_requests for session in self.harness.core.sessions)
        self.harness.core.sessions.lose_pins()
        self.harness.core.memory.cache.flush()
        assert self.harness.core.memory.allocator.free_pages == self.harness.config.device_pages

    def check_scores(self, name: str, index: int, prompt: list[int]) -> None:
        start = self.scored_from[name]
        if start is None or index:
            assert (name, index) not in self.harness.scores
            return
        assert (name, 0) in self.harness.scored
        told = self.harness.scores.get((name, 0), {})
        assert list(told) == list(range(start, len(prompt)))
        if told:
            assert told.pop(start) is None
            assert list(told.values()) == score_of(prompt, start + 1, len(prompt)).logprobs.tolist()


CoreMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestCore = CoreMachine.TestCase
