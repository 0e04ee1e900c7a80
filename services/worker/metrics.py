"""Prometheus metrics of the worker."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_STEP_SECONDS = (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3, 256e-3, 512e-3, 1.0, 2.0, 4.0)
_HOST_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 5e-3, 20e-3)

PASS_COMPUTE_SECONDS = Histogram(
    "pando_worker_pass_compute_seconds", "Time of one forward pass with sampling.", buckets=_STEP_SECONDS
)
PASS_HOST_SECONDS = Histogram(
    "pando_worker_pass_host_seconds", "Bookkeeping of this rank beside one forward pass.", buckets=_HOST_SECONDS
)
TOKENS_TOTAL = Counter("pando_worker_sampled_tokens_total", "Tokens sampled by this rank.")
EXPERT_TOKENS_TOTAL = Counter(
    "pando_worker_expert_tokens_total",
    "Tokens that each expert on this rank has computed, over all layers; with expert parallelism.",
    ["expert"],
)
EXPERT_IMBALANCE = Gauge(
    "pando_worker_expert_imbalance_ratio",
    "Tokens that the busiest rank's experts compute in a layer, over those of the mean rank; with expert parallelism.",
)
JOINED_PASSES_TOTAL = Counter(
    "pando_worker_joined_passes_total",
    "Passes in which this rank had no tokens, but computed experts for other groups; with scheduler.data_parallel.",
)
OPEN_ROWS = Gauge("pando_worker_open_rows", "Row slots in use.")
PLANS_FAILED_TOTAL = Counter("pando_worker_plans_failed_total", "Plans that ended with an error.")
READY = Gauge("pando_worker_ready", "1 while a model is loaded and plans are accepted.")
SLEEPING = Gauge("pando_worker_sleeping", "Level at which the rank sleeps: 1 or 2; 0: it does not.")
SLEEP_FREED_BYTES = Gauge(
    "pando_worker_sleep_freed_bytes", "Memory of the device, or of a CPU's process, that the last sleep has given back."
)
GRAMMARS_TOTAL = Counter("pando_worker_grammars_total", "Grammars that were tried, by outcome.", ["outcome"])
GRAMMAR_COMPILE_SECONDS = Histogram(
    "pando_worker_grammar_compile_seconds",
    "Time to compile and try a grammar that was not there yet.",
    buckets=(1e-3, 4e-3, 16e-3, 64e-3, 0.25, 1.0, 4.0, 16.0),
)
STORAGE_PAGES_TOTAL = Counter(
    "pando_worker_storage_pages_total",
    "Pages of transfers with storage by direction and outcome: done, or why not.",
    ["direction", "outcome"],
)
STORAGE_SNAPSHOTS_TOTAL = Counter(
    "pando_worker_storage_snapshots_total",
    "Snapshots of recurrent states of transfers with storage by direction and outcome: done, or why not.",
    ["direction", "outcome"],
)
ENCODED_IMAGES_TOTAL = Counter(
    "pando_worker_encoded_images_total", "Images that this worker has encoded for the ranks of a group."
)
FETCHED_IMAGES_TOTAL = Counter(
    "pando_worker_fetched_images_total",
    "Images whose embeddings workers that encode gave this rank, by way: copied from their memory, or sent over gRPC.",
    ["way"],
)
PEER_PAGES_TOTAL = Counter(
    "pando_worker_peer_pages_total", "Pages read from workers of other groups, by outcome: done or failed.", ["outcome"]
)
PEER_MAPPED_PAGES_TOTAL = Counter(
    "pando_worker_peer_mapped_pages_total", "Of the pages read from workers of other groups, those copied by GPUs."
)
STORAGE_SECONDS = Histogram("pando_worker_storage_transfer_seconds", "Time of a transfer with storage.", ["direction"])
STORAGE_AVAILABLE = Gauge("pando_worker_storage_available", "0 while the storage is left alone because it fails.")
STORAGE_WRITABLE = Gauge(
    "pando_worker_storage_writable", "0 while nothing is written to the storage because it refuses writes."
)
