"""One open session: what its turns were, and what of them stays in the cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from common.errors import InvalidRequestError

if TYPE_CHECKING:
    from common.types import SessionGrant, SessionTurn, TokenIds, View
    from services.scheduler.cache.types import PrefixLock

# Turns that later ones can continue; what is older has long been continued.
KEPT_TURNS = 16


@dataclass(frozen=True, slots=True)
class SessionRules:
    """What sessions of one subject, of one tenant and in all may have, in tokens of KV and in seconds.

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
    """The tokens of the turn that was sequence `handle`, [tokens] int32: its whole prompt, then what was generated."""

    handle: int
    prompt_tokens: int
    token_ids: TokenIds
    after: str | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A conversation of `view`, which counts against what the view's subject and its tenant may have.

    `pin` holds the path of the turn that ended last, as a row's lock would. `expires_at` is None as long as requests
    of the session are open, and set by the first look at the clock after that.
    """

    name: str
    view: View
    grant: SessionGrant
    turns: int = 0
    open_requests: int = 0
    pin: PrefixLock | None = None
    expires_at: float | None = None
    history: OrderedDict[str, FinishedTurn] = field(default_factory=OrderedDict)

    @property
    def pinned_tokens(self) -> int:
        """What stays in the cache for it."""
        return self.pin.matched_tokens if self.pin else 0

    def base_of(self, turn: SessionTurn) -> TokenIds | None:
        """Return the tokens that stand before a turn's prompt; None: nothing does.

        Raises:
            InvalidRequestError: the turn that it continues has not ended here, or was given up.
        """
        if turn.after is None:
            return None
        earlier = self.history.get(turn.after)
        if earlier is None:
            known = ", ".join(list(self.history)[-3:]) or "none yet"
            message = f"session_params.rid names no finished request of this session; the latest are: {known}"
            raise InvalidRequestError(message, param="session_params")
        ids = earlier.token_ids
        if turn.drop_previous_output:
            ids = ids[: earlier.prompt_tokens]
        return ids[: turn.offset] if turn.offset else ids

    def forget_replaced(self, turn: SessionTurn) -> None:
        """Forget the turns that `turn` takes the place of: those that continue the same one, or all."""
        if not turn.replace:
            return
        if turn.after is None:
            self.history.clear()
            return
        gone = {turn.after}
        # In order of their ends: who continues a turn comes behind it.
        for name, earlier in list(self.history.items()):
            if earlier.after in gone and name != turn.after:
                gone.add(name)
                del self.history[name]

    def remember(self, turn: SessionTurn, finished: FinishedTurn) -> None:
        """Keep a turn that has ended, so that others can continue it."""
        self.history.pop(turn.name, None)
        self.history[turn.name] = finished
        while len(self.history) > KEPT_TURNS:
            self.history.popitem(last=False)

    def trim(self, handle: int, generated: int) -> bool:
        """Keep only the first `generated` tokens of a turn's output; return whether the turn is here."""
        for name, finished in self.history.items():
            if finished.handle == handle:
                ids = finished.token_ids[: finished.prompt_tokens + generated]
                self.history[name] = replace(finished, token_ids=ids)
                return True
        return False
