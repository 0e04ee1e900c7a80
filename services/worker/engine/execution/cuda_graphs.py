"""CUDA graphs of every capture size, captured at start-up as far as memory and time suffice."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from common.errors import ConfigurationError
from services.worker.engine.execution.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

# Memory of one size's graphs beside that of their passes: libraries' workspaces, and the graphs themselves.
_GRAPH_BYTES = 128 * 1024**2


class CudaGraph(Protocol):
    """A pass of up to `size` rows or tokens."""

    size: int

    def has_memory(self) -> bool:
        """Run it, and return whether as much memory as that took is still free for a graph, and something beside it."""

    def capture(self, pool: Any) -> None:  # torch does not export the type
        """Record it, with memory from `pool`, after a run that compiles and warms up."""

    def release(self) -> None:
        """Drop the captured graphs: the pass runs kernel by kernel."""


P = TypeVar("P", bound=CudaGraph)


class CudaGraphs(Generic[P]):
    """The graphs of all capture sizes."""

    def __init__(self, sizes: tuple[int, ...], make: Callable[[int], P], unit: str = "rows") -> None:
        """Make a pass of each of `sizes`, ascending, of which there are so many of `unit`."""
        self._passes = tuple(make(size) for size in sizes)
        self._unit = unit
        self._captured: set[int] = set()

    def of(self, size: int) -> P:
        """Return the smallest pass with room for `size`."""
        return next(one for one in self._passes if one.size >= size)

    def captured(self, size: int) -> P | None:
        """Return the same if it was captured, and nothing if it was not, or if there is none."""
        one = next((one for one in self._passes if one.size >= size), None)
        return None if one is None or one.size not in self._captured else one

    def capture(
        self, report: Callable[[float], None], budget_s: float, pool: Any, agree: Callable[[bool], bool] | None = None
    ) -> None:
        """Capture the largest size first, so that others reuse its memory; sizes that fail run kernel by kernel.

        Args:
            report: called with the fraction of sizes that are done.
            budget_s: what it may take; all that is left then is left out.
            pool: memory for graphs.
            agree: as `OverlappedModel.agree`, where other ranks capture the same passes, which meet in them. All leave
                out what one of them has no memory for.

        Raises:
            ConfigurationError: memory does not suffice after all, and passes are shared: others wait for this rank.
        """
        with without_collections():
            too_large = self._capture_all(report, budget_s, pool, agree)
        if too_large:
            log.warning(
                "Memory does not suffice for graphs of batches of %s %s, which run slower; a smaller "
                "scheduler.memory_fraction or scheduler.max_rows leaves more",
                ", ".join(str(size) for size in reversed(too_large)),
                self._unit,
            )

    def _capture_all(
        self, report: Callable[[float], None], budget_s: float, pool: Any, agree: Callable[[bool], bool] | None
    ) -> list[int]:
        """Capture as `capture` does; return the sizes that memory does not suffice for."""
        started = time.monotonic()
        too_large: list[int] = []
        for done, one in enumerate(reversed(self._passes), start=1):
            if self._try_capture(one, pool, agree):
                self._captured.add(one.size)
            else:
                too_large.append(one.size)
            report(done / len(self._passes))
            if time.monotonic() - started > budget_s and done < len(self._passes):
                log.warning("Graphs of %d of %d batch sizes (%s) are captured in %.0f s; the others run slower",
                            len(self._captured), len(self._passes), self._unit, budget_s)  # fmt: skip
                break
        return too_large

    def _try_capture(self, one: P, pool: Any, agree: Callable[[bool], bool] | None) -> bool:
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            if agree is not None and not agree(one.has_memory()):
                one.release()
                return False
            one.capture(pool)
        except Exception as error:
            # The error of an interrupted capture may only say that it was interrupted; its cause is in the context.
            cause = error.__context__
            if not is_out_of_memory(error) and (cause is None or not is_out_of_memory(cause)):
                raise
            if agree is not None:
                raise ConfigurationError(
                    f"memory does not suffice for graphs of {one.size} {self._unit}; make scheduler.memory_fraction or "
                    f"scheduler.max_rows smaller: {error}"
                ) from error
        else:
            return True
        # After the except block: the error keeps the pass's allocations alive.
        one.release()
        if stream is not None:
            # A capture that could not be ended leaves its stream current.
            torch.cuda.set_stream(stream)
            torch.cuda.empty_cache()
        return False


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage now, and not within the block: what is freed by a collection may end a capture.

    The graphs of a model that was replaced are garbage, and destroying them is an error while others are captured.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_memory(run: Callable[[], object], device: torch.device) -> bool:
    """Run something, and return whether as much as that took is still free for a graph, and something beside it."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0]) >= needed + _GRAPH_BYTES
