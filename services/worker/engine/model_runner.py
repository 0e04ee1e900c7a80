"""A loaded decoder with its memory, as runners and executors use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigurationError
from common.steps import SleepLevel
from services.worker.engine.host_tier.device_pages import DevicePages, find_sharing
from services.worker.engine.host_tier.nixl_copies import NixlCopies
from services.worker.engine.host_tier.peer_copies import make_peer_copies
from services.worker.engine.host_tier.pool import allocate_host_pool
from services.worker.engine.host_tier.sliced_transfers import SlicedTransfers
from services.worker.engine.host_tier.stream_transfers import StreamTransfers
from services.worker.engine.model.kv_pool import allocate_like, shape_of
from services.worker.engine.sleeping import HostBuffers, ParkedTensors, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.steps import EngineCapacity
    from services.worker.engine.adapters.shelf import AdapterShelf
    from services.worker.engine.execution.interface import ProgressReport, Transfers
    from services.worker.engine.execution.pooler import PoolerHead
    from services.worker.engine.host_tier.nixl_agents import NixlAgents
    from services.worker.engine.host_tier.page_form import PageForm
    from services.worker.engine.host_tier.peer_copies import PeerCopies
    from services.worker.engine.host_tier.pool import HostPool
    from services.worker.engine.model.batch import ForwardBatch
    from services.worker.engine.model.decoder import Decoder
    from services.worker.engine.model.kv_pool import KvPool
    from services.worker.engine.model.recurrent import StatePool
    from services.worker.engine.parallel.expert_load import ExpertCounts
    from services.worker.engine.parallel.group import RankGroup
    from services.worker.engine.parallel.pass_calls import QueuedPassCalls
    from services.worker.engine.parallel.stages import PendingTokens
    from services.worker.engine.vision.config import VisionConfig
    from services.worker.engine.vision.encoder import EncoderImage, VisionEncoder


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model read from its files of weights; `fingerprint` is that of `EngineCapacity`."""

    model: Decoder
    head: PoolerHead | None
    adapters: AdapterShelf | None
    vision: VisionEncoder | None
    fingerprint: str


class ModelRunner:
    """One rank's weights, KV pool and forward pass.

    All methods belong to one thread. With several ranks, each must make the same calls in the same order.
    """

    def __init__(  # noqa: PLR0913  (all that a rank has loaded)
        self, model: Decoder, pool: KvPool, capacity: EngineCapacity, group: RankGroup,
        *, activation_dtype: torch.dtype, form: PageForm | None, is_captured: bool = False, hidden_size: int,
        host_pool: HostPool | None = None, head: PoolerHead | None = None, adapters: AdapterShelf | None = None,
        vision: VisionEncoder | None = None, nixl: NixlAgents | None = None, takes_turns: bool = False,
        read_again: Callable[[ModelRunner, ProgressReport], ReadModel],
    ) -> None:  # fmt: skip
        """Take over the loaded model, its pools and its group; `read_again` reads weights that were dropped.

        `form`: where heads lie in a page, for workers of other groups; None: they cannot read any. `nixl`: what reads
        between groups go over, too. `takes_turns`: as in `RunnerOptions`.
        """
        # None: the model has no slots for adapters.
        self.adapters = adapters
        self.capacity = capacity
        self.device = torch.device(capacity.device)
        self.activation_dtype = activation_dtype
        # Of the residual stream.
        self.hidden_size = hidden_size
        # Whether passes are captured: nothing of the model waits for the device, and there is a page for padding.
        self.is_captured = is_captured
        # The model's classification head.
        self.head = head
        # The encoder of images beside the decoder; None: there is none, or it is not to be used.
        self.vision = vision
        self.group = group
        self._read_again = read_again
        self._host_buffers = HostBuffers(keeps=takes_turns)
        # None: dropped while this rank sleeps.
        self._model: Decoder | None = model
        # While this rank sleeps, a shape without memory.
        self._pool = pool
        self._has_pool = True
        self._parked: ParkedTensors | None = None
        self._host_size = (0, 0) if host_pool is None else (host_pool.pages, host_pool.snapshots)
        self.host_pool = host_pool
        self.transfers = None if host_pool is None else make_transfers(pool, host_pool, self.device)
        self._form = form
        self._sharing = find_sharing(self.device)
        self._nixl = nixl
        self.device_pages = self._readable()
        # From memory of other processes to the host tier.
        self.peer_copies = self._copies()
        if host_pool is not None:
            states = capacity.recurrent_states
            states = None if states is None else replace(states, host_snapshots=host_pool.snapshots)
            self.capacity = replace(capacity, host_pages=host_pool.pages, recurrent_states=states)

    @property
    def vision_config(self) -> VisionConfig | None:
        """How the decoder takes images; None: it sees none, or the weights are dropped."""
        return None if self.vision is None else self.vision.config

    @property
    def states(self) -> StatePool | None:
        """States of recurrent layers, if there are any."""
        return self._pool.states

    @property
    def expert_counts(self) -> ExpertCounts | None:
        """The tokens that each expert gets; None without expert parallelism, and while the weights are dropped."""
        if self._model is None or self._model.exchange is None:
            return None if self._model is None else self._model.expert_counts
        return self._model.exchange.counts

    @property
    def pass_calls(self) -> QueuedPassCalls | None:
        """Calls to passes of other groups, which this rank has to join; None unless groups share experts."""
        exchange = None if self._model is None else self._model.exchange
        return None if exchange is None else exchange.group.calls

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory; 0 while they are dropped."""
        held = {}
        for tensor in tensors_of((self._model, self.head, self.vision)):
            if tensor.is_mkldnn:  # has no storage that could be asked
                held[id(tensor)] = tensor.numel() * tensor.element_size()
            else:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(held.values())

    @property
    def pool(self) -> KvPool:
        """The KV pool, which has no memory while this rank sleeps."""
        return self._pool

    @torch.inference_mode()
    def sleep(self, level: SleepLevel, *, keeps_host_pages: bool) -> None:
        """Give back weights and pools; a deeper level may follow. Adapters stay in host memory, and so does the group.

        Level 1 moves weights from a GPU to host memory, and leaves those of a CPU where they are; level 2 drops them.
        """
        if self._has_pool:
            if self.transfers is not None:
                self.transfers.close()
            self._take_back_memory()
            self.transfers = self.peer_copies = None
            if self.device_pages is not None:
                self.device_pages.close()
            self.device_pages = None
            self._pool = shape_of(self._pool)
            self._has_pool = False
        if not keeps_host_pages:
            self.host_pool = None
        if self.adapters is not None:
            self.adapters.reset()
        if level is SleepLevel.DROPPED:
            if self._model is not None:
                self._model.close()
            self._model = self.head = self.vision = self._parked = None
            self._host_buffers.clear()
        elif self._parked is None and self._model is not None:
            self._parked = ParkedTensors((self._model, self.head, self.vision), self._host_buffers)

    @torch.inference_mode()
    def wake_weights(self, report: ProgressReport) -> None:
        """Undo `sleep` for the weights.

        Raises:
            ConfigurationError: the weights were dropped, and their files have changed since.
        """
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        elif self._model is None:
            read = self._read_again(self, report)
            if read.fingerprint != self.capacity.fingerprint:
                raise ConfigurationError("the files of the weights have changed while the model slept")
            self._model, self.head, self.adapters = read.model, read.head, read.adapters
            self.vision = read.vision

    @torch.inference_mode()
    def wake_cache(self) -> None:
        """Undo `sleep` for the pools, which are empty, but for the pages that the host tier has kept."""
        if self._has_pool:
            return
        self._pool = allocate_like(self._pool, self.device)
        self._has_pool = True
        self.device_pages = self._readable()
        if self._host_size[0] and self.host_pool is None:
            self.host_pool = allocate_host_pool(self._pool, *self._host_size)
        self.transfers = None if self.host_pool is None else make_transfers(self._pool, self.host_pool, self.device)
        self.peer_copies = self._copies()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass: store KV of all tokens, return logits of the sampled ones.

        Returns:
            [samples, vocabulary] float32 on the rank that samples, in the order of `batch.sample_indices`;
            [0, vocabulary] elsewhere.
        """
        return self._awake.forward(batch, self._pool).float()

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass without waiting for it; return logits as `forward` does, but in the model's own type."""
        return self._awake.forward(batch, self._pool)

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one pass; return the final hidden states of `batch.sample_indices`, [samples, hidden]."""
        return self._awake.hidden_states(batch, self._pool)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of hidden states [samples, hidden] as `compute` does; all ranks at the same time.

        `adapters` [samples] int32 are the samples' slots, as in `ForwardBatch.adapters`.
        """
        return self._awake.logits(hidden, adapters)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        """Return the embeddings of each image; see `VisionEncoder.encode`. Every rank computes them itself."""
        assert self.vision is not None, "a model without an encoder gets no images"
        return self.vision.encode(images)

    def count_embeddings(self, image: EncoderImage) -> int:
        """Return how many embeddings an image has; see `VisionEncoder.count`."""
        assert self.vision is not None, "a model without an encoder gets no images"
        return self.vision.count(image.shape, image.grid)

    @torch.inference_mode()
    def broadcast_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `token_ids` on every rank of this stage.

        The other ranks pass a tensor of the same shape and type, on `device`; its content is replaced.
        """
        return self.group.broadcast(token_ids)

    @torch.inference_mode()
    def return_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Do the same over the host, and send the tokens to the stages before; see `StageLinks`."""
        return self.group.links.return_tokens(token_ids)

    @torch.inference_mode()
    def join_pass(self, number: int) -> bool:
        """Compute what ranks of other groups need in a pass; return False if this rank has taken part in it already."""
        exchange = self._awake.exchange
        assert exchange is not None, "only groups that share experts call each other"
        return exchange.join_pass(number)

    def expect_tokens(self, shape: tuple[int, int]) -> PendingTokens:
        """Return the tokens that the last stage will return for the pass launched last; see `StageLinks`."""
        return self.group.links.expect_tokens(shape)

    def agree(self, holds: bool) -> bool:
        """Return whether something holds on every rank; all ask at the same time, and wait."""
        return bool(self.group.minimum(int(holds)))

    def close(self) -> None:
        """Leave the group and drop weights and pools."""
        if self.transfers is not None:
            self.transfers.close()
        self._take_back_memory()
        if self.device_pages is not None:
            self.device_pages.close()
        self.transfers = self.host_pool = self.device_pages = self.peer_copies = None
        self.group.close()
        if self._model is not None:
            self._model.close()
        self._model = self.vision = self._parked = None
        self._host_buffers.clear()
        del self._pool

    def _readable(self) -> DevicePages | None:
        return None if self._form is None else DevicePages(self._pool, self._form, self._sharing, self._nixl)

    def _copies(self) -> PeerCopies | NixlCopies | None:
        if self._form is None or self.host_pool is None:
            return None
        mapping = None
        if self._sharing is not None and isinstance(self.transfers, StreamTransfers):
            mapping = make_peer_copies(self.transfers, self._sharing)
        return mapping if self._nixl is None else NixlCopies(self._pool, self.host_pool, self._nixl, mapping)

    def _take_back_memory(self) -> None:
        """Let no read over NIXL arrive any more; none is under way."""
        if isinstance(self.peer_copies, NixlCopies):
            self.peer_copies.close()

    @property
    def _awake(self) -> Decoder:
        assert self._model is not None, "a rank that sleeps runs no passes"
        return self._model


def make_transfers(pool: KvPool, host: HostPool, device: torch.device) -> Transfers:
    """Return the transfers between the KV pool and the host tier for this device."""
    return StreamTransfers(pool, host, device) if device.type == "cuda" else SlicedTransfers(pool, host)
