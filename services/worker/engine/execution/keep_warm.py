"""Work for an idle device, so that its clocks stay up: the first steps after a pause would be slower without."""

from __future__ import annotations

import torch

# 8 products of 2,048 x 2,048 are 137 GFLOP: about a quarter of a millisecond on an H200.
_SIZE = 2048
_PRODUCTS = 8


class DeviceWarmer:
    """Multiplies matrices of its own on a stream that gives way to all others.

    It touches no rows, no pages and no other rank, so it may run whenever a rank thinks it is idle: a plan that comes
    meanwhile is launched at once, and its kernels go first.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate, on a GPU."""
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, whatever torch's stubs say
        self._stream = torch.cuda.Stream(device, priority=lowest)  # type: ignore[no-untyped-call]  # torch leaves it so
        # Products of zeros: nothing can overflow.
        self._factors = torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        self._product = torch.zeros_like(self._factors)

    def run(self) -> None:
        """Launch the products, unless the last ones are still computed."""
        if not self._stream.query():
            return
        with torch.cuda.stream(self._stream):
            for _ in range(_PRODUCTS):
                torch.mm(self._factors, self._factors, out=self._product)
