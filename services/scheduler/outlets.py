"""The detokenizers of a scheduler: each request's output goes to the one that its gateway has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UnavailableError
from common.logs import get_logger
from common.rpc.peers import Peers
from services.scheduler.core.output import divide
from services.scheduler.detokenizer_link import DetokenizerLink

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.rpc.peers import Servers
    from common.types import ReplyTo
    from services.scheduler.core.output import EndedChoice, Output
    from services.scheduler.detokenizer_link import DetokenizerLinkListener


class Outlets:
    """Owns the links to all detokenizers, and remembers which of them has each open choice."""

    def __init__(self, servers: Servers, listener: DetokenizerLinkListener) -> None:
        """Prepare links to `servers`, which `run` opens; `listener` receives the events of all of them."""
        self._listener = listener
        self._links = Peers("detokenizer", servers, lambda channel: DetokenizerLink(channel, self))
        # By handle, from the choice's opening to its end.
        self._owners: dict[int, DetokenizerLink] = {}
        self._log = get_logger("outlets")

    @property
    def is_connected(self) -> bool:
        """Whether output could be sent to any detokenizer."""
        return any(link.is_connected for link in self._links)

    def can_reach(self, reply_to: ReplyTo) -> bool:
        """Whether output for `reply_to` could be sent now."""
        return self._find(reply_to) is not None

    def send(self, output: Output, weight_version: str) -> None:
        """Queue output, each choice's for its detokenizer; that of unreachable ones is dropped.

        `weight_version` names the weights that computed its tokens.
        """
        for sequence in output.opens:
            link = self._find(sequence.request.reply_to)
            if link is not None:
                self._owners[sequence.handle] = link
        links = self._links.connected
        parts = [(links[0], output)] if len(self._links) == len(links) == 1 else divide(output, self._owners, links)
        for link, part in parts:
            try:
                link.send(part, weight_version)
            except UnavailableError as error:
                self._log.warning("output.dropped", reason=str(error))
        for handle, _ in output.finishes:
            self._owners.pop(handle, None)

    async def run(self) -> None:
        """Keep the links open until cancelled."""
        await self._links.run()

    # --- called by the links ---

    def on_connected(self) -> None:
        """Report that output can be sent."""
        self._listener.on_outlet_connected()

    def on_broken(self, link: DetokenizerLink) -> None:
        """Report the choices that are lost with a link."""
        self._owners = {handle: owner for handle, owner in self._owners.items() if owner is not link}
        self._listener.on_outlet_broken(link.process)

    def on_ended(self, ended: Iterable[EndedChoice]) -> None:
        """Report choices that a detokenizer has ended."""
        known = list(ended)
        for choice in known:
            self._owners.pop(choice.handle, None)
        self._listener.on_choices_ended(known)

    @property
    def has_others(self) -> bool:
        """Whether another group would serve the requests of this one."""
        return self._listener.has_others

    def _find(self, reply_to: ReplyTo) -> DetokenizerLink | None:
        """Return the connected link to a detokenizer; one that is not named is the only one."""
        connected = self._links.connected
        if reply_to.detokenizer is None:
            return connected[0] if len(self._links) == 1 and connected else None
        return next((link for link in connected if link.process == reply_to.detokenizer), None)
