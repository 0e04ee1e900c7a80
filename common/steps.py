"""The step protocol between scheduler and worker: plans down, results up.

A plan names only what changed. Bookkeeping comes first, in the order closes, opens, replacements, grants; then
transfers begin (`common/transfers.py` has their contract); then come `steps` forward passes. The first pass carries
the prefill chunks and one token of every decoding row, the others only decode. A row decodes once all its ids are
computed, until it stops itself or is closed. A row whose grammar forces tokens on it jumps forward: it gets them behind
the one that it sampled, and computes all of them in its next pass. Every rank runs the same plans in the same order,
so what a pass does never depends on when a message arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.types import FinishReason, Pooling, RequestId, RowSlot, SamplingParams, StepId, TokenIds, TokenLogprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
    from common.transfers import Transfer, TransferAck

# [pages] int32, ids of physical pages of the device tier.
PageIds = TokenIds
NO_PAGES: PageIds = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False
NO_IDS: TokenIds = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A request takes a row slot.

    `token_ids` [tokens] int32 is the prompt, then what was generated before a retraction or resume; its first
    `prompt_tokens` are the prompt. KV of the first `computed_tokens` (< len(token_ids)) is already in `pages`.
    The row ends with LENGTH once prompt and output together count `max_total_tokens`. `stop_token_ids` (end of
    sequence included unless ignored) count only from `min_new_tokens` generated tokens on. With a grammar they count
    always; before that, and those of `postponed_token_ids` always, they are drawn only where nothing else may come.
    """

    row: RowSlot
    request_id: RequestId
    token_ids: TokenIds
    prompt_tokens: int
    computed_tokens: int
    pages: PageIds
    sampling: SamplingParams
    max_total_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    # Set: nothing is generated, the row stops when its last id is computed, and its embedding is reported.
    pooling: Pooling | None = None
    # Its start is at least `computed_tokens`.
    prompt_logprobs: PromptLogprobs | None = None
    # With a window pool, its pages for the last of `pages`; those before are never read.
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)
    postponed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PageGrants:
    """Pages to append to rows' page tables: `rows[i]` gets `pages[i]`, [pages] int32 each.

    A row that gets several is named as often, and gets them in this order. Columns, as a busy server's steps give a
    page each to many rows.
    """

    rows: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    pages: PageIds = field(default_factory=lambda: NO_PAGES)
    # With a window pool, its pages for the same tokens; else none.
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class PageReplacement:
    """Other pages with the same content: the row's page table [first, first + len(pages)) becomes `pages`.

    With a window pool, `window_pages` are its pages for the last of these; those before are never read again.
    """

    row: RowSlot
    first: int
    pages: PageIds
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute KV of the row's token_ids[start, start + length); reaching their end samples the next token."""

    row: RowSlot
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class JumpLimit:
    """How far a row may jump: its grammar may force tokens on it until it knows `max_tokens` ids by the plan's end."""

    row: RowSlot
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One message to every rank. `steps` is the decode lease, at least 1."""

    step_id: StepId
    epoch: int = 0
    closes: tuple[RowSlot, ...] = ()
    opens: tuple[RowOpen, ...] = ()
    grants: PageGrants = field(default_factory=PageGrants)
    prefills: tuple[PrefillChunk, ...] = ()
    steps: int = 1
    replacements: tuple[PageReplacement, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    # Rows that are not named here get one token a pass.
    jumps: tuple[JumpLimit, ...] = ()


@dataclass(frozen=True, slots=True)
class RowStop:
    """A row that stopped itself: STOP or LENGTH, with its last token in the same result.

    ERROR: the rank's memory did not suffice for the row alone. It got no token, and what was to be stored was not.
    """

    row: RowSlot
    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one forward pass sampled: `rows[i]` got `token_ids[i]`, both int32 of equal length.

    `last` marks the plan's final result. Ranks other than 0 send empty arrays, but acknowledge transfers as rank 0
    does. `embeddings` are those of rows that pool and have stopped. `compute_us` is the forward pass with sampling,
    `host_us` the rank's bookkeeping beside it. `error` means the plan failed as a whole.
    """

    step_id: StepId
    substep: int
    last: bool
    rows: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    stops: tuple[RowStop, ...] = ()
    logprobs: tuple[tuple[RowSlot, TokenLogprob], ...] = ()
    compute_us: int = 0
    host_us: int = 0
    error: str | None = None
    # Beside an error: memory did not suffice, and smaller steps may do.
    out_of_memory: bool = False
    acks: tuple[TransferAck, ...] = ()
    embeddings: tuple[tuple[RowSlot, bytes], ...] = ()
    prompt_logprobs: tuple[tuple[RowSlot, PromptLogprobSpan], ...] = ()
    # It brings nothing but `prompt_logprobs`; more results of its pass follow.
    partial: bool = False
    # What rows got behind that without sampling, int32 each; those of a row are neighbours, in their order.
    forced_rows: TokenIds = field(default_factory=lambda: NO_IDS)
    forced_token_ids: TokenIds = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a rank is configured with; see `ConfigureRequest` in protos/pando/v1/worker.proto for each field."""

    model: str
    load_format: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    page_size: int = 16
    max_rows: int = 64
    max_context: int = 0
    max_step_tokens: int = 2048
    device_pages: int | None = None
    memory_fraction: float = 0.85
    host_pages: int | None = None
    host_bytes: int = 0
    window_ratio: float = 0.0
    window_pages: int | None = None
    quantization: str = "auto"


@dataclass(frozen=True, slots=True)
class WindowPool:
    """Pages of the layers that attend to a window only; see `WindowPool` in protos/pando/v1/worker.proto."""

    pages: int
    window_tokens: int
    layers: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What a configured rank can hold; see `WorkerCapacity` in protos/pando/v1/worker.proto for each field."""

    device_pages: int
    page_size: int
    max_context: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    fingerprint: str
    device: str
    layers: int
    host_pages: int = 0
    has_storage: bool = False
    # Rows only embed, keep nothing between passes, need no pages, and are computed in one piece.
    is_encoder: bool = False
    # None: all layers share one pool.
    window_pool: WindowPool | None = None
    # Whether rows jump forward as far as plans let them.
    jumps_forward: bool = False
    # Measured at start-up, so no part of what makes two capacities equal; 0: not measured.
    prefill_tokens_per_s: float = field(default=0.0, compare=False)
    load_bytes_per_s: float = field(default=0.0, compare=False)
