"""Both ends of a stage whose passes are captured: fixed memory for what is received and sent between the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.engine.model.batch import StageBuffers

if TYPE_CHECKING:
    from services.worker.engine.parallel.stages import StageLinks


class NoEnds:
    """The ends of a model that is whole; see `StageEnds`."""

    def buffers(self, size: int) -> StageBuffers | None:
        """Return None."""
        return None

    def receive(self, tokens: int) -> None:
        """Do nothing."""

    def send(self, tokens: int) -> None:
        """Do nothing."""


class StageEnds:
    """Receives the residual stream before a captured pass is replayed, and sends it afterwards.

    All passes use the same memory, in the order of the stream. The tokens of a pass are sent without padding.
    """

    def __init__(self, links: StageLinks, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate for residual streams of up to `shape` [tokens, hidden]."""
        self._links = links
        self._entering = None if links.is_first else torch.zeros(shape, dtype=dtype, device=device)
        self._leaving = None if links.is_last else torch.zeros(shape, dtype=dtype, device=device)

    def buffers(self, size: int) -> StageBuffers | None:
        """Return the memory that a pass of `size` tokens reads and fills."""
        entering, leaving = (None if one is None else one[:size] for one in (self._entering, self._leaving))
        return StageBuffers(entering, leaving)

    def receive(self, tokens: int) -> None:
        """Wait, on the device, for the `tokens` of the next pass."""
        if self._entering is not None:
            self._links.receive_into(self._entering[:tokens])

    def send(self, tokens: int) -> None:
        """Send the `tokens` of the pass that was launched last."""
        if self._leaving is not None:
            # A copy, as the next pass fills the same memory, perhaps before these have left.
            self._links.send(self._leaving[:tokens].clone())
