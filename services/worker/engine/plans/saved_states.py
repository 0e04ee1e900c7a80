"""Copies between the recurrent states of rows and snapshots, as plans order them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.steps import RowOpen, StateSave
    from services.worker.engine.plans.rows import RowStates


class RowStateCopies(Protocol):
    """Copies on the device, in the order of passes."""

    def load(self, row: int, snapshot: int) -> None:
        """Let a row continue from a snapshot."""

    def save(self, row: int, snapshot: int) -> None:
        """Overwrite a snapshot with a row's states."""


class SavedStates:
    """Makes the copies of plans; without recurrent layers there are none."""

    def __init__(self, copies: RowStateCopies | None) -> None:
        """Use `copies`, which plans need only if they order any."""
        self._copies = copies

    def load(self, opens: Iterable[RowOpen]) -> None:
        """Give rows that are opened their states, before the plan's first pass."""
        if self._copies is not None:
            for opened in opens:
                if opened.snapshot is not None:
                    self._copies.load(opened.row, opened.snapshot)

    def save(self, saves: Iterable[StateSave], rows: RowStates) -> None:
        """Copy the states of rows that have just reached the number of tokens at which they are wanted."""
        if self._copies is not None:
            for save in saves:
                if rows.computed[save.row] == save.tokens:
                    self._copies.save(save.row, save.snapshot)
