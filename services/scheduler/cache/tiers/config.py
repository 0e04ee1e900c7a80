"""All constants of the host tier, with their defaults and reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import ConfigurationError


class WritePolicy(Enum):
    """When a node's pages are copied to the host.

    WRITE_THROUGH: when no row uses it any more for the first time. WRITE_THROUGH_SELECTIVE: only after enough uses (of
    a private node, by its owner alone). WRITE_BACK: when the device runs short of pages and the node is among the next
    victims; a node evicted before its copy is made is lost.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Rules of the host tier; with 0 pages there is none."""

    pages: int = 0
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    # Under the selective policy: the first use computes a node, the second shows that it is matched again.
    uses: int = 2
    # Pages of backups in flight at the same time: they hold device pages, and loads wait for started ones.
    window_pages: int = 256
    # Under write-back: the share of the device's pages that are free or have a copy, so that they are available at
    # once.
    reserve_share: float = 1 / 16

    def __post_init__(self) -> None:
        """Validate the values.

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
