"""Brings push sessions and subscribers together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from services.detokenizer.decoding import ByteDecoder, Decoder, WindowDecoder
from services.detokenizer.mailbox import Mailbox
from services.detokenizer.session import PushSession
from services.detokenizer.vocabulary import is_bytewise, read_vocabulary

if TYPE_CHECKING:
    from common.tokenization import TextModel
    from common.types import SubscriberId
    from services.detokenizer.messages import ChoiceSpec


class Hub:
    """Owns the mailboxes and the sessions of this process, and the vocabulary that they decode with."""

    def __init__(self, model: TextModel) -> None:
        """Prepare to decode for `model`."""
        self._tokenizer = model.tokenizer
        self._vocabulary = read_vocabulary(model.tokenizer, model.vocabulary_size)
        self._is_bytewise = is_bytewise(model.tokenizer)
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
        session = PushSession(self._mailboxes.get, self._make_decoder, self._vocabulary.token_bytes)
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

    def _make_decoder(self, spec: ChoiceSpec) -> Decoder:
        if self._is_bytewise:
            return ByteDecoder(self._vocabulary.pieces(skip_special_tokens=spec.skip_special_tokens))
        return WindowDecoder(self._tokenizer, skip_special_tokens=spec.skip_special_tokens)
