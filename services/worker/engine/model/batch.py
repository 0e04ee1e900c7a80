"""The input of one forward pass: ragged tokens of several rows and where their KV lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from services.worker.engine.plans.passes import HostBatch, IntArray

    # Fills outputs from queries, both of the batch's tokens.
    Attend = Callable[[torch.Tensor, torch.Tensor, "ForwardBatch"], None]


class Deferral(Protocol):
    """Receives calls of piecewise CUDA graphs that run between the graphs: attention, and what is done with images."""

    def __call__(self, attend: Attend, queries: torch.Tensor, outputs: torch.Tensor, *, in_window: bool) -> None:
        """Call `attend` with these tensors and the pass's batch, every time that the pass runs."""


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Tokens [start, stop) of a batch, which continue the recurrent states in `slot`, or begin new ones there."""

    start: int
    stop: int
    slot: int
    begins: bool


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Where the recurrent states of a batch's rows are: of those that decode, and of each chunk of a prompt."""

    decoding: torch.Tensor  # [decode_rows] int32 or int64
    chunks: tuple[StateChunk, ...] = ()

    @classmethod
    def of(cls, host: HostBatch, row_slots: IntArray, on_device: torch.Tensor) -> StateSlots:
        """Return those of a batch whose rows are in `row_slots`, which is also on the device."""
        first = host.decode_rows
        starts, stops = host.query_starts[first:-1].tolist(), host.query_starts[first + 1 :].tolist()
        chunks = tuple(
            StateChunk(start, stop, slot, begins=stop - start == known)
            for start, stop, slot, known in zip(
                starts, stops, row_slots[first:].tolist(), host.key_lengths[first:].tolist(), strict=True
            )
        )
        return cls(on_device[:first], chunks)


class BatchImages(Protocol):
    """Embeddings of images among the tokens of a batch."""

    @property
    def deep_layers(self) -> int:
        """To the outputs of how many of the first layers something is added."""

    def place(self, hidden: torch.Tensor) -> None:
        """Put the embeddings in the places of their tokens in `hidden` [tokens, hidden], those of all tokens."""

    def deepen(self, hidden: torch.Tensor, layer: int) -> None:
        """Add to the outputs [tokens, hidden] of one of the first layers, in place, what belongs there."""


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Those of a pass; see `BatchImages`."""

    places: torch.Tensor  # [placed] int64, ascending
    embeddings: torch.Tensor  # [placed, hidden], of the activations' type
    # What is added to the outputs of the first layers at these places, [placed, hidden] for each of them
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def deep_layers(self) -> int:
        """The number of `deep`."""
        return len(self.deep)

    def place(self, hidden: torch.Tensor) -> None:
        """Put `embeddings` at `places`."""
        hidden.index_copy_(0, self.places, self.embeddings)

    def deepen(self, hidden: torch.Tensor, layer: int) -> None:
        """Add those of a layer at `places`."""
        hidden.index_add_(0, self.places, self.deep[layer])


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """The residual stream at the ends of a stage whose passes are captured; it is received and sent outside of them."""

    entering: torch.Tensor | None  # [tokens, hidden], overwritten by the pass; None in the first stage
    leaving: torch.Tensor | None  # [tokens, hidden], filled by the pass; None in the last stage


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of `rows` sequences, concatenated; all tensors live on the model's device.

    Sequence i owns the tokens in the half-open range [query_starts[i], query_starts[i + 1]). After this pass its KV
    covers key_lengths[i] tokens, of which the last ones are this pass's queries. Sequences that decode (one query
    each) come first, `decode_rows` of them, then those that prefill a chunk.
    """

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, of each token in its sequence, for rotary embedding
    query_starts: torch.Tensor  # [rows + 1] int32
    key_lengths: torch.Tensor  # [rows] int32
    page_table: torch.Tensor  # [rows, max_pages] int32, physical page of each page-sized block; tail entries unused
    write_slots: torch.Tensor  # [tokens] int64, page * page_size + offset at which each token's KV is stored
    sample_indices: torch.Tensor  # [samples] int64, tokens whose hidden state becomes logits
    decode_rows: int
    max_query_length: int
    max_key_length: int
    # [rows] int32, each sequence's row of `page_table`; None: its own index
    table_rows: torch.Tensor | None = None
    host: HostBatch | None = None  # the same in host memory, for kernels whose work is planned there
    # `page_table` and `write_slots` of the layers that attend to a window only; None: they share the others' pool
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    is_in_window: bool = False
    # None: the model has no recurrent layers
    states: StateSlots | None = None
    defer: Deferral | None = None
    # [tokens] int32, the slot of each token's adapter, below 0 for none; None: no token has one
    adapters: torch.Tensor | None = None
    # None: no token of the batch is an image's
    images: BatchImages | None = None
    # [blocks, 4] int32 in host memory, of each picture whose tokens see each other: its row, its tokens [start, stop)
    # in the batch, and how many of the row's keys all of them see; None: every token sees the keys up to its own
    blocks: torch.Tensor | None = None
    # [3, tokens] int64, coordinates of each token in time, height and width, which rotary embedding takes instead of
    # positions; None: the same as the position on each axis
    coordinates: torch.Tensor | None = None
    # [tokens, head_dim] float32, rows of `rotary_table`'s for single tokens; `positions` are their numbers then
    angles: torch.Tensor | None = None
    # called between layers; may raise PassAbandonedError. None: the pass is not abandoned
    checkpoint: Callable[[], None] | None = None
    # None: the pass receives and sends the residual stream itself, where there are several stages
    stage: StageBuffers | None = None

    @property
    def sampled_adapters(self) -> torch.Tensor | None:
        """`adapters` of the samples; the same tensor in a pass that only decodes, which samples every token."""
        if self.adapters is None or self.decode_rows == self.token_ids.shape[0]:
            return self.adapters
        return self.adapters[self.sample_indices]

    def in_window(self) -> ForwardBatch:
        """Return the batch as the layers that attend to a window only have to take it."""
        if self.window_table is None or self.window_slots is None:
            return self
        host = self.host
        if host is not None and host.window_table is not None and host.window_slots is not None:
            host = replace(host, page_table=host.window_table, write_slots=host.window_slots)
        return replace(self, page_table=self.window_table, write_slots=self.window_slots, host=host, is_in_window=True)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.key_lengths.shape[0]
