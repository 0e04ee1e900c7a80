"""Whether code that is not ours can be captured in CUDA graphs: it must not wait for the GPU or copy from the host."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def waiting_line(run: Callable[[], object]) -> str | None:
    """Run something twice; return the file and line where it waits for the device, None if it does not.

    A capture that fails leaves torch's allocator and generators in the middle of it, so this is found out beforehand.
    """
    # The first run compiles programs and loads libraries.
    run()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{Path(last.filename).name}, line {last.lineno}"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def replayed(run: Callable[[], torch.Tensor], change: Callable[[], None]) -> torch.Tensor:
    """Capture `run`, `change` its input in place, replay the graph, and return its output.

    Raises:
        RuntimeError: it cannot be captured.
    """
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()
    finally:
        # A capture that could not be ended leaves its stream current.
        torch.cuda.set_stream(stream)
    change()
    graph.replay()
    torch.cuda.synchronize()
    return output.clone()
