"""Open sessions: their owners, and the cached prefixes that they pin between turns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from common.errors import InvalidRequestError, QueueFullError
from common.limits import Limits
from common.types import CacheMode, SessionGrant, Subject, pixel_bytes
from services.scheduler.core.session import FinishedTurn, LacksSessionError, Session, TurnBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.room import SharedRoom
    from common.types import ScheduleRequest, SessionTurn, SessionWish, TokenIds, View
    from services.scheduler.core.memory import KvMemory
    from services.scheduler.core.sequence import Sequence
    from services.scheduler.core.session import SessionRules

RETRY_AFTER_MS = 1000
# Of the images of a conversation, which may all have to be encoded again: no more than a single request may have.
MAX_PIXEL_BYTES = 48 * 1024 * 1024


class Sessions:
    """Owns the open sessions of one scheduler.

    A session belongs to its opener's view; other views cannot name it. It counts against the limits of the view's
    subject and tenant. The tokens that its latest turn computed are locked like the prefix of a running sequence, so
    the cache has no notion of sessions. A pin is released early only if nothing at all could run otherwise; the session
    then stays open, and its next turn pins again.
    """

    def __init__(self, memory: KvMemory, rules: SessionRules, image_room: SharedRoom) -> None:
        """Start with none; the pixels of their finished turns take bytes of `image_room`."""
        self.yielded = 0
        self._memory = memory
        self._image_room = image_room
        self._rules = rules
        self._limits = Limits()
        self._open: dict[tuple[View, str], Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(self._open.values())

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    @property
    def pinned_tokens(self) -> int:
        """Tokens pinned in the cache by all sessions together."""
        return sum(session.pinned_tokens for session in self)

    def adopt(self, limits: Limits) -> None:
        """Use the weights of `limits` from now on when pins have to be released."""
        self._limits = limits

    # --- opening and closing ---

    def open(self, wish: SessionWish) -> SessionGrant:
        """Open a session.

        Raises:
            InvalidRequestError: the name is in use, or the requested capacity or timeout exceeds the maximum of a
            session.
            QueueFullError: the subject, its tenant or the server has the maximum number of sessions open.
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
        """Close a session and release its pin; return whether it was open. Its running requests continue."""
        session = self._open.pop((view, name), None)
        if session is None:
            return False
        self._let_go(session)
        session.history.clear()
        self._charge_images(session)
        return True

    def has(self, view: View, name: str, after: str | None) -> bool:
        """Whether a session is open, and has the finished turn `after` if that is not None."""
        session = self._open.get((view, name))
        return session is not None and (after is None or after in session.history)

    def forget(self, subject: Subject, name: str | None) -> None:
        """Close a subject's sessions called `name`, or all of its sessions if `name` is None."""
        for owner, session in list(self._open):
            if owner.subject == subject and name in (None, session):
                self.close(owner, session)

    def expire(self, now: float) -> int:
        """Close the sessions that have been idle for longer than their timeout; return their number."""
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
        """Return `request` with the tokens of the turn that it continues prepended.

        A turn that is resubmitted, as its scheduler has ended, also goes on without its session, as it has these
        tokens, unless it must be in the session.

        Raises:
            LacksSessionError: the session or the turn to continue is not there.
            InvalidRequestError: the session is full, or the turn is not possible.
            QueueFullError: the sessions of the subject, of its tenant or of the server hold the maximum number of
            tokens.
        """
        session = self._find(request)
        turn = request.options.turn
        if turn is None:
            if session is not None:
                self._check_room(session, len(request.token_ids))
            return request
        if session is None:
            if turn.conversation_ids and not turn.only_in_session:
                return _continued(request, _resubmitted(turn))
            if turn.after is None and request.options.resume is not None and not turn.only_in_session:
                return request
            name = request.options.session
            message = f"the session '{name}' is not open, or not any more; open one with /open_session"
            raise LacksSessionError(message, param="session_params")
        if request.options.n != 1:
            raise InvalidRequestError("a turn of a session has one choice, as the next one continues it", param="n")
        goes_on = bool(turn.conversation_ids) and not turn.only_in_session
        base = _resubmitted(turn) if session.lacks(turn) and goes_on else session.base_of(turn)
        if base is not None:
            request = _continued(request, base)
        self._check_room(session, len(request.token_ids))
        session.forget_replaced(turn)
        self._charge_images(session)
        return request

    def begin(self, sequence: Sequence) -> None:
        """Attach a sequence that was added to the queue to its session."""
        session = self._find(sequence.request)
        if session is not None:
            session.open_requests += 1
            session.expires_at = None
            sequence.session = session

    def end(self, sequence: Sequence, token_ids: TokenIds, computed: int, *, was_running: bool) -> None:
        """Detach a finished sequence. KV of the first `computed` of `token_ids` is cached if it was running."""
        session, request = sequence.session, sequence.request
        if session is None:
            return
        sequence.session = None
        session.open_requests -= 1
        if self._open.get((session.view, session.name)) is not session or not was_running:
            return
        session.turns += 1
        if request.options.turn is not None and sequence.is_prefilled:
            turn = request.options.turn
            finished = FinishedTurn(
                sequence.handle, sequence.prompt_tokens, token_ids, turn.after, request.images, sequence.image_spans
            )
            session.remember(turn, finished)
            self._charge_images(session)
        if request.options.cache_mode is not CacheMode.NONE:
            # One token more than computed: a match never covers the last token.
            self._pin(session, sequence.key_of(token_ids[: computed + 1]), request.options.priority)

    def trim(self, handle: int, generated: int) -> None:
        """Drop the tokens of a choice after the end that the detokenizer has found: its client has not seen them."""
        for session in self:
            if session.history and session.trim(handle, generated):
                return

    def _charge_images(self, session: Session) -> None:
        """Charge the pixels of a session's finished turns; the oldest turns are dropped while they find no room."""
        subject = session.view.subject
        while (more := session.pixel_bytes - session.charged_bytes) > 0:
            try:
                self._image_room.take(subject, more)
            except QueueFullError:
                session.history.popitem(last=False)
            else:
                session.charged_bytes += more
        if more < 0:
            self._image_room.give_back(subject, -more)
            session.charged_bytes += more

    # --- pins ---

    def yield_pin(self) -> bool:
        """Release the pin of one session; return whether there was a pin.

        The victim is the longest idle session of the subject with the most pinned tokens relative to its weight, in the
        tenant with the most relative to its own weight. So a tenant that pins less than its share loses nothing while
        others pin more.
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
        """Drop all pins because their memory is gone; the sessions stay open."""
        for session in self:
            self._let_go(session)

    def _pin(self, session: Session, token_ids: TokenIds, priority: int) -> None:
        """Pin a prefix as far as capacity and quotas allow, and release the previous pin."""
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
        name = request.options.session
        return self._open.get((request.view, name)) if name is not None else None

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


def _resubmitted(turn: SessionTurn) -> TurnBase:
    return TurnBase(np.array(turn.conversation_ids, np.int32), ())


def _continued(request: ScheduleRequest, base: TurnBase) -> ScheduleRequest:
    """Return a turn's request with the whole conversation as its prompt.

    Raises:
        InvalidRequestError: all images together take too much room.
    """
    start = len(base.token_ids)
    own = (dataclasses.replace(image, offset=image.offset + start) for image in request.images)
    images = (*base.images, *own)
    if (size := pixel_bytes(images)) > MAX_PIXEL_BYTES:
        message = f"the images of the conversation take {size} bytes, and at most {MAX_PIXEL_BYTES} are allowed"
        raise InvalidRequestError(message, param="session_params")
    return dataclasses.replace(request, token_ids=np.concatenate([base.token_ids, request.token_ids]), images=images)


def _full(message: str) -> QueueFullError:
    return QueueFullError(message, param="session_id", retry_after_ms=RETRY_AFTER_MS)
