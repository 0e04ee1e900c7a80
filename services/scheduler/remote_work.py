"""Interfaces of the work that other processes do for a group's requests: prompts and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.encodings import Encoding
    from services.scheduler.core.sequence import Sequence


class RemotePrefills(Protocol):
    """Has prompts computed by other groups; `asked` and `failed` are the numbers of these since start."""

    asked: int
    failed: int

    def consider(self, core: SchedulerCore, sequence: Sequence) -> None:
        """Have a new request's prompt computed elsewhere if that pays."""


class RemoteEncoders(Protocol):
    """Has images encoded by workers that do nothing else."""

    @property
    def room(self) -> int:
        """Embeddings that they may have to compute at a time; 0: none of them serves."""

    def start(self, core: SchedulerCore, encoding: Encoding) -> None:
        """Have an image encoded, and its embeddings kept by all ranks; then `finish` its encoding in any case."""
