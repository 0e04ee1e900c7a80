"""Communication of ranks that share layers, and the network interface that ranks on several hosts use for it."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Protocol

import psutil
import torch
import torch.distributed as dist

from common.errors import ConfigurationError
from services.worker.engine.parallel.meeting import connect, connect_some
from services.worker.engine.parallel.stages import DistributedStageLinks, NoStages
from services.worker.engine.parallel.symmetric_memory import join_symmetric_memory

if TYPE_CHECKING:
    from services.worker.engine.kernels.gpu.rank_sums import RankSums
    from services.worker.engine.parallel.shards import Span
    from services.worker.engine.parallel.stages import StageLinks
    from services.worker.engine.parallel.symmetric_memory import ExchangeShape

log = logging.getLogger(__name__)

# The variables in which gloo and NCCL expect the interface.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankGroup(Protocol):
    """The ranks that hold the same layers together. Every rank makes the same calls in the same order."""

    rank: int
    """Of this rank among them."""
    world_size: int
    """Their number."""
    links: StageLinks
    """The connections to ranks with other layers."""

    def place_for(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return memory of the shape and type of `like` from which `sum` needs no copy; it serves until that `sum`.

        None where any memory will do.
        """
        ...

    def joined(self, hidden: torch.Tensor) -> RankSums | None:
        """Return the fused all-reduce, residual sum and norm for `hidden`, None where there is none."""
        ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over all ranks, in place where that is possible; return the sum."""
        ...

    def gather_columns(self, part: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
        """Join parts [rows, len(spans[rank])] to [rows, all] on rank 0; other ranks get [0, all].

        The result that a captured pass reads is overwritten by the next call.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `tensor`; the others pass one of the same shape and type, whose content is replaced."""
        ...

    def minimum(self, value: int) -> int:
        """Return the smallest `value` of all ranks, of other stages, too."""
        ...

    def gather_digests(self, digest: str) -> list[str]:
        """Return the digests of all ranks, also of other stages, in their order; all are of the same length."""
        ...

    def close(self) -> None:
        """Leave the group; nothing may be called after this."""
        ...


class SingleRank:
    """The group of a model that one rank holds alone."""

    rank = 0
    world_size = 1
    links: StageLinks = NoStages()

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
        assert len(spans) == 1
        return part

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`."""
        return tensor

    def minimum(self, value: int) -> int:
        """Return `value`."""
        return value

    def gather_digests(self, digest: str) -> list[str]:
        """Return `digest` alone."""
        return [digest]

    def close(self) -> None:
        """Do nothing."""


class DistributedGroup:
    """Ranks in processes of their own, over `torch.distributed`: gloo on CPUs, NCCL and shared memory on GPUs."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: str,
        device: torch.device,
        shape: ExchangeShape | None = None,
        stages: int = 1,
    ) -> None:
        """Meet the other ranks at `rendezvous` (host:port, served by rank 0); blocks until all are there.

        With `shape`, what fits it goes through the GPUs' shared memory where they have some; not with several stages.

        Raises:
            ConfigurationError: no rendezvous address was given.
        """
        if not rendezvous:
            raise ConfigurationError(f"world_size {world_size} needs the rendezvous address of rank 0")
        self.world_size = world_size // stages
        self.rank = rank % self.world_size
        self._all_ranks = world_size
        self._device = device
        use_way_to(rendezvous)
        connect(rank, world_size, rendezvous, device)
        # None: all ranks.
        self._stage: dist.ProcessGroup | None = None
        self._first = rank - self.rank
        self.links: StageLinks = NoStages()
        if stages > 1:
            try:
                self._stage, tokens = self._join_stages(stages)
            except RuntimeError:
                dist.destroy_process_group()
                raise
            self.links = DistributedStageLinks(rank, world_size, stages, device, tokens)
        has_shared = shape is not None and stages == 1
        self._shared = join_symmetric_memory(rank, world_size, shape, device) if has_shared and shape else None

    def _join_stages(self, stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the group of this rank's stage, and one of all ranks on the host; every rank makes all groups."""
        own = None
        for first in range(0, self._all_ranks, self.world_size):
            made = connect_some(list(range(first, first + self.world_size)))
            own = made if first == self._first else own
        assert own is not None, "this rank is in one of the stages"
        return own, connect_some(backend="gloo")

    def place_for(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return some of the shared memory, if there is any and it is large enough."""
        return None if self._shared is None else self._shared.place_for(like)

    def joined(self, hidden: torch.Tensor) -> RankSums | None:
        """Return it where GPUs share memory and tokens are few."""
        return None if self._shared is None else self._shared.joined(hidden)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` over all ranks."""
        if self._shared is not None and (summed := self._shared.try_sum(tensor)) is not None:
            return summed
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self._stage)
        return tensor

    def gather_columns(self, part: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
        """Join column parts on rank 0. Collectives need equal shapes, so narrower parts are padded."""
        if self._shared is not None and (joined := self._shared.try_gather_columns(part, spans)) is not None:
            return joined
        if self.world_size == 1:
            return part
        widest = max(len(span) for span in spans)
        padded = part if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        if self.rank != 0:
            dist.gather(padded.contiguous(), dst=self._first, group=self._stage)
            return part.new_empty(0, spans[-1].stop)
        parts = [torch.empty_like(padded) for _ in spans]
        dist.gather(padded.contiguous(), parts, dst=self._first, group=self._stage)
        return torch.cat([received[:, : len(span)] for received, span in zip(parts, spans, strict=True)], dim=1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with rank 0's."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=self._first, group=self._stage)
        return tensor

    def minimum(self, value: int) -> int:
        """Reduce `value` over all ranks."""
        holder = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(holder, op=dist.ReduceOp.MIN)
        return int(holder.item())

    def gather_digests(self, digest: str) -> list[str]:
        """Gather `digest` from all ranks."""
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(self._device)
        gathered = [torch.empty_like(own) for _ in range(self._all_ranks)]
        dist.all_gather(gathered, own)
        return [bytes(each.tolist()).hex() for each in gathered]

    def close(self) -> None:
        """Destroy the process group."""
        self._shared = self._stage = None
        self.links.close()
        dist.destroy_process_group()


def join_group(
    rank: int,
    world_size: int,
    rendezvous: str,
    device: torch.device,
    shape: ExchangeShape | None = None,
    stages: int = 1,
) -> RankGroup:
    """Return the ranks of this rank's stage, once all `world_size` ranks have joined, of other stages, too.

    `shape` describes the exchanged tensors on GPUs.
    """
    if world_size == 1:
        return SingleRank()
    return DistributedGroup(rank, world_size, rendezvous, device, shape, stages)


def use_way_to(rendezvous: str) -> None:
    """Have ranks talk over the interface that leads to `rendezvous` (host:port), unless the environment names another.

    Left alone, gloo takes the one that the host's own name stands for, which may be the loopback, and NCCL the first.
    """
    name = interface_to(rendezvous.rpartition(":")[0].strip("[]"))
    if name is None:
        return
    for variable in _VARIABLES:
        os.environ.setdefault(variable, name)
    log.info("ranks.interface name=%s", os.environ[_VARIABLES[0]])


def interface_to(host: str) -> str | None:
    """Return the interface that packets to `host` leave by; None if that is this host's loopback, or not known."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Sends nothing: it only looks the route up.
            probe.connect(address)
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    if own.is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            is_ip = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and ipaddress.ip_address(each.address.partition("%")[0]) == own:
                return name
    return None
