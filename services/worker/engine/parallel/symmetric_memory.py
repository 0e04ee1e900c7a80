"""Exchanges of decode sizes through memory that the GPUs of one host map of each other.

NCCL takes 20 to 40 µs for what such a program does in 6 to 15, and a decode step has two sums per layer. Torch's
symmetric memory brings the programs; which of them to use, or NCCL, is measured once for every size. Multicast, which
some hosts cannot set up without harm, stays off: none of these programs uses it.
"""

from __future__ import annotations

import bisect
import logging
import os
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.worker.engine.kernels.gpu.rank_sums import RankSums
    from services.worker.engine.parallel.shards import Span

log = logging.getLogger(__name__)

# Sums beyond the largest size are left to NCCL, which has the bandwidth.
SIZES = tuple(1 << exponent for exponent in range(12, 24))  # 4 KiB to 8 MiB
_TYPES = (torch.bfloat16, torch.float32)
# Most bytes that one rank reads of the others in a fused sum; beyond, two stages read less.
_MOST_READ = 8 * 1024**2
_MOST_ROWS = 1024
# Ranks for which the programs that sum in two stages were compiled.
_TWO_STAGE_RANKS = (2, 4, 8)
# Alignment in bytes of their reads and writes.
_ALIGNMENT = 16
_CALLS, _REPLAYS = 20, 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Method(Enum):
    """Methods of summation."""

    NCCL = "nccl"
    ONE_STAGE = "one stage"
    """Every rank reads the parts of all others: the shortest way for few bytes."""
    TWO_STAGES = "two stages"
    """Every rank sums its share of the elements, then reads the others' shares: fewer bytes, one meeting more."""


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """The exchanged tensors: activations [tokens, hidden] and logits [up to rows, vocabulary], both of `dtype`."""

    dtype: torch.dtype
    hidden: int
    rows: int
    vocabulary: int


class SymmetricMemory:
    """Memory of every rank that all ranks read and write, and the measured choice of how to use it."""

    def __init__(self, rank: int, world_size: int, shape: ExchangeShape, device: torch.device) -> None:
        """Allocate on `device` and meet the other ranks; all make one at the same time, over the default group.

        Raises:
            RuntimeError: the devices cannot reach each other's memory.
        """
        self._rank = rank
        self._world_size = world_size
        self._name = dist.group.WORLD.group_name  # type: ignore[union-attr]  # the group exists by now
        self._device = device
        # No other object keeps the other ranks' memory mapped.
        self._handles: list[Any] = []
        self._sums = self._allocate(SIZES[-1] // shape.dtype.itemsize, shape.dtype)
        self._logits = self._allocate(shape.rows * shape.vocabulary, shape.dtype)
        self._logits_handle = self._handles[-1]
        self._joined = self._make_joined(shape)
        self._methods = self._choose(device)
        rows = 0 if self._joined is None else self._joined.rows
        log.info("symmetric_memory.measured sums=%s joined_rows=%d", describe(self._methods), rows)

    def joined(self, hidden: torch.Tensor) -> RankSums | None:
        """Return the fused operation if it serves this number of tokens; see `RankGroup.joined`."""
        joined = self._joined
        fits = joined is not None and hidden.shape[0] <= joined.rows
        return joined if fits and hidden.is_contiguous() and hidden.dtype == self._sums.dtype else None

    def place_for(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return shared memory for a sum of that shape and type, if `try_sum` will sum it there."""
        method = self._method_for(like)
        return None if method is Method.NCCL else self._sums[: like.numel()].view(like.shape)

    def try_sum(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return `tensor` summed over all ranks, perhaps in place, or None where NCCL is to do it."""
        return self._sum(self._method_for(tensor), tensor)

    def _method_for(self, tensor: torch.Tensor) -> Method:
        size = tensor.nbytes
        if size > SIZES[-1] or size % _ALIGNMENT or tensor.dtype != self._sums.dtype or not tensor.is_contiguous():
            return Method.NCCL
        return self._methods[bisect.bisect_left(SIZES, size)]

    def try_gather_columns(self, part: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor | None:
        """Write the parts of all ranks into rank 0's memory; see `RankGroup.gather_columns`."""
        rows, width = part.shape[0], spans[-1].stop
        if part.dtype != self._logits.dtype or rows * width > self._logits.numel():
            return None
        logits = self._logits if self._rank == 0 else self._logits_handle.get_buffer(0, self._logits.shape, part.dtype)
        whole = logits[: rows * width].view(rows, width)
        # Rank 0 may still read the result of the gathering before.
        self._logits_handle.barrier()
        whole[:, spans[self._rank].scaled(1)] = part
        self._logits_handle.barrier()
        if self._rank != 0:
            return part.new_empty(0, width)
        # A captured pass uses its logits before the next one is launched; other callers may keep theirs longer.
        return whole if torch.cuda.is_current_stream_capturing() else whole.clone()

    def _sum(self, method: Method, tensor: torch.Tensor) -> torch.Tensor | None:
        if method is Method.NCCL:
            return None
        shared = self._sums[: tensor.numel()].view(tensor.shape)
        is_there = tensor.data_ptr() == shared.data_ptr()
        # The programs end only when all ranks have read the summands.
        if method is Method.ONE_STAGE:
            summed: torch.Tensor = (
                torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)
                if is_there
                else torch.ops.symm_mem.one_shot_all_reduce_copy(shared, tensor, "sum", self._name)
            )
            return summed
        summed = torch.empty_like(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_out(
            shared if is_there else shared.copy_(tensor), "sum", self._name, summed
        )
        return summed

    def _make_joined(self, shape: ExchangeShape) -> RankSums | None:
        """Return the fused operation, or None if its results are wrong on this machine."""
        # Imported here because it needs Triton.
        from services.worker.engine.kernels.gpu.rank_sums import RankSums

        row_bytes = shape.hidden * shape.dtype.itemsize
        rows = min(_MOST_ROWS, _MOST_READ // ((self._world_size - 1) * row_bytes))
        if not rows or row_bytes % _ALIGNMENT:
            return None
        turns = [(self._allocate(rows * shape.hidden, shape.dtype), self._addresses()) for _ in range(2)]
        pads = self._allocate(rows * self._world_size, torch.int32)
        pads.zero_()
        self._logits_handle.barrier()
        torch.cuda.synchronize(self._device)
        joined = RankSums(self._rank, turns, (pads, self._addresses()), rows)
        is_right = torch.tensor([joined.check(shape.hidden, shape.dtype)], dtype=torch.int32, device=self._device)
        dist.all_reduce(is_right, op=dist.ReduceOp.MIN)
        if not is_right.item():
            log.warning("Ranks sum, add and normalise in steps, slower: doing so at once gave wrong results here")
            return None
        return joined

    def _addresses(self) -> torch.Tensor:
        """Return where the memory that was allocated last lies on each rank, [ranks] int64."""
        return torch.tensor(self._handles[-1].buffer_ptrs, dtype=torch.int64, device=self._device)

    def _allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory that the others map, as many elements on every rank."""
        import torch.distributed._symmetric_memory as symmetric  # not there in torch builds without distributed

        memory = symmetric.empty(elements, dtype=dtype, device=self._device)
        self._handles.append(symmetric.rendezvous(memory, self._name))
        return memory

    def _choose(self, device: torch.device) -> tuple[Method, ...]:
        """Return the fastest method for each of `SIZES`: the same on all ranks, by the slowest rank's times."""
        methods = [method for method in Method if method is not Method.TWO_STAGES or self._has_two_stages]
        times = torch.zeros(len(SIZES), len(methods), device=device)
        for i, size in enumerate(SIZES):
            for j, method in enumerate(methods):
                tensor = self._place(method, size // self._sums.itemsize)
                times[i, j] = _graph_time(lambda chosen=method, given=tensor: self._run(chosen, given))  # type: ignore[misc]
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return tuple(methods[best] for best in times.argmin(dim=1).tolist())

    @property
    def _has_two_stages(self) -> bool:
        return self._world_size in _TWO_STAGE_RANKS

    def _run(self, method: Method, tensor: torch.Tensor) -> None:
        if self._sum(method, tensor) is None:
            dist.all_reduce(tensor)

    def _place(self, method: Method, elements: int) -> torch.Tensor:
        """Return the buffer that timings sum, at the place where passes have it."""
        return (
            torch.zeros(elements, dtype=self._sums.dtype, device=self._device)
            if method is Method.NCCL
            else self._sums[:elements]
        )


def join_symmetric_memory(
    rank: int, world_size: int, shape: ExchangeShape, device: torch.device
) -> SymmetricMemory | None:
    """Return the ranks' shared memory, or None where they cannot have it; all ranks call this at the same time."""
    if not (device.type == "cuda" and shape.dtype in _TYPES and _can_meet(world_size)):
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made: SymmetricMemory | None = None
    try:
        made = SymmetricMemory(rank, world_size, shape, device)
    except (RuntimeError, ImportError, AttributeError) as error:
        log.warning("Ranks exchange over NCCL alone, slower at small sizes: %s", error)
    has_all = torch.tensor([made is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_all, op=dist.ReduceOp.MIN)
    return made if has_all.item() else None


def describe(methods: Sequence[Method]) -> str:
    """Return which method is used up to which size, for the log."""
    ends = [i for i, method in enumerate(methods) if i + 1 == len(methods) or methods[i + 1] is not method]
    return ", ".join(f"{methods[i].value} to {SIZES[i] >> 10} KiB" for i in ends)


def _can_meet(world_size: int) -> bool:
    """Return whether all ranks are on one host; they come to the same answer."""
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    ranks: list[Any] = [None] * world_size
    dist.all_gather_object(ranks, (socket.gethostname(), boot))
    return len(set(ranks)) == 1


def _graph_time(run: Callable[[], None]) -> float:
    """Return milliseconds of one call among several in a captured graph, as decode steps run them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            run()
    times = []
    for _ in range(_REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(float(started.elapsed_time(ended)) / _CALLS)
    return min(times)
