"""Open sessions: who has them, and what stays in the cache between their turns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequestError, QueueFullError
from common.limits import Limits
from common.types import CacheMode, SessionGrant, Subject
from services.scheduler.core.session import FinishedTurn, Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.types import ScheduleRequest, SessionWish, TokenIds, View
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.session import SessionRules

RETRY_AFTER_MS = 1000


class Sessions:
    """Owns the open sessions of one scheduler.

    A session belongs to its opener's view: no other view can name it. It counts against what the view's subject and
    tenant may have. What its latest turn has computed is held like the path of a running row, so the cache needs to
    know nothing of sessions. A pin yields only where otherwise nothing at all could run; the session stays open then,
    and its next turn pins again.
    """

    def __init__(self, memory: KvMemory, rules: SessionRules) -> None:
        """Start without sessions, under `rules`."""
        self.yielded = 0
        self._memory = memory
        self._rules = rules
        self._limits = Limits()
        self._open: dict[tuple[View, str], Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(self._open.values())

    def __len__(self) -> int:
        """Return how many are open."""
        return len(self._open)

    @property
    def pinned_tokens(self) -> int:
        """What stays in the cache for all of them."""
        return sum(session.pinned_tokens for session in self)

    def adopt(self, limits: Limits) -> None:
        """Let pins yield by other weights from now on."""
        self._limits = limits

    # --- opening and closing ---

    def open(self, wish: SessionWish) -> SessionGrant:
        """Open a session.

        Raises:
            InvalidRequestError: the name is in use, or more is asked for than any session may have.
            QueueFullError: the user, or the server, has as many sessions as it may.
        """
        rules, view, name = self._rules, wish.view, wish.session
        if (view, name) in self._open:
            raise InvalidRequestError(f"the session '{name}' is open already", param="session_id")
        if not rules.subject_tokens or not rules.total_tokens:
            raise InvalidRequestError("this model keeps no sessions", param="session_id")
        if wish.capacity_tokens is not None and wish.capacity_tokens > rules.subject_tokens:
            message = f"a session may hold {rules.subject_tokens} tokens here, not {wish.capacity_tokens}"
            raise InvalidRequestError(message, param="capacity_of_str_len")
        if wish.timeout_ms is not None and wish.timeout_ms > rules.max_timeout_s * 1000:
            limit, asked = rules.max_timeout_s, wish.timeout_ms / 1000
            message = f"a session may wait {limit:g} s for its next turn, not {asked:g}"
            raise InvalidRequestError(message, param="timeout")
        own = sum(session.view.subject == view.subject for session in self)
        if own >= rules.per_subject:
            raise _full(f"{own} sessions of this user are open, of which {rules.per_subject} may be; close one")
        tenant = sum(session.view.tenant == view.tenant for session in self)
        if tenant >= rules.per_tenant:
            message = f"{tenant} sessions of this organization are open, of which {rules.per_tenant} may be"
            raise _full(f"{message}; close one, or try again later")
        if len(self._open) >= rules.total:
            raise _full(f"{rules.total} sessions are open at this server, which is the limit; try again later")
        grant = SessionGrant(
            wish.capacity_tokens or rules.subject_tokens, wish.timeout_ms or round(rules.timeout_s * 1000)
        )
        self._open[view, name] = Session(name, view, grant)
        return grant

    def close(self, view: View, name: str) -> bool:
        """End a session, so that what it held may go; return whether there was one. Its requests go on."""
        session = self._open.pop((view, name), None)
        if session is None:
            return False
        self._let_go(session)
        return True

    def forget(self, subject: Subject, name: str | None) -> None:
        """End a subject's sessions called `name`, or all of its sessions."""
        for owner, session in list(self._open):
            if owner.subject == subject and name in (None, session):
                self.close(owner, session)

    def expire(self, now: float) -> int:
        """End those that have had no turn for too long; return how many."""
        overdue = []
        for key, session in self._open.items():
            if session.open_requests:
                session.expires_at = None
            elif session.expires_at is None:
                session.expires_at = now + session.grant.timeout_ms / 1000
            elif now >= session.expires_at:
                overdue.append(key)
        for view, name in overdue:
            self.close(view, name)
        return len(overdue)

    # --- turns ---

    def enter(self, request: ScheduleRequest) -> ScheduleRequest:
        """Return `request` with all its tokens: those of the turn that it continues come first.

        Raises:
            InvalidRequestError: it continues what is not there, or its session is full.
            QueueFullError: its user's sessions, or all, hold as much as they may.
        """
        session = self._find(request)
        turn = request.turn
        if turn is None:
            if session is not None:
                self._check_room(session, len(request.token_ids))
            return request
        if session is None:
            message = f"the session '{request.session}' is not open, or not any more; open one with /open_session"
            raise InvalidRequestError(message, param="session_params")
        if request.n != 1:
            raise InvalidRequestError("a turn of a session has one choice, as the next one continues it", param="n")
        base = session.base_of(turn)
        ids = request.token_ids if base is None else np.concatenate([base, request.token_ids])
        self._check_room(session, len(ids))
        session.forget_replaced(turn)
        return dataclasses.replace(request, token_ids=ids)

    def begin(self, sequence: Sequence) -> None:
        """A sequence has been taken into the queue."""
        session = self._find(sequence.request)
        if session is not None:
            session.open_requests += 1
            session.expires_at = None
            sequence.session = session

    def end(self, sequence: Sequence, token_ids: TokenIds, computed: int, *, was_running: bool) -> None:
        """A sequence has left with these known ids, the first `computed` of which are, if it was running."""
        session, request = sequence.session, sequence.request
        if session is None:
            return
        sequence.session = None
        session.open_requests -= 1
        if self._open.get((session.view, session.name)) is not session or not was_running:
            return
        session.turns += 1
        if request.turn is not None and sequence.is_prefilled:
            turn = request.turn
            finished = FinishedTurn(sequence.handle, sequence.prompt_tokens, token_ids, turn.after)
            session.remember(turn, finished)
        if request.cache_mode is not CacheMode.NONE:
            # One more: a match never covers the last token.
            self._pin(session, token_ids[: computed + 1], request.priority)

    def trim(self, handle: int, generated: int) -> None:
        """Forget what a choice generated beyond the end that the detokenizer has found: its client has not seen it."""
        for session in self:
            if session.history and session.trim(handle, generated):
                return

    # --- pins ---

    def yield_pin(self) -> bool:
        """Let go what one session holds; return whether there was one.

        It is the longest idle one of the subject with most pinned tokens for its weight, in the tenant with most for
        its own. So a tenant that holds less than its share of what is pinned loses nothing while others hold more.
        """
        pinned = [session for session in self if session.pin is not None]
        if not pinned:
            return False
        tenants: dict[str, float] = {}
        subjects: dict[Subject, float] = {}
        for session in pinned:
            subject = session.view.subject
            of_tenant = session.pinned_tokens / self._limits.of(subject.tenant).weight
            tenants[subject.tenant] = tenants.get(subject.tenant, 0.0) + of_tenant
            of_subject = session.pinned_tokens / self._limits.of_subject(subject).weight
            subjects[subject] = subjects.get(subject, 0.0) + of_subject

        def order(session: Session) -> tuple[float, str, float, str, float]:
            subject = session.view.subject
            idle_until = session.expires_at or float("inf")
            return -tenants[subject.tenant], subject.tenant, -subjects[subject], subject.name, idle_until

        self._let_go(min(pinned, key=order))
        self.yielded += 1
        return True

    def lose_pins(self) -> None:
        """Drop all that is held, as its memory is gone; the sessions stay open."""
        for session in self:
            self._let_go(session)

    def _pin(self, session: Session, token_ids: TokenIds, priority: int) -> None:
        """Hold a path from now on, as far as capacity and quotas allow, in place of the one held before."""
        rules, view = self._rules, session.view
        room = min(
            session.grant.capacity_tokens,
            rules.subject_tokens - (self._held_by(view.subject) - session.pinned_tokens),
            rules.tenant_tokens - (self._held_by_tenant(view.tenant) - session.pinned_tokens),
            rules.total_tokens - (self.pinned_tokens - session.pinned_tokens),
        )
        pin = self._memory.pin(session.view, token_ids[: max(room, 0) + 1], priority, session.name)
        self._let_go(session)
        session.pin = pin

    def _let_go(self, session: Session) -> None:
        if session.pin is not None:
            self._memory.unpin(session.pin)
            session.pin = None

    def _find(self, request: ScheduleRequest) -> Session | None:
        return self._open.get((request.view, request.session)) if request.session is not None else None

    def _held_by(self, subject: Subject) -> int:
        return sum(session.pinned_tokens for session in self if session.view.subject == subject)

    def _held_by_tenant(self, tenant: str) -> int:
        return sum(session.pinned_tokens for session in self if session.view.tenant == tenant)

    def _check_room(self, session: Session, tokens: int) -> None:
        if tokens > session.grant.capacity_tokens:
            raise InvalidRequestError(
                f"the session '{session.name}' holds {session.grant.capacity_tokens} tokens, and this turn begins with "
                f"{tokens}; open one with a larger capacity_of_str_len, or continue an earlier turn",
                param="session_id",
            )
        more = tokens - session.pinned_tokens
        if more <= 0:
            return
        rules, view = self._rules, session.view
        held = self._held_by(view.subject)
        if held + more > rules.subject_tokens:
            raise _full(
                f"the sessions of this user hold {held} tokens, and with this turn {held + more}, of which "
                f"{rules.subject_tokens} may be; close a session"
            )
        held = self._held_by_tenant(view.tenant)
        if held + more > rules.tenant_tokens:
            raise _full(
                "the sessions of this organization hold as many tokens as they may; close a session, or try again later"
            )
        if self.pinned_tokens + more > rules.total_tokens:
            raise _full(
                "the sessions of this server hold as many tokens as they may; try again later, or without a session"
            )


def _full(message: str) -> QueueFullError:
    return QueueFullError(message, param="session_id", retry_after_ms=RETRY_AFTER_MS)
