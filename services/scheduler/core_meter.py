"""State of a core, exported to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.tracing import exemplar_of
from services.scheduler import metrics
from services.scheduler.cache_meter import TierMeter

if TYPE_CHECKING:
    from common.steps import EngineCapacity, StepPlan
    from services.scheduler.cache_meter import CacheMeter
    from services.scheduler.core.core import SchedulerCore
    from services.scheduler.core.image_work import ImageWork


class CoreMeter:
    """Exports one core's queue, rows, images, sessions and cache, and counts what starts."""

    def __init__(self, core: SchedulerCore, cache_meter: CacheMeter, capacity: EngineCapacity) -> None:
        """Start with nothing exported; `capacity` is that of the workers."""
        self._core = core
        self._cache_meter = cache_meter
        self._tier_meter = TierMeter(capacity.kv_bytes_per_token * core.config.page_size)
        self._embedding_bytes = capacity.embedding_bytes

    def export(self) -> None:
        """Update the Prometheus metrics."""
        core = self._core
        metrics.WAITING_REQUESTS.set(len(core.queue))
        metrics.RUNNING_ROWS.set(core.rows.running)
        metrics.RETRACTIONS.set(core.memory.retractions)
        metrics.PREEMPTIONS.set(core.preemptions)
        metrics.JUMPED_TOKENS.set(core.jumped_tokens)
        metrics.DRAFTS.set(core.speculation.drafts)
        metrics.DRAFTED_TOKENS.set(core.speculation.drafted_tokens)
        metrics.ACCEPTED_TOKENS.set(core.speculation.accepted_tokens)
        self._export_images(core.memory.images)
        metrics.SESSIONS.set(len(core.sessions))
        metrics.SESSION_TOKENS.set(core.sessions.pinned_tokens)
        metrics.SESSION_PINS_YIELDED.set(core.sessions.yielded)
        for batches, counters in zip(("no", "yes"), core.counters, strict=True):
            if counters is not None:
                metrics.WAITING_TENANTS.labels(batches).set(counters.waiting_tenants)
                metrics.FAIR_SHARE_GAP.labels(batches).set(counters.gap)
        metrics.LEAKED_PAGES.set(core.memory.leaked_pages)
        self._cache_meter.export(core.memory.cache)
        if core.memory.loads is not None:
            self._tier_meter.export(core.memory.loads)

    def note_starts(self, plan: StepPlan) -> None:
        """Count the sequences that start with a plan: prompts, what was cached of them, and how long they waited."""
        for opened in plan.opens:
            sequence = self._core.rows.sequences[opened.row]
            if sequence is None or sequence.retractions or sequence.started_at is None:
                continue
            metrics.PROMPT_TOKENS_TOTAL.inc(sequence.prompt_tokens)
            metrics.CACHED_TOKENS_TOTAL.inc(sequence.cached_tokens or 0)
            if not sequence.is_batch:
                exemplar = exemplar_of(sequence.request.options.trace)
                metrics.QUEUE_SECONDS.observe(sequence.started_at - sequence.arrived_at, exemplar)
            if sequence.lock is not None:
                self._cache_meter.note_start(sequence, sequence.lock)

    def _export_images(self, images: ImageWork) -> None:
        encodings, outputs = images.encodings, images.outputs
        metrics.ENCODED_IMAGES.set(images.encoded_images)
        metrics.REMOTELY_ENCODED_IMAGES.labels("done").set(encodings.encoded_images)
        metrics.REMOTELY_ENCODED_IMAGES.labels("failed").set(encodings.failed_images)
        metrics.REUSED_IMAGES.set(images.reused_images)
        metrics.EVICTED_IMAGES.set(outputs.evicted)
        metrics.KEPT_EMBEDDINGS.set(outputs.embeddings)
        metrics.KEPT_EMBEDDING_BYTES.set(outputs.embeddings * self._embedding_bytes)
