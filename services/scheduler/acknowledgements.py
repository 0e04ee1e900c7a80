"""Acknowledgements of transfers, which count once all ranks have sent theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.transfers import TransferAck, TransferId


class GroupAcks:
    """Collects acknowledgements until every rank has acknowledged a transfer."""

    def __init__(self, ranks: int) -> None:
        """Start for a stream of plans to `ranks` ranks."""
        self._ranks = ranks
        self._pending: dict[TransferId, tuple[TransferAck, set[int]]] = {}

    def add(self, rank: int, ack: TransferAck) -> TransferAck | None:
        """Add a rank's acknowledgement; return the group's once all ranks have acknowledged, else None.

        It counts the pages and snapshots that all ranks have, and the slowest rank's time.
        """
        known = self._pending.pop(ack.transfer_id, None)
        together, ranks = (ack, {rank}) if known is None else (_combine(known[0], ack), known[1] | {rank})
        if len(ranks) == self._ranks:
            return together
        self._pending[ack.transfer_id] = together, ranks
        return None


def _combine(one: TransferAck, other: TransferAck) -> TransferAck:
    return replace(
        one,
        done_pages=min(one.done_pages, other.done_pages),
        duration_us=max(one.duration_us, other.duration_us),
        done_snapshots=min(one.done_snapshots, other.done_snapshots),
    )
