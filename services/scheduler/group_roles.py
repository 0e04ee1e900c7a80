"""The role of this group, and its changes by the load: wishes of tokenizers, and the drain before each."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.logs import get_logger
from common.types import GroupRole, RoleSignals, RoleWish
from services.scheduler import metrics
from services.scheduler.core.sequence import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.audit.log import Audit
    from common.settings.scheduler import AutomaticRoleSettings
    from services.scheduler.core.core import SchedulerCore

# Between looks at whether a group that is about to change has drained.
DRAIN_LOOK_S = 0.25
# Signals are reported in these steps, so that not each change of the load is a message.
WAIT_STEP_S = 0.25
FULLNESS_PARTS = 64
# Waits for rows, memory and steps; others, for example for pages of another group, say nothing of this group's load.
_OWN_WAITS = (Wait.TURN, Wait.MEMORY)


@dataclass(frozen=True, slots=True)
class _Change:
    role: GroupRole
    reason: str
    # Time at which it is no longer waited for open requests.
    due: float


class GroupRoles:
    """Owns the role. By the load it changes only if the settings allow that, one change at a time, after a drain.

    Several tokenizers may wish the same change: the first wish begins it, and the others do nothing, since none is
    followed while the group changes, nor for `interval_s` after it has changed.
    """

    def __init__(self, role: GroupRole, rules: AutomaticRoleSettings, clock: Callable[[], float], audit: Audit) -> None:
        """Begin with the role of the settings; `clock` returns seconds, and `audit` records changes by the load."""
        self._own = self._role = role
        # By which the group generates.
        self._home = GroupRole.DECODE if role is GroupRole.PREFILL else role
        self._rules = rules
        self._clock = clock
        self._audit = audit
        self._change: _Change | None = None
        self._changed_at = -math.inf
        self._log = get_logger("roles")

    @property
    def role(self) -> GroupRole:
        """The role by which the group serves now; the earlier one until a change has drained."""
        return self._role

    @property
    def is_changing(self) -> bool:
        """Whether the group takes no new requests, since its role changes once open ones have ended."""
        return self._change is not None

    @property
    def change(self) -> RoleWish | None:
        """The change for which open requests are to end; None: there is none."""
        return None if self._change is None else RoleWish(self._change.role, self._change.reason)

    def set(self, role: GroupRole) -> None:
        """Change the role at once, as an operator asks; open requests continue."""
        self._change = None
        self._become(role, "asked", "an operator asked for it")
        # Also if it has the role already, which an operator may wish to keep.
        self._changed_at = self._clock()

    def wish(self, wish: RoleWish, core: SchedulerCore) -> bool:
        """Begin the change that a tokenizer wishes; return whether it has begun."""
        role = GroupRole.PREFILL if wish.role is GroupRole.PREFILL else self._home
        if role is self._role or not self._may_change():
            return False
        self._change = _Change(role, wish.reason, self._clock() + self._rules.drain_s)
        self._log.info("role.draining", role=role.value, before=self._role.value, reason=wish.reason)
        return True

    def advance(self, *, is_idle: bool) -> None:
        """Complete a change once nothing is open, or the time for that has passed; what is open then continues."""
        change = self._change
        if change is None or not (is_idle or self._clock() >= change.due):
            return
        self._change = None
        self._audit.note("group.role_changed", {"role": change.role.value, "reason": change.reason})
        self._become(change.role, "load", change.reason)

    def signals(self, core: SchedulerCore) -> RoleSignals | None:
        """Return the part of the load by which roles are chosen and sessions placed; None: it says nothing of either.

        A group whose role is fixed reports it while it has another role than that of its settings.
        """
        if not self._rules.enabled and self._role is self._own:
            return None
        return RoleSignals(
            may_change=self._may_change(),
            is_changing=self.is_changing,
            waited_s=_waited_s(core, self._clock()),
            fullness=_fullness(core),
            own_role=self._own,
            follows_load=self._rules.enabled,
        )

    async def run(self, has_open_work: Callable[[], bool]) -> None:
        """Complete changes until cancelled; `has_open_work` says whether requests or leases are open."""
        while True:
            await asyncio.sleep(DRAIN_LOOK_S)
            if self.is_changing:
                self.advance(is_idle=not has_open_work())

    def _may_change(self) -> bool:
        is_settled = self._clock() - self._changed_at >= self._rules.interval_s
        return self._rules.enabled and not self.is_changing and is_settled

    def _become(self, role: GroupRole, cause: str, reason: str) -> None:
        if role is self._role:
            return
        self._log.info("role.changed", role=role.value, before=self._role.value, reason=reason)
        metrics.ROLE_CHANGES_TOTAL.labels(role.value, cause).inc()
        self._role, self._changed_at = role, self._clock()

    def export(self) -> None:
        """Set the metric that tells roles apart."""
        for role in GroupRole:
            metrics.ROLE.labels(role.value).set(role is self._role)


def _waited_s(core: SchedulerCore, now: float) -> float:
    """Return the longest wait of a request for a row, memory or room in a step, in seconds.

    Retracted ones have started, and those of batches wait for all others.
    """
    waiting = (each for each in core.queue if each.waits_for in _OWN_WAITS and each.started_at is None)
    oldest = next((each for each in waiting if not each.is_batch), None)
    return 0.0 if oldest is None else max(0.0, now - oldest.arrived_at) // WAIT_STEP_S * WAIT_STEP_S


def _fullness(core: SchedulerCore) -> float:
    """Return the share of rows that run, or that of pages that they hold, whichever is larger."""
    capacity = core.memory.allocator.capacity
    held = 1 - core.memory.room_for_requests / capacity if capacity else 0.0
    used = max(core.rows.running / core.rows.max_rows, held)
    return round(used * FULLNESS_PARTS) / FULLNESS_PARTS
