"""The step protocol between scheduler and worker: plans down, results up.

A plan contains only changes. A worker first applies closes, opens, replacements and grants, in this order; then it
starts transfers (see `common/transfers.py` for their contract); then it runs `steps` forward passes. The first pass
computes the prefill chunks and one token of every decoding row; the others only decode. A row decodes once all its ids
are computed, until it stops itself or is closed. When a row's grammar determines the next tokens, the row jumps
forward: they are appended after the sampled token, and the next pass computes all of them. A plan may carry drafts of
rows' next tokens (speculative decoding): its first pass computes them as well and samples after each, and a row keeps
sampled tokens up to the first that differs from its draft. Every rank runs the same plans in the same order, so the
result of a pass never depends on when a message arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import numpy as np

from common.types import (
    AdapterSlot,
    EncoderOutputId,
    FinishReason,
    Pooling,
    RequestId,
    RowImage,
    RowSlot,
    SamplingParams,
    SnapshotSlot,
    StepId,
    TokenIds,
    TokenLogprob,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from common.prompt_logprobs import PromptLogprobs, PromptLogprobSpan
    from common.transfers import Transfer, TransferAck
    from common.types import TraceContext

# [pages] int32, ids of physical pages of the device tier.
PageIds = TokenIds
NO_PAGES: PageIds = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False
NO_IDS: TokenIds = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class RowOpen:
    """Assignment of a choice to a row slot.

    `token_ids` [tokens] int32 are the `prompt_tokens` ids of the prompt, then those generated before a retraction or
    resume. KV of the first `computed_tokens` (< len(token_ids)) is already in `pages`. The row ends with LENGTH once
    prompt and output together reach `max_total_tokens`. `stop_token_ids` (with the end of sequence unless it is
    ignored) take effect after `min_new_tokens` generated tokens. With a grammar they always take effect, but before
    that they are sampled only if the grammar allows no other token; so are `postponed_token_ids` at any time.
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
    # If set, nothing is generated: the row stops when its last id is computed, and its result is reported.
    pooling: Pooling | None = None
    # `prompt_logprobs.start` is at least `computed_tokens`.
    prompt_logprobs: PromptLogprobs | None = None
    # With a sliding-window pool: its pages for the last of `pages`; earlier pages are never read.
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)
    postponed_token_ids: tuple[int, ...] = ()
    # See `ScheduleRequest.second_text_start`.
    second_text_start: int | None = None
    # With recurrent layers: where their states after `computed_tokens` tokens are; None: there are none of these.
    snapshot: SnapshotSlot | None = None
    # Where the row's adapter is; None: the base model.
    adapter: AdapterSlot | None = None
    # Only of a sampled trace.
    trace: TraceContext | None = None
    # In the order of their offsets.
    images: tuple[RowImage, ...] = ()
    # Set by the worker: added to the positions of tokens after these, as images may take fewer positions than tokens.
    position_offset: int = 0


@dataclass(frozen=True, slots=True)
class PageGrants:
    """Pages to append to rows' page tables: `rows[i]` gets `pages[i]`, [pages] int32 each.

    A row that gets several pages occurs several times; its pages are appended in this order. The grants are stored in
    columns because a busy server's steps grant one page each to many rows.
    """

    rows: NDArray[np.int32] = field(default_factory=lambda: NO_PAGES)
    pages: PageIds = field(default_factory=lambda: NO_PAGES)
    # With a sliding-window pool: its pages for the same tokens; otherwise empty.
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class PageReplacement:
    """Replacement of pages by others with equal content: the page table [first, first + len(pages)) becomes `pages`.

    With a sliding-window pool, `window_pages` are its pages for the last of these; earlier ones are never read again.
    """

    row: RowSlot
    first: int
    pages: PageIds
    window_pages: PageIds = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Computation of the KV of the row's token_ids[start, start + length); after the last id, a token is sampled."""

    row: RowSlot
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class JumpLimit:
    """The bound of a row's jump-forward: it may hold at most `max_tokens` ids at the end of the plan."""

    row: RowSlot
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Guess of a decoding row's next tokens, [tokens] int32, for the first pass of a plan.

    The row's pages hold them, and they leave room for the token that is sampled after the last of them.
    """

    row: RowSlot
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class StateSave:
    """A copy of a row's recurrent states to a snapshot, after the pass in which `tokens` of its tokens are computed.

    It is dropped at the end of the plan if the row stopped before that.
    """

    row: RowSlot
    tokens: int
    snapshot: SnapshotSlot


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The adapter of a slot from the next pass on; no open row uses what the slot had before."""

    slot: AdapterSlot
    digest: str


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows whose slot modulo `count` is `index`: those that decode in the same passes. The default is all rows."""

    index: int = 0
    count: int = 1

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of `rows` that belong to it."""
        return rows if self.count == 1 else rows[rows % self.count == self.index]


ALL_ROWS = MicroBatch()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One plan, sent to every rank. `steps` is the number of forward passes, at least 1."""

    step_id: StepId
    epoch: int = 0
    closes: tuple[RowSlot, ...] = ()
    opens: tuple[RowOpen, ...] = ()
    grants: PageGrants = field(default_factory=PageGrants)
    prefills: tuple[PrefillChunk, ...] = ()
    steps: int = 1
    replacements: tuple[PageReplacement, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    # Rows that are not named here get one token per pass.
    jumps: tuple[JumpLimit, ...] = ()
    saves: tuple[StateSave, ...] = ()
    adapters: tuple[AdapterLoad, ...] = ()
    drafts: tuple[Draft, ...] = ()
    # All rows are of batches, and a later plan without this closes all of them: the passes may be abandoned for it.
    can_abandon: bool = False
    # Open rows decode, and nothing else: the passes that have not begun are left out for a later plan with prompts.
    can_shorten: bool = False
    # The decoding rows that take part in the passes.
    micro_batch: MicroBatch = ALL_ROWS
    # Outputs of the vision encoder that the worker keeps no longer. Rows that were opened with them do not lose them.
    dropped_outputs: tuple[EncoderOutputId, ...] = ()

    def without_passes(self) -> StepPlan:
        """Return the rest of a plan whose passes are abandoned: rows still change, and transfers still begin."""
        return replace(self, prefills=(), steps=1, replacements=(), jumps=(), saves=(), drafts=())


@dataclass(frozen=True, slots=True)
class RowStop:
    """A row that stopped itself: with STOP or LENGTH, its last token is in the same result.

    With ERROR, the rank has too little memory for this row alone; no token was sampled and no KV was stored.
    """

    row: RowSlot
    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one forward pass: it sampled `token_ids[i]` for `rows[i]`, both int32 of equal length.

    `last` marks the plan's final result. Ranks other than the one that samples send empty arrays, but acknowledge
    transfers as it does.

    `logprobs` has one entry for each token of the rows that report them, in the order of each row's tokens: the
    sampled one, then accepted ones. `embeddings` are the results of pooling rows that stopped. `compute_us` is the time
    of the forward pass and sampling, `host_us` the rank's bookkeeping time, both in microseconds. `error` is set if the
    whole plan failed.
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
    # Set along with `error`: memory was exhausted, so smaller steps may succeed.
    out_of_memory: bool = False
    acks: tuple[TransferAck, ...] = ()
    embeddings: tuple[tuple[RowSlot, bytes], ...] = ()
    prompt_logprobs: tuple[tuple[RowSlot, PromptLogprobSpan], ...] = ()
    # The result has only `prompt_logprobs`; more results of the same pass follow.
    partial: bool = False
    # Tokens sampled after those in `token_ids`, as the row's draft was right so far; a row's are adjacent, in order.
    accepted_rows: TokenIds = field(default_factory=lambda: NO_IDS)
    accepted_token_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    # Tokens that were appended after these by jump-forward; the tokens of a row are adjacent, in order.
    forced_rows: TokenIds = field(default_factory=lambda: NO_IDS)
    forced_token_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    # The pass and those after it were abandoned (`StepPlan.can_abandon`), or left out (`StepPlan.can_shorten`): no row
    # has advanced in them.
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens that the experts of this rank have computed since the model was loaded, over the layers of its stage.

    `tokens[i]` are those of expert `first + i`. `imbalance` is the number of tokens of the busiest rank of each layer,
    which the others wait for, over that of the mean rank: 1 if all compute as many.
    """

    first: int
    tokens: tuple[int, ...]
    imbalance: float


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Configuration of a rank; see `ConfigureRequest` in protos/pando/v1/worker.proto for each field."""

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
    classifier_from_token: tuple[str, ...] = ()
    snapshots: int | None = None
    host_snapshots: int | None = None
    rope_parameters: str = ""
    adapter_slots: int = 0
    # Whether adapters may change experts on a GPU.
    adapter_experts: bool = False
    # Whether the model's vision encoder is loaded, too, if it has one that is supported.
    vision: bool = False
    # Whether only the vision encoder is loaded, and no plans run.
    only_encodes: bool = False
    # Embeddings that are kept as outputs of the vision encoder (`RowImage.output`), at most.
    kept_embeddings: int = 0
    # Whether what a row gets must be the same to the last bit in every batch.
    deterministic: bool = False
    # Stages of the pipeline, each with some of the layers and as many ranks.
    stages: int = 1
    # Whether a rank has some experts as a whole, instead of some columns of every expert.
    expert_parallel: bool = False
    # Scheduler groups that distribute the experts over their ranks, and the number of this rank's group among them.
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    # host:port of the first group's rank, where their ranks meet.
    data_parallel_rendezvous: str = ""
    # Names of the weights, which do not change what is loaded.
    weight_version: str = field(default="", compare=False)
    base_model: str = field(default="", compare=False)
    # Whether an earlier configuration has chosen these numbers of pages, which the settings leave open.
    chosen_device_pages: bool = field(default=False, compare=False)
    chosen_host_pages: bool = field(default=False, compare=False)
    # Whether the files are read even if the model is loaded.
    reload_weights: bool = field(default=False, compare=False)

    @property
    def tensor_ranks(self) -> int:
        """The ranks of a stage, which share its layers."""
        return self.world_size // self.stages

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.rank // self.tensor_ranks

    @property
    def tensor_rank(self) -> int:
        """The number of this rank in its stage."""
        return self.rank % self.tensor_ranks

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return self.stage == self.stages - 1

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in this rank's passes."""
        return self.world_size == 1 and self.data_parallel_size == 1

    @property
    def has_whole_experts(self) -> bool:
        """Whether a rank has some experts as a whole, instead of some columns of every expert."""
        return self.expert_parallel or self.data_parallel_size > 1

    @property
    def samples(self) -> bool:
        """Whether this rank samples and reports tokens: the first one of the last stage."""
        return self.rank == sampling_rank(self.world_size, self.stages)


def sampling_rank(world_size: int, stages: int) -> int:
    """Return the rank that samples: the first one of the last stage."""
    return world_size - world_size // stages


class SleepLevel(IntEnum):
    """Where a rank's weights are while it sleeps; its KV memory is freed in any case."""

    HOST = 1
    """They move to host memory; those of a CPU stay where they are."""
    DROPPED = 2
    """They are dropped, and read again when the rank wakes."""


class SleepPart(StrEnum):
    """Parts of memory that a sleeping rank has freed, by vLLM's names."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The pool of pages for sliding-window layers; see `WindowPool` in protos/pando/v1/worker.proto."""

    pages: int
    window_tokens: int
    layers: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """The memory of recurrent layers; see `RecurrentStates` in protos/pando/v1/worker.proto."""

    snapshots: int
    row_bytes: int
    host_snapshots: int = 0


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Capacity of a configured rank; see `WorkerCapacity` in protos/pando/v1/worker.proto for each field."""

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
    # Rows only produce embeddings, keep no KV between passes, need no pages, and are computed in one chunk.
    is_encoder: bool = False
    # None: all layers share one pool.
    window_pool: WindowPool | None = None
    # None: there are no recurrent layers.
    recurrent_states: RecurrentStates | None = None
    # Whether the rank supports jump-forward.
    jumps_forward: bool = False
    # Whether the rank verifies drafts.
    verifies_drafts: bool = False
    # Whether the rank abandons passes of plans with `can_abandon`, and leaves out those of plans with `can_shorten`.
    abandons_passes: bool = False
    # Outputs of the classification head that the model has; rows have this pooling.
    head: Pooling | None = None
    # Rows do not generate.
    only_pools: bool = False
    # Rows may have images.
    sees_images: bool = False
    # Bytes of one embedding of an image that is kept; 0: rows have no images.
    embedding_bytes: int = 0
    # Tokens of an image that see each other, and so belong in one chunk; 0: chunks may cut images anywhere.
    image_block: int = 0
    # Of what decides about embeddings; replaced with the weights, hence not compared.
    encoder_identity: str = field(default="", compare=False)
    # Other than the fingerprint, the same for any number of ranks; replaced with the weights, hence not compared.
    kv_identity: str = field(default="", compare=False)
    # Measured at start-up, hence not compared; 0: not measured.
    prefill_tokens_per_s: float = field(default=0.0, compare=False)
    load_bytes_per_s: float = field(default=0.0, compare=False)
    # Of compiled operators on CPUs, own or onednn; measured, too.
    products: str = field(default="", compare=False)

    @property
    def pages_per_snapshot(self) -> int:
        """Pages that take at least as much memory as a snapshot of recurrent states, and so the distance of snapshots.

        1 without recurrent layers.
        """
        if self.recurrent_states is None:
            return 1
        return -(-self.recurrent_states.row_bytes // max(self.kv_bytes_per_token * self.page_size, 1))
