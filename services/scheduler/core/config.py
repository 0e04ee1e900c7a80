"""Configuration of the scheduler core; `resolve_core` derives it from the settings and the workers' capacity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.errors import ConfigurationError
from common.logs import get_logger
from services.scheduler.cache.keys import ID_BITS, TAGGED_TOKENS
from services.scheduler.core.session import SessionRules
from services.scheduler.core.step_limits import LEAST_TOKENS, VisionLimits

if TYPE_CHECKING:
    from common.settings import SchedulerSettings, SessionSettings, SpeculationSettings
    from common.steps import EngineCapacity
    from common.types import Pooling


# Share of all sessions, and of their pages, that one tenant may have, so that some are left to others.
TENANT_SHARE = 0.75
# Longest timeout that a client may choose for a session, unless the operator's default is longer.
MAX_SESSION_TIMEOUT_S = 3600.0
# Target duration of a plan while no request waits: it determines the steps of a plan (multi-step decode), and a request
# that arrives waits about as long for its first step.
TARGET_PLAN_S = 0.008
# Jump-forward: tokens that a grammar determines and that one pass may compute; their pages are granted in advance.
JUMP_TOKENS = 16
# With policy priority: how often a running request may be preempted by a waiting one of higher priority.
MAX_PREEMPTIONS = 2


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits of one scheduler. Lengths are in tokens, times in seconds."""

    page_size: int
    device_pages: int
    max_rows: int
    max_step_tokens: int
    max_context: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    max_waiting: int
    waiting_timeout_s: float
    running_timeout_s: float
    # Multi-step decode: the target duration of a plan while no request waits, and the maximum of its steps.
    target_plan_s: float
    max_steps_per_plan: int
    # Maximum prompt tokens beside decoding rows while few requests wait; None: as many as fit.
    mixed_step_tokens: int | None = None
    mixed_step_share: float = 0.5
    # Seconds after the last interactive sequence in which those of batches do not run.
    batch_pause_s: float = 0.0
    # Whether the workers abandon passes of batches when other sequences come, and leave out passes that decode when
    # prompts come.
    abandons_passes: bool = False
    # Costs of loading from the host and of recomputing, calibrated at start-up; 0: not measured.
    kv_bytes_per_token: int = 0
    prefill_tokens_per_s: float = 0.0
    load_bytes_per_s: float = 0.0
    # Maximum jump-forward tokens of a row beyond its planned ones; 0: jump-forward is off, each pass yields one token.
    jump_tokens: int = 0
    # Maximum tokens of a row's draft; 0: speculative decoding is off.
    draft_tokens: int = 0
    # An encoder: sequences do not generate, need no pages, and are computed in one piece.
    is_encoder: bool = False
    # The model's classification head: all sequences have this pooling.
    head: Pooling | None = None
    # Sequences do not generate.
    only_pools: bool = False
    # Requests may have images.
    sees_images: bool = False
    # Whether the policy orders retracted sequences, too, and how often a row may be preempted for a higher priority.
    strict_priority: bool = False
    max_preemptions: int = 0
    sessions: SessionRules = field(default_factory=SessionRules)
    # Adapters that rows may use at the same time, and the share of these places that one tenant's rows may use.
    adapter_slots: int = 0
    adapter_share: float = 1.0
    # Parts of the rows that decode in turn, so that each stage of a pipeline has one to compute.
    micro_batches: int = 1
    vision: VisionLimits = field(default_factory=VisionLimits)

    @property
    def plans_in_flight(self) -> int:
        """Plans that are sent before the results of the first one are known: one waits, the others are computed."""
        return self.micro_batches + 1

    @property
    def least_step_tokens(self) -> int:
        """Tokens that the smallest steps must have room for."""
        if self.is_encoder:
            return self.max_context
        return max(LEAST_TOKENS, self.max_rows + self.vision.block) if self.vision.block else LEAST_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the device can hold alone, in tokens."""
        return self.max_context if self.is_encoder else self.device_pages * self.page_size


def resolve_core(settings: SchedulerSettings, capacity: EngineCapacity, first_output: int = 1) -> CoreConfig:
    """Combine settings with the workers' capacity.

    Outputs of the vision encoder are numbered from `first_output` on. It should be random: ranks may still read
    embeddings for a scheduler that was cut off from them, under a number of its own.

    Raises:
        ConfigurationError: the settings contradict each other.
    """
    if settings.max_step_tokens < settings.max_rows:
        raise ConfigurationError(
            f"scheduler.max_step_tokens ({settings.max_step_tokens}) must be at least scheduler.max_rows "
            f"({settings.max_rows}): a step carries one token of every running row"
        )
    if settings.adapters.slots and (capacity.page_size < TAGGED_TOKENS or capacity.vocabulary_size > 1 << ID_BITS):
        raise ConfigurationError(
            f"scheduler.adapters.slots: adapters need pages of at least {TAGGED_TOKENS} tokens (scheduler.page_size) "
            f"and a vocabulary of at most {1 << ID_BITS} tokens"
        )
    if capacity.image_block and settings.max_step_tokens < settings.max_rows + capacity.image_block:
        raise ConfigurationError(
            f"scheduler.max_step_tokens ({settings.max_step_tokens}) must be at least scheduler.max_rows "
            f"({settings.max_rows}) and {capacity.image_block}: the tokens of an image of this model attend to each "
            "other, so that a step has to carry all of them beside one token of every running row; or set "
            "model.images = off"
        )
    stages, draft_tokens = settings.pipeline_parallel, _draft_tokens(settings.speculation, capacity)
    return CoreConfig(
        page_size=capacity.page_size,
        device_pages=capacity.device_pages,
        max_rows=settings.max_rows,
        max_step_tokens=settings.max_step_tokens,
        mixed_step_tokens=settings.mixed_step_tokens,
        mixed_step_share=settings.mixed_step_share,
        batch_pause_s=settings.queue.batch_pause_s,
        abandons_passes=capacity.abandons_passes,
        max_context=capacity.max_context,
        vocabulary_size=capacity.vocabulary_size,
        eos_token_ids=capacity.eos_token_ids,
        max_waiting=settings.queue.max_waiting_requests,
        waiting_timeout_s=settings.waiting_timeout_s,
        running_timeout_s=settings.running_timeout_s,
        target_plan_s=TARGET_PLAN_S,
        # Every step waits for the last stage, while the others could compute other rows.
        max_steps_per_plan=settings.max_steps_per_plan if stages == 1 else 1,
        kv_bytes_per_token=capacity.kv_bytes_per_token,
        prefill_tokens_per_s=capacity.prefill_tokens_per_s,
        load_bytes_per_s=capacity.load_bytes_per_s,
        is_encoder=capacity.is_encoder,
        head=capacity.head,
        only_pools=capacity.only_pools,
        sees_images=capacity.sees_images,
        jump_tokens=JUMP_TOKENS if capacity.jumps_forward else 0,
        draft_tokens=draft_tokens,
        strict_priority=settings.queue.policy == "priority",
        sessions=_session_rules(settings.sessions, capacity),
        adapter_slots=settings.adapters.slots,
        adapter_share=settings.adapters.tenant_share,
        # A plan with drafts has the workers for itself, so all rows take part in it.
        micro_batches=1 if draft_tokens else min(stages, settings.max_rows),
        vision=VisionLimits(
            settings.vision.step_embeddings,
            settings.vision.kept_embeddings,
            settings.vision.open_bytes,
            capacity.image_block,
            first_output,
        ),
        max_preemptions=MAX_PREEMPTIONS if settings.queue.policy == "priority" else 0,
    )


def _draft_tokens(settings: SpeculationSettings, capacity: EngineCapacity) -> int:
    if settings.method == "off" or capacity.is_encoder or capacity.only_pools:
        return 0
    if not capacity.verifies_drafts:
        get_logger("core").warning("speculation.off", method=settings.method, reason="recurrent layers")
        return 0
    return settings.num_speculative_tokens


def _session_rules(settings: SessionSettings, capacity: EngineCapacity) -> SessionRules:
    def tokens(share: float) -> int:
        return int(capacity.device_pages * share) * capacity.page_size

    return SessionRules(
        per_subject=settings.limit,
        # Of a single session, three quarters would be none.
        per_tenant=max(int(settings.limit_total * TENANT_SHARE), min(settings.limit_total, 1)),
        total=settings.limit_total,
        subject_tokens=tokens(settings.share),
        tenant_tokens=tokens(settings.share_total * TENANT_SHARE),
        total_tokens=tokens(settings.share_total),
        timeout_s=settings.timeout_s,
        max_timeout_s=max(settings.timeout_s, MAX_SESSION_TIMEOUT_S),
    )
