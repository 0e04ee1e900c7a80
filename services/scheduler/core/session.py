"""One open session: its turns and the prefix that it pins in the cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError
from common.types import pixel_bytes

if TYPE_CHECKING:
    from common.types import RowImage, SessionGrant, SessionTurn, TokenIds, View
    from services.scheduler.cache.types import PrefixLock

# Number of turns kept as possible predecessors; older ones have usually been continued already.
KEPT_TURNS = 16


class LacksSessionError(InvalidRequestError):
    """The session, or the turn to continue, is not at this scheduler; another one may have it."""


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Limits of sessions per subject, per tenant and in total, in tokens of KV and in seconds.

    `per_subject`, `per_tenant` and `total` are numbers of open sessions.
    """

    per_subject: int = 8
    per_tenant: int = 768
    total: int = 1024
    subject_tokens: int = 0
    tenant_tokens: int = 0
    total_tokens: int = 0
    timeout_s: float = 600.0
    max_timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """Tokens of a finished turn, which ran as sequence `handle`: whole prompt, then output, [tokens] int32."""

    handle: int
    prompt_tokens: int
    token_ids: TokenIds
    after: str | None = None
    # Of the prompt, with their pixels, and where each begins and ends.
    images: tuple[RowImage, ...] = ()
    image_spans: tuple[tuple[int, int], ...] = ()

    def before(self, turn: SessionTurn) -> TurnBase:
        """Return the conversation before the prompt of `turn`, which continues this one.

        Raises:
            InvalidRequestError: its offset is inside of an image.
        """
        ids = self.token_ids[: self.prompt_tokens] if turn.drop_previous_output else self.token_ids
        ids = ids[: turn.offset] if turn.offset else ids
        if any(first < len(ids) < end for first, end in self.image_spans):
            raise InvalidRequestError("session_params.offset would cut an image in two", param="session_params")
        images = tuple(image for image, (_, end) in zip(self.images, self.image_spans, strict=True) if end <= len(ids))
        return TurnBase(ids, images)


@dataclass(frozen=True, slots=True)
class TurnBase:
    """The tokens that precede a turn's prompt, and the images among them."""

    token_ids: TokenIds
    images: tuple[RowImage, ...]


@dataclass(slots=True, eq=False)
class Session:
    """A conversation of `view`, which counts against the limits of the view's subject and tenant.

    `pin` locks the prefix of the turn that ended last, as a row's lock would. `expires_at` is None while requests of
    the session are open, and set by the first check of the clock after that.
    """

    name: str
    view: View
    grant: SessionGrant
    turns: int = 0
    open_requests: int = 0
    pin: PrefixLock | None = None
    expires_at: float | None = None
    history: OrderedDict[str, FinishedTurn] = field(default_factory=OrderedDict)
    # Bytes of the history's pixels that are charged to the subject.
    charged_bytes: int = 0

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels of all turns; those of a turn are shared with the turns that continue it."""
        every = {id(image.pixels): image for turn in self.history.values() for image in turn.images}
        return pixel_bytes(every.values())

    @property
    def pinned_tokens(self) -> int:
        """Tokens pinned in the cache."""
        return self.pin.matched_tokens if self.pin else 0

    def lacks(self, turn: SessionTurn) -> bool:
        """Whether the turn that `turn` continues has not ended here or was dropped."""
        return turn.after is not None and turn.after not in self.history

    def base_of(self, turn: SessionTurn) -> TurnBase | None:
        """Return the conversation before a turn's prompt; None: there is none.

        Raises:
            LacksSessionError: the turn that it continues has not ended here or was dropped.
            InvalidRequestError: an image is cut.
        """
        if turn.after is None:
            return None
        earlier = self.history.get(turn.after)
        if earlier is None:
            known = ", ".join(list(self.history)[-3:]) or "none yet"
            message = f"session_params.rid names no finished request of this session; the latest are: {known}"
            raise LacksSessionError(message, param="session_params")
        return earlier.before(turn)

    def forget_replaced(self, turn: SessionTurn) -> None:
        """Drop the turns that `turn` replaces: those that continue its predecessor, or all if it has none."""
        if not turn.replace:
            return
        if turn.after is None:
            self.history.clear()
            return
        gone = {turn.after}
        # The history is ordered by end, so a turn comes after the one that it continues.
        for name, earlier in list(self.history.items()):
            if earlier.after in gone and name != turn.after:
                gone.add(name)
                del self.history[name]

    def remember(self, turn: SessionTurn, finished: FinishedTurn) -> None:
        """Keep a finished turn so that later turns can continue it."""
        self.history.pop(turn.name, None)
        self.history[turn.name] = finished
        while len(self.history) > KEPT_TURNS:
            self.history.popitem(last=False)

    def trim(self, handle: int, generated: int) -> bool:
        """Keep only the first `generated` tokens of a turn's output; return whether the turn is in this session."""
        for name, finished in self.history.items():
            if finished.handle == handle:
                ids = finished.token_ids[: finished.prompt_tokens + generated]
                self.history[name] = replace(finished, token_ids=ids)
                return True
        return False
