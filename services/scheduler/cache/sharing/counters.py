"""Distinct users of a node in an epoch: a set of subjects while they are few, then a sketch, in at most 576 bytes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from math import log

from services.scheduler.cache.config import EXACT_SUBJECTS

_REGISTERS = 256
_REGISTER_BITS = 8
_VALUE_BITS = 64 - _REGISTER_BITS
# The usual correction of the harmonic mean (Flajolet et al., HyperLogLog, 2007); the error is 1.04 / sqrt(256).
_ALPHA = 0.7213 / (1 + 1.079 / _REGISTERS)


class DistinctCount:
    """Counts distinct 64-bit fingerprints: exactly up to `EXACT_SUBJECTS`, then within about 7 %."""

    __slots__ = ("_members", "_registers")

    def __init__(self) -> None:
        self._members = array("Q")
        self._registers: bytearray | None = None

    def add(self, fingerprint: int) -> None:
        """Count a fingerprint, if it is new."""
        if self._registers is not None:
            self._note(self._registers, fingerprint)
            return
        members = self._members
        index = bisect_left(members, fingerprint)
        if index < len(members) and members[index] == fingerprint:
            return
        members.insert(index, fingerprint)
        if len(members) > EXACT_SUBJECTS:
            self._registers = bytearray(_REGISTERS)
            for member in members:
                self._note(self._registers, member)
            self._members = array("Q")

    @property
    def members(self) -> tuple[int, ...]:
        """The fingerprints, ascending, while they are counted exactly; empty afterwards."""
        return tuple(self._members)

    @property
    def count(self) -> int:
        """Number of distinct fingerprints, exact or estimated."""
        if self._registers is None:
            return len(self._members)
        estimate = _ALPHA * _REGISTERS**2 / sum(2.0**-value for value in self._registers)
        empty = self._registers.count(0)
        if empty and estimate <= 2.5 * _REGISTERS:
            estimate = _REGISTERS * log(_REGISTERS / empty)
        return max(round(estimate), EXACT_SUBJECTS + 1)

    def copy(self) -> DistinctCount:
        """Return an independent copy."""
        other = DistinctCount()
        other._members = self._members[:]
        other._registers = None if self._registers is None else bytearray(self._registers)
        return other

    @staticmethod
    def _note(registers: bytearray, fingerprint: int) -> None:
        index = fingerprint & (_REGISTERS - 1)
        rank = _VALUE_BITS - (fingerprint >> _REGISTER_BITS).bit_length() + 1
        if rank > registers[index]:
            registers[index] = rank


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Hits and distinct subjects of a window that has closed, and those of the one before."""

    hits: int
    users: int
    previous_hits: int = 0
    previous_users: int = 0


@dataclass(slots=True)
class Window:
    """Hits on a node in the current epoch and the previous one, by distinct subjects that have not computed it."""

    hits: int = 0
    users: DistinctCount | None = None
    previous_hits: int = 0
    previous_users: int = 0

    @property
    def distinct_users(self) -> int:
        """Distinct subjects in the current epoch; an estimate never exceeds the hits."""
        return 0 if self.users is None else min(self.users.count, self.hits)

    @property
    def counts(self) -> WindowCounts:
        """The numbers alone."""
        return WindowCounts(self.hits, self.distinct_users, self.previous_hits, self.previous_users)

    def add(self, fingerprint: int) -> None:
        self.hits += 1
        if self.users is None:
            self.users = DistinctCount()
        self.users.add(fingerprint)

    def copy(self) -> Window:
        """Return an independent copy."""
        users = None if self.users is None else self.users.copy()
        return Window(self.hits, users, self.previous_hits, self.previous_users)
