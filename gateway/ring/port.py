"""What the gateway needs from the services behind it; `tests/fakes` has fakes of both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from common.deltas import Delta
    from common.requests import ChatPrompt, GenerateRequest
    from common.types import Admission, RequestFailure, RequestId, SessionGrant, SessionWish, Subject, View
    from gateway.ring.messages import ModelInfo, Tokenization


class Listener(Protocol):
    """Hears what becomes of submitted requests. Called on the event loop; must not block."""

    def on_admission(self, admission: Admission) -> None:
        """The request was accepted, or rejected: then nothing follows."""

    def on_delta(self, delta: Delta) -> None:
        """A choice got tokens, text or its end."""

    def on_lost(self, request_id: RequestId, failure: RequestFailure) -> None:
        """A service went away and nothing more will come for this request; it may be submitted again under a new id.

        Where it might still run it has been aborted.
        """


class Ring(Protocol):
    """The way round: requests go in, admissions and deltas come out at the request's listener."""

    def submit(self, request: GenerateRequest, listener: Listener) -> None:
        """Send `request`; the listener hears of it, also of its loss, but never before this returns."""

    def abort(self, request_id: RequestId) -> None:
        """Forget the request and end it wherever it is, by its exact id; unknown ids are ignored."""


class Model(Protocol):
    """Questions about the served model, answered by the tokenizer.

    Every method raises a PandoError: what the tokenizer reported, or UnavailableError if it is away.
    """

    async def get_model(self) -> ModelInfo:
        """Return what is served."""

    async def tokenize(self, subject: Subject, text: str, *, add_special_tokens: bool) -> Tokenization:
        """Encode a text in the subject's turn, as in the following two."""

    async def detokenize(self, subject: Subject, ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        """Decode ids."""

    async def render_chat(self, subject: Subject, chat: ChatPrompt) -> Tokenization:
        """Apply the chat template and encode the result."""

    async def open_session(self, wish: SessionWish) -> SessionGrant:
        """Open a session at the scheduler that its requests will go to."""

    async def close_session(self, view: View, session: str) -> bool:
        """End a session; return whether it was open."""


class Readiness(Protocol):
    """Whether a request would be served now."""

    async def missing(self) -> list[str]:
        """Return what is missing, each in a few words; empty when a request would be served."""


class Administration(Protocol):
    """What administrators ask of the scheduler groups.

    Every method raises a PandoError: what a scheduler reported, or UnavailableError if one is away.
    """

    async def flush_cache(self) -> int:
        """Drop every cache entry that no running request needs; return how many pages that gave."""

    async def states(self) -> list[dict[str, object]]:
        """Return the figures of each group's scheduler, as JSON."""
