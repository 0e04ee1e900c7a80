"""Prefixes that the fleet shares: prompts that begin with one are sent to few groups, so that these have it cached.

A prompt is recognised by its first tokens. Whether they are shared is asked in the fleet's state, by keyed name, and
only for prompts that have arrived; the answer is used for the next prompts. So the choice of a group depends on what is
shared, and on the requester's own prompts, but on no other private prompt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from common.fleet.names import routing_digest
from common.fleet.state import FleetStateAwayError
from common.logs import get_logger
from services.tokenizer import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.fleet.names import FleetKeys
    from common.fleet.state import FleetState
    from common.types import ScheduleRequest, View

LOOK_INTERVAL_S = 0.5
# Seconds for which answers are used while the server is away. Steering only decides where a prompt is computed.
STALE_S = 60.0
WINDOW_S = 60.0
# Requests with a prefix in a window for each group that they are distributed to: the first request at each group
# computes the prefix, so at most about one in 64 requests does.
REQUESTS_A_GROUP = 64
# Seconds for which a prefix that several views asked for is looked up again, until it is shared.
RETRY_S = 30.0
_REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that the fleet shares, and the number of groups among which its prompts are distributed."""

    name: bytes
    width: int


class SharedPrefixes(Protocol):
    """Finds the shared prefix of a prompt."""

    def find(self, request: ScheduleRequest) -> SharedPrefix | None:
        """Return the prefix that a request begins with, None if the fleet shares none."""

    async def run(self) -> None:
        """Stay informed until cancelled."""


class NoSharedPrefixes:
    """Implements `SharedPrefixes` for groups that each decide alone."""

    def find(self, request: ScheduleRequest) -> SharedPrefix | None:
        """Return None."""

    async def run(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Asked:
    """The last question for a prefix, and whether several views have asked."""

    view: View
    at: float
    is_new: bool = True
    by_several: bool = False


class FleetPrefixes:
    """Implements `SharedPrefixes` by look-ups in the fleet's state."""

    def __init__(self, state: FleetState, keys: FleetKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._keys = keys
        self._clock = clock
        # Names to look up, and those that were shared at the last look-up, with its time.
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()
        self._shared: OrderedDict[bytes, float] = OrderedDict()
        self._traffic = PrefixTraffic(clock)
        self._log = get_logger("fleet")
        self._is_away = False

    def find(self, request: ScheduleRequest) -> SharedPrefix | None:
        """Return the prefix that a request begins with, None if its tenant does not share it, as far as known."""
        # Adapters share no KV with the base model, whose prefixes these are.
        digest = None if request.options.adapter else routing_digest(request.token_ids)
        if digest is None:
            return None
        oldest = self._clock() - STALE_S
        for scope in ((request.view.tenant,), ()):
            name = self._keys.routing(scope, digest)
            self._ask(name, request.view)
            if self._shared.get(name, -math.inf) >= oldest:
                metrics.STEERED_TOTAL.inc()
                return SharedPrefix(name, self._traffic.count(name))
        while len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        return None

    def _ask(self, name: bytes, view: View) -> None:
        asked = self._asked.get(name)
        if asked is None:
            self._asked[name] = _Asked(view, self._clock())
        else:
            asked.at, asked.is_new = self._clock(), True
            asked.by_several = asked.by_several or asked.view != view

    async def run(self) -> None:
        """Look up the prefixes of arrived prompts until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_INTERVAL_S)
        finally:
            await self._state.close()

    async def look(self) -> None:
        """Look up the prefixes of the prompts that have arrived, and again those that several views have in common."""
        oldest = self._clock() - RETRY_S
        for name, asked in list(self._asked.items()):
            if not asked.is_new and asked.at < oldest:
                del self._asked[name]
        names = [name for name, asked in self._asked.items() if asked.is_new or asked.by_several]
        if not names:
            return
        try:
            shared = await self._state.look_up(names)
        except FleetStateAwayError as error:
            if not self._is_away:
                self._log.error("fleet.away", reason=str(error))
            self._is_away = True
            return
        self._is_away = False
        now = self._clock()
        for name in names:
            if name in self._asked:
                self._asked[name].is_new = False
            self._shared.pop(name, None)
            if name in shared:
                self._shared[name] = now
        while len(self._shared) > _REMEMBERED:
            self._shared.popitem(last=False)


class PrefixTraffic:
    """Counts the requests with each shared prefix in the current window and the previous one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._current: Counter[bytes] = Counter()
        self._previous: Counter[bytes] = Counter()

    def count(self, name: bytes) -> int:
        """Count a request; return the number of groups for its prefix, a power of two, so that it changes seldom."""
        passed = self._clock() - self._began
        if passed >= WINDOW_S:
            self._previous = self._current if passed < 2 * WINDOW_S else Counter()
            self._current = Counter()
            self._began = self._clock()
        self._current[name] += 1
        requests = max(self._current[name], self._previous[name])
        return 1 << max(0, (requests // REQUESTS_A_GROUP).bit_length() - 1)
