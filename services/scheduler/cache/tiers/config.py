"""Constants of the host tier, each with its default and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import ConfigurationError


class WritePolicy(Enum):
    """When a node's pages are copied to the host.

    WRITE_THROUGH: as soon as no row uses it for the first time. WRITE_THROUGH_SELECTIVE: only after it has been used
    often enough (what is private, by its owner alone). WRITE_BACK: when the device runs short of pages and the node is
    among the next to go; what has to go before its copy is made is lost.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Rules of the host tier; without pages there is none."""

    pages: int = 0
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    # Under the selective policy: the first use computes a node, the second shows that it is found again.
    uses: int = 2
    # Pages of backups that are open at the same time: they hold device pages, and loads wait behind what has begun.
    window_pages: int = 256
    # Under write-back: the share of the device that is free or has a copy, so that it can be had at once.
    reserve_share: float = 1 / 16

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        checks = {
            "host pages must not be negative": self.pages >= 0,
            "host uses must be at least 1": self.uses >= 1,
            "the window of backups must hold a page": self.window_pages >= 1,
            "host reserve_share must be in (0, 1]": 0 < self.reserve_share <= 1,
        }
        wrong = [message for message, paths in checks.items() if not paths]
        if wrong:
            raise ConfigurationError("; ".join(wrong))
