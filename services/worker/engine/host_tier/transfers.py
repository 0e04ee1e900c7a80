"""Interface of copies between the tiers beside forward passes; `common/transfers.py` has the contract of a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.transfers import Transfer, TransferAck


class Transfers(Protocol):
    """Carries transfers out. All methods belong to the engine's thread."""

    def begin(self, transfers: Iterable[Transfer]) -> None:
        """Take in a plan's transfers, before its first pass; they see what earlier passes wrote."""

    def poll(self) -> tuple[TransferAck, ...]:
        """Return the acknowledgements of finished transfers after a pass; takes a bounded time."""

    def wait(self) -> tuple[TransferAck, ...]:
        """Return the acknowledgements of finished transfers while no pass runs; waits a short time for one."""

    def reset(self) -> None:
        """Cancel the open transfers: when this returns, no page is read or written any more."""

    def close(self) -> None:
        """Give everything back."""
