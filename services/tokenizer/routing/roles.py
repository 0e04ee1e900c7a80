"""Decides when a group changes between computing prompts for others and generating; without I/O and without a clock.

Of the groups whose roles the load may change, prefill groups are short if requests wait for them, and generating ones
if their rows or pages are taken or requests wait for these. A group changes only if those that it leaves can spare it:
what they do, divided among one fewer, stays below `SPARE`. So a change leaves them well below the bounds at which they
would be short themselves (hysteresis). Restarts may leave a side without groups, as they bring back the roles of the
settings; it then gets one.

A group that is not seen for a moment, as its scheduler or the network is slow, is missing: nothing is decided without
it, and what was known of it still counts once it is back. Only if it is missing for longer have the groups changed.
A group that is gone and back again and again, as its scheduler fails soon after each start, counts as gone until it
stays; otherwise nothing would ever be decided.

Any number of tokenizers may decide at the same time. Each takes the generating group with the last name, but never the
first one that it sees, and the prefill group with the first name, but never the last one that it sees. So tokenizers
that see the same choose the same group, which changes once (`services/scheduler/group_roles.py`). If they see different
groups, or see changes late, there still is a generating group that none of them takes: the one with the first name. A
tokenizer that sees it takes another one, and one that does not see it cannot ask it. The prefill group with the last
name stays for the same reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import GroupRole, RoleWish

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from common.types import RoleSignals

# Time constant of the averages of loads, as a part of the time for which nothing is decided after a change. A group is
# gone if it is missing for as long, since they say little of its load by then.
AVERAGED_PART = 1 / 3
# A group that has come back so many times, and never stayed for the time for which nothing is decided, is left out
# until it has. Its returns are forgotten if it is gone for so many times that time.
MOST_RETURNS, REMEMBERED_PARTS = 3, 4
# Requests may wait so long for a row or for room in a step, in seconds, before groups count as short.
MOST_WAIT_S = 0.5
# Prefill groups compute prompts, and rows or pages of generating groups are taken, for more than this share: short.
MOST_BUSY, MOST_FULL = 0.9, 0.85
# Groups that lose one of them do so little that the others would stay below this share.
SPARE = 0.7


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """A group that serves or changes its role, as it reports itself.

    `is_busy`: it has open requests. `signals`; None: the load does not change its role.
    """

    name: str
    role: GroupRole
    is_busy: bool
    signals: RoleSignals | None = None

    @property
    def is_changing(self) -> bool:
        """Whether its role is about to change, so that it takes no requests."""
        return self.signals is not None and self.signals.is_changing

    @property
    def may_change(self) -> bool:
        """Whether it would follow a wish for another role."""
        return self.signals is not None and self.signals.may_change


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A group whose role is to change, and the wish for it."""

    name: str
    wish: RoleWish


@dataclass(slots=True)
class _Averages:
    """Exponential averages of one group's load, which begin with the first one, and the time of the last one."""

    busy: float = 0.0
    fullness: float = 0.0
    waited_s: float = 0.0
    seen_at: float = -math.inf

    def add(self, group: ObservedGroup, now: float, constant_s: float) -> None:
        """Add what is seen at `now`, for the time that has passed since the group was last seen."""
        weight = 1 - math.exp(-max(0.0, now - self.seen_at) / constant_s)
        self.seen_at = now
        if group.signals is None:
            return
        self.busy += weight * (group.is_busy - self.busy)
        self.fullness += weight * (group.signals.fullness - self.fullness)
        self.waited_s += weight * (group.signals.waited_s - self.waited_s)


@dataclass(slots=True)
class _Presence:
    """A group that is seen or has been; `missed_at`: the first look that did not find it, None while it is seen.

    `returns`: how often it has come back, `since` the last time, without staying.
    """

    since: float
    missed_at: float | None = None
    is_gone: bool = False
    returns: int = 0

    def note(self, now: float, settle_s: float, *, is_seen: bool) -> None:
        """Record a look."""
        if not is_seen:
            self.missed_at = now if self.missed_at is None else self.missed_at
            self.is_gone = now - self.missed_at >= AVERAGED_PART * settle_s
            return
        if self.is_gone:
            self.returns, self.since = self.returns + 1, now
        elif now - self.since >= settle_s:
            self.returns = 0
        self.missed_at, self.is_gone = None, False


@dataclass(frozen=True, slots=True)
class _Side:
    """The groups of one side that the load may change: how many there are, and the means of their averages."""

    groups: int
    busy: float
    fullness: float
    waited_s: float

    def spared(self, used: float) -> int:
        """Return the number of groups that may go if these are `used` to this share: at most a quarter, or one."""
        most = min(max(1, self.groups // 4), self.groups - 1)
        return max(
            (count for count in range(1, most + 1) if used * self.groups < SPARE * (self.groups - count)), default=0
        )


@dataclass(slots=True)
class RoleController:
    """Looks at all groups repeatedly, and decides about changes in one direction at a time.

    `settle_s`: seconds after a change of roles or groups for which nothing is decided, so that averages are those of
    the present fleet.
    """

    settle_s: float
    _averages: dict[str, _Averages] = field(default_factory=dict)
    # Of all groups, also of those that are left out.
    _presences: dict[str, _Presence] = field(default_factory=dict)
    # Of all groups that do not change, missing ones included.
    _roles: dict[str, GroupRole] = field(default_factory=dict)
    _decides_from: float = -math.inf

    def decide(self, groups: Iterable[ObservedGroup], now: float) -> list[RoleChange]:
        """Return the changes that the loads ask for; call it about once per second, with `now` in seconds."""
        seen = sorted(groups, key=lambda group: group.name)
        self._note_looks({group.name for group in seen}, now)
        known = [group for group in seen if self._presences[group.name].returns < MOST_RETURNS]
        self._note(known, now)
        if now < self._decides_from or self._missing() or any(group.is_changing for group in known):
            return []
        prefill = [each for each in known if each.role is GroupRole.PREFILL]
        changes = self._changes(prefill, [each for each in known if each.role is not GroupRole.PREFILL])
        if changes:
            # Also the time after which a wish that was lost is repeated.
            self._decides_from = now + self.settle_s
        return changes

    def _changes(self, prefill: Sequence[ObservedGroup], generating: Sequence[ObservedGroup]) -> list[RoleChange]:
        if not generating or not prefill:
            return _restored(prefill, generating)
        computing, decoding = self._side(prefill), self._side(generating)
        if computing is None or decoding is None:
            return []
        reason = (
            f"prefill groups: {computing.busy:.0%} busy, requests wait {computing.waited_s:.1f} s; "
            f"generating groups: {decoding.fullness:.0%} full, requests wait {decoding.waited_s:.1f} s"
        )
        is_short_of_prefill = computing.busy > MOST_BUSY and computing.waited_s > MOST_WAIT_S
        is_short_of_room = decoding.fullness > MOST_FULL or (
            decoding.fullness > SPARE and decoding.waited_s > MOST_WAIT_S
        )
        # If both sides are short, neither can spare a group.
        role, chosen = GroupRole.DECODE, list[ObservedGroup]()
        if is_short_of_prefill:
            role, candidates = GroupRole.PREFILL, [each for each in reversed(generating[1:]) if each.may_change]
            chosen = candidates[: decoding.spared(decoding.fullness)]
        elif is_short_of_room:
            candidates = [each for each in prefill[:-1] if each.may_change]
            chosen = candidates[: computing.spared(computing.busy)]
        return [RoleChange(each.name, RoleWish(role, reason)) for each in chosen]

    def _side(self, groups: Sequence[ObservedGroup]) -> _Side | None:
        """Return the means of the groups that report signals; None: none does."""
        known = [self._averages[each.name] for each in groups if each.signals is not None]
        if not known:
            return None
        count = len(known)
        return _Side(
            count,
            sum(each.busy for each in known) / count,
            sum(each.fullness for each in known) / count,
            sum(each.waited_s for each in known) / count,
        )

    def _note_looks(self, seen: Collection[str], now: float) -> None:
        """Note which groups are there, and forget those that have been gone for long."""
        for name in seen:
            self._presences.setdefault(name, _Presence(now))
        for name, presence in list(self._presences.items()):
            presence.note(now, self.settle_s, is_seen=name in seen)
            missed_at = presence.missed_at
            is_old = missed_at is not None and now - missed_at >= REMEMBERED_PARTS * self.settle_s
            # Otherwise it is still to be forgotten as one that was there.
            if is_old and name not in self._roles:
                del self._presences[name]

    def _note(self, groups: Sequence[ObservedGroup], now: float) -> None:
        """Average the loads, and note whether groups or roles have changed."""
        self._forget_gone()
        roles = {group.name: group.role for group in groups if not group.is_changing}
        roles |= {name: self._roles[name] for name in self._missing()}
        if roles != self._roles:
            self._roles, self._decides_from = roles, now + self.settle_s
        known = roles.keys() | {group.name for group in groups}
        self._averages = {name: self._averages.get(name) or _Averages() for name in known}
        for group in groups:
            self._averages[group.name].add(group, now, AVERAGED_PART * self.settle_s)

    def _forget_gone(self) -> None:
        """Forget the groups that have been missing for too long."""
        for name in self._missing():
            presence = self._presences[name]
            if presence.is_gone and presence.missed_at is not None:
                # The others' loads have been without it since then.
                self._decides_from = max(self._decides_from, presence.missed_at + self.settle_s)
                del self._roles[name]

    def _missing(self) -> list[str]:
        return [name for name in self._roles if self._presences[name].missed_at is not None]


def _restored(prefill: Sequence[ObservedGroup], generating: Sequence[ObservedGroup]) -> list[RoleChange]:
    """Return the change that gives a side a group again after restarts, by which roles are those of the settings.

    Only where a group of the other side belongs here by its settings: else this side has not started yet, or is away.
    """
    own_roles = [each.signals.own_role for each in (*prefill, *generating) if each.signals is not None]
    if not generating:
        role, reason, is_displaced = (
            GroupRole.DECODE,
            "no group generates",
            any(own is not GroupRole.PREFILL for own in own_roles),
        )
        chosen = [each for each in prefill[:-1] if each.may_change][:1]
    else:
        role, reason, is_displaced = GroupRole.PREFILL, "no prefill group is left", GroupRole.PREFILL in own_roles
        chosen = [each for each in generating[1:] if each.may_change][-1:]
    return [RoleChange(each.name, RoleWish(role, reason)) for each in chosen] if is_displaced else []
