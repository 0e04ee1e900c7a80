"""Ranks of several scheduler groups that share nothing but the experts of a mixture (data-parallel attention)."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from common.errors import ConfigurationError
from services.worker.engine.execution.interface import ExpertGroupError
from services.worker.engine.parallel.group import RankGroup, join_group, use_way_to
from services.worker.engine.parallel.meeting import connect
from services.worker.engine.parallel.pass_calls import QueuedPassCalls
from services.worker.engine.parallel.stages import NoStages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.steps import EngineSpec
    from services.worker.engine.kernels.gpu.rank_sums import RankSums
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.parallel.stages import StageLinks
    from services.worker.engine.parallel.symmetric_memory import ExchangeShape


class ExpertGroup:
    """The ranks that hold experts together, over gloo on CPUs and NCCL on GPUs.

    As a `RankGroup` it is that of a rank that holds its layers alone, but agrees with the others.
    """

    rank = 0
    world_size = 1
    links: StageLinks = NoStages()

    def __init__(self, rank: int, ranks: int, rendezvous: str, device: torch.device) -> None:
        """Meet the other ranks at `rendezvous` (host:port, served by rank 0); blocks until all are there.

        Raises:
            ConfigurationError: no rendezvous address was given.
        """
        if not rendezvous:
            raise ConfigurationError("scheduler.data_parallel.rendezvous must name host and port of the first group")
        self.expert_rank, self.expert_ranks = rank, ranks
        self._device = device
        use_way_to(rendezvous)
        self.calls = QueuedPassCalls(connect(rank, ranks, rendezvous, device), rank, ranks)

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gather `numbers` [n] int64, equally many on each rank; return [ranks, n] on the host.

        Raises:
            ExpertGroupError: a rank has left.
        """
        gathered = numbers.new_empty(self.expert_ranks, len(numbers))
        with _with_others():
            dist.all_gather(list(gathered), numbers)
            return gathered.cpu()

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send the first `sent[0]` of `rows` [tokens, width] to rank 0, the next to rank 1, and so on.

        Returns [sum(received), width] with the rows from each rank in the order of ranks, `received[i]` from rank i.

        Raises:
            ExpertGroupError: a rank has left.
        """
        arrived = rows.new_empty(sum(received), rows.shape[1])
        with _with_others():
            dist.all_to_all_single(arrived, rows, received, sent)
        return arrived

    def check_alike(self, traits: object) -> None:
        """Raise ConfigurationError unless `traits` of all ranks have the same representation."""
        digest = hashlib.sha256(repr(traits).encode()).hexdigest()
        if len(set(self.gather_digests(digest))) > 1:
            raise ConfigurationError(
                "scheduler.data_parallel: the groups that share experts differ in their model, dtype or quantization; "
                "configure all of them alike"
            )

    def place_for(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return None."""
        return None

    def joined(self, hidden: torch.Tensor) -> RankSums | None:
        """Return None."""
        return None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`."""
        return tensor

    def gather_columns(self, part: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
        """Return `part`."""
        return part

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`."""
        return tensor

    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks that share experts."""
        holder = torch.tensor([value], dtype=torch.int64, device=self._device)
        with _with_others():
            dist.all_reduce(holder, op=dist.ReduceOp.MIN)
            return int(holder.item())

    def gather_digests(self, digest: str) -> list[str]:
        """Gather `digest` from all ranks that share experts."""
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).long().to(self._device)
        return [bytes(each).hex() for each in self.gather(own).tolist()]

    def close(self) -> None:
        """Leave, so that the other ranks notice."""
        self.calls.close()
        dist.destroy_process_group()


def join_ranks(spec: EngineSpec, device: torch.device, shape: ExchangeShape | None, *, alike: object) -> RankGroup:
    """Return the ranks of this rank's stage, or those that share experts with it, once all have joined.

    `shape` is that of `join_group`; ranks that share experts must have the same `alike`.

    Raises:
        ConfigurationError: they have not.
    """
    if spec.data_parallel_size == 1:
        return join_group(spec.rank, spec.world_size, spec.rendezvous, device, shape, spec.stages)
    group = ExpertGroup(spec.data_parallel_rank, spec.data_parallel_size, spec.data_parallel_rendezvous, device)
    try:
        group.check_alike(alike)
    except ConfigurationError:
        group.close()
        raise
    return group


@contextlib.contextmanager
def left_on_error(group: ExpertGroup | None) -> Iterator[None]:
    """Leave `group` if the block raises, so that the others do not wait, and this rank can meet them again."""
    try:
        yield
    except BaseException:
        if group is not None:
            group.close()
        raise


@contextlib.contextmanager
def _with_others() -> Iterator[None]:
    """Turn errors of communication into ExpertGroupError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExpertGroupError(f"a rank that shares experts does not answer: {str(error).splitlines()[0]}") from error
