"""Brings push sessions and subscribers together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from services.detokenizer.mailbox import Mailbox
from services.detokenizer.session import PushSession

if TYPE_CHECKING:
    from common.types import SubscriberId
    from services.detokenizer.factory import DecoderFactory


class Hub:
    """Owns the mailboxes and the sessions of this process."""

    def __init__(self, decoders: DecoderFactory) -> None:
        """Prepare to decode with `decoders`."""
        self._decoders = decoders
        self._mailboxes: dict[SubscriberId, Mailbox] = {}
        self._sessions: set[PushSession] = set()

    @property
    def open_choices(self) -> int:
        """Number of choices that have not ended."""
        return sum(session.open_choices for session in self._sessions)

    @property
    def subscribers(self) -> int:
        """Number of gateways that listen."""
        return len(self._mailboxes)

    def open_session(self) -> PushSession:
        """Begin a scheduler's stream."""
        session = PushSession(self._mailboxes.get, self._decoders)
        self._sessions.add(session)
        return session

    def close_session(self, session: PushSession) -> None:
        """End a scheduler's stream; its choices end with an error that invites to try again."""
        self._sessions.discard(session)
        session.break_off(UnavailableError("the scheduler went away", retry_after_ms=1000))

    def subscribe(self, subscriber_id: SubscriberId) -> Mailbox:
        """Begin a gateway's stream. A predecessor under the same id is over: its choices are gone."""
        predecessor = self._mailboxes.get(subscriber_id)
        if predecessor is not None:
            predecessor.close(UnavailableError(f"subscriber {subscriber_id} has subscribed again"))
            self.unsubscribe(predecessor)
        mailbox = Mailbox(subscriber_id)
        self._mailboxes[subscriber_id] = mailbox
        return mailbox

    def unsubscribe(self, mailbox: Mailbox) -> None:
        """End a gateway's stream and report its choices as gone."""
        if self._mailboxes.get(mailbox.subscriber_id) is mailbox:
            del self._mailboxes[mailbox.subscriber_id]
        for session in self._sessions:
            session.drop_subscriber(mailbox)
