"""The registry of push sessions and subscribers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from services.detokenizer.mailbox import Mailbox
from services.detokenizer.session import PushSession

if TYPE_CHECKING:
    from common.types import SubscriberId
    from services.detokenizer.factory import DecoderFactory


class Hub:
    """Owns the subscribers' mailboxes and the schedulers' push sessions of this process."""

    def __init__(self, decoders: DecoderFactory) -> None:
        self._decoders = decoders
        self._mailboxes: dict[SubscriberId, Mailbox] = {}
        self._sessions: set[PushSession] = set()

    @property
    def open_choices(self) -> int:
        """Number of choices that have not ended."""
        return sum(session.open_choices for session in self._sessions)

    @property
    def subscribers(self) -> int:
        """Number of subscribed gateways."""
        return len(self._mailboxes)

    def open_session(self) -> PushSession:
        """Open a session for a scheduler's stream."""
        session = PushSession(self._mailboxes.get, self._decoders)
        self._sessions.add(session)
        return session

    def close_session(self, session: PushSession) -> None:
        """Close the session of a scheduler's stream; its choices end with a retryable error."""
        self._sessions.discard(session)
        session.break_off(UnavailableError("the scheduler has disconnected", retry_after_ms=1000))

    def subscribe(self, subscriber_id: SubscriberId) -> Mailbox:
        """Open a mailbox for a gateway's stream. An earlier one with the same id is closed; its choices are dropped."""
        predecessor = self._mailboxes.get(subscriber_id)
        if predecessor is not None:
            predecessor.close(UnavailableError(f"subscriber {subscriber_id} has subscribed again"))
            self.unsubscribe(predecessor)
        mailbox = Mailbox(subscriber_id)
        self._mailboxes[subscriber_id] = mailbox
        return mailbox

    def unsubscribe(self, mailbox: Mailbox) -> None:
        """Remove a gateway's mailbox and report its choices as gone."""
        if self._mailboxes.get(mailbox.subscriber_id) is mailbox:
            del self._mailboxes[mailbox.subscriber_id]
        for session in self._sessions:
            session.drop_subscriber(mailbox)
