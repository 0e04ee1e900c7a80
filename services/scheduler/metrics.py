"""Prometheus metrics of the scheduler."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_FINE_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 300e-6, 400e-6, 600e-6, 1e-3, 2e-3, 5e-3, 20e-3, 0.1)
_LONG_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

STEP_CPU_SECONDS = Histogram(
    "pando_scheduler_step_cpu_seconds",
    "CPU time of the scheduler for one step: planning, encoding, taking in the results, pushing text.",
    buckets=_FINE_SECONDS,
)
STEP_COMPUTE_SECONDS = Histogram(
    "pando_scheduler_step_compute_seconds", "Time of one forward pass with sampling, as rank 0 measured it."
)
STEPS_TOTAL = Counter("pando_scheduler_steps_total", "Plans that were carried out.")
WAITING_REQUESTS = Gauge("pando_scheduler_waiting_requests", "Choices that wait for a row.")
RUNNING_ROWS = Gauge("pando_scheduler_running_rows", "Rows in prefill or decode.")
PAGES = Gauge(
    "pando_scheduler_pages", "KV pages by tier and state; the states add up to the capacity.", ["tier", "state"]
)
KV_USAGE_PERCENT = Gauge(
    "pando_scheduler_kv_usage_percent", "Share of the device's KV pages that running requests hold, in percent."
)
PROMPT_TOKENS_TOTAL = Counter("pando_scheduler_prompt_tokens_total", "Prompt tokens of started requests.")
CACHED_TOKENS_TOTAL = Counter("pando_scheduler_cached_tokens_total", "Prompt tokens that the cache held.")
GENERATED_TOKENS_TOTAL = Counter("pando_scheduler_generated_tokens_total", "Sampled tokens.")
QUEUE_SECONDS = Histogram("pando_scheduler_queue_seconds", "Time from arrival to the first prefill.")
RETRACTIONS = Gauge("pando_scheduler_retractions", "Rows that had to give their pages back, since start.")
PREEMPTIONS = Gauge(
    "pando_scheduler_preemptions",
    "Of the retractions, those for waiting requests of higher priority or below their fair share, since start.",
)
WAITING_TENANTS = Gauge(
    "pando_scheduler_waiting_tenants", "Tenants with waiting requests under fair shares, by class.", ["batches"]
)
FAIR_SHARE_GAP = Gauge(
    "pando_scheduler_fair_share_gap_tokens",
    "Most service by which a waiting tenant is ahead of another one, in tokens over its weight, by class.",
    ["batches"],
)
QUARANTINED_TOTAL = Counter(
    "pando_scheduler_quarantined_total", "Choices ended because the engine failed repeatedly while it computed them."
)
JUMPED_TOKENS = Gauge(
    "pando_scheduler_jumped_tokens",
    "Output tokens that grammars forced, so that they took no pass of their own, since start.",
)
DRAFTED_TOKENS = Gauge(
    "pando_scheduler_draft_tokens", "Tokens of drafts that passes have verified (speculative decoding), since start."
)
ACCEPTED_TOKENS = Gauge("pando_scheduler_accepted_draft_tokens", "Those of them that were accepted, since start.")
DRAFTS = Gauge("pando_scheduler_drafts", "Drafts that passes have verified, since start.")
ENCODED_IMAGES = Gauge("pando_scheduler_encoded_images", "Images that plans have had encoded, since start.")
REMOTELY_ENCODED_IMAGES = Gauge(
    "pando_scheduler_remotely_encoded_images",
    "Images that workers which only encode were asked for, since start, by outcome: done or failed.",
    ["outcome"],
)
ENCODERS = Gauge("pando_scheduler_encoders", "Workers that only encode images and serve now.")
REUSED_IMAGES = Gauge(
    "pando_scheduler_reused_images", "Images whose kept embeddings were used instead of encoding them, since start."
)
EVICTED_IMAGES = Gauge(
    "pando_scheduler_evicted_images", "Images whose kept embeddings gave way to those of others, since start."
)
KEPT_EMBEDDINGS = Gauge("pando_scheduler_kept_embeddings", "Embeddings of images that workers keep.")
KEPT_EMBEDDING_BYTES = Gauge("pando_scheduler_kept_embedding_bytes", "Memory that they take on each rank.")
SESSIONS = Gauge("pando_scheduler_sessions", "Open sessions.")
SESSION_TOKENS = Gauge("pando_scheduler_session_tokens", "Tokens of KV that open sessions hold between their turns.")
SESSION_PINS_YIELDED = Gauge(
    "pando_scheduler_session_pins_yielded",
    "How often a session gave up what it held, as otherwise nothing could have run, since start.",
)
WEIGHTS_PAUSE_SECONDS = Histogram(
    "pando_scheduler_weights_pause_seconds",
    "Time in which no request ran while weights were replaced.",
    buckets=_LONG_SECONDS,
)
SLEEPING = Gauge("pando_scheduler_sleeping", "Level at which the workers sleep: 1 or 2; 0: they do not.")
SLEEP_SECONDS = Histogram(
    "pando_scheduler_sleep_seconds",
    "Time to put the workers to sleep, with requests that finish first.",
    buckets=_LONG_SECONDS,
)
WAKE_SECONDS = Histogram("pando_scheduler_wake_seconds", "Time to wake the workers.", buckets=_LONG_SECONDS)
SLEEP_FREED_BYTES = Gauge(
    "pando_scheduler_sleep_freed_bytes", "Memory that the last sleep has given back on all ranks' devices."
)
TURNS_TOTAL = Counter("pando_scheduler_device_turns_total", "Turns on a device that several models share.")
TURN_WAIT_SECONDS = Histogram(
    "pando_scheduler_device_turn_wait_seconds", "Time that the model waited for a turn.", buckets=_LONG_SECONDS
)
TURN_SWITCH_SECONDS = Histogram(
    "pando_scheduler_device_turn_switch_seconds",
    "Time of a turn in which the workers are woken, or put to sleep.",
    buckets=_LONG_SECONDS,
)
LEAKED_PAGES = Gauge("pando_scheduler_leaked_pages", "Leaked pages found and repaired, since start; 0 is right.")
ADMISSIONS_TOTAL = Counter("pando_scheduler_admissions_total", "Submitted requests by outcome.", ["outcome"])
CACHE_EVENTS_TOTAL = Counter(
    "pando_scheduler_cache_events_total",
    "Changes of the prefix cache's tree by kind: inserted, split, promoted, demoted, quarantined, evicted, …",
    ["kind"],
)
CACHE_HIT_TOKENS_TOTAL = Counter(
    "pando_scheduler_cache_hit_tokens_total",
    "Prompt tokens that started requests found, by tier and visibility: public, tenant or private.",
    ["tier", "visibility"],
)
CACHE_PAGES = Gauge(
    "pando_scheduler_cache_pages",
    "Pages that nodes of the cache name, by visibility (public, tenant, private); each node counts its own.",
    ["visibility"],
)
CACHE_MERGED_PAGES = Gauge(
    "pando_scheduler_cache_merged_pages", "Pages that would be needed in addition if no two nodes named the same one."
)
CACHE_NODES = Gauge("pando_scheduler_cache_nodes", "Nodes of the prefix cache's tree.")
CACHE_VIEWS = Gauge("pando_scheduler_cache_principals", "Views that own nodes or snapshots, or have open requests.")
CACHE_EPOCH = Gauge("pando_scheduler_cache_epoch", "The cache's epoch.")
CACHE_OPERATIONS_TOTAL = Counter(
    "pando_scheduler_cache_operations_total", "Calls of the prefix cache by operation.", ["operation"]
)
CACHE_OPERATION_CPU_SECONDS_TOTAL = Counter(
    "pando_scheduler_cache_operation_cpu_seconds_total",
    "CPU time of the cache's operations, estimated from one call in 16.",
    ["operation"],
)
CACHE_EVENTS_LOST_TOTAL = Counter(
    "pando_scheduler_cache_events_lost_total", "Events that watchers were not sent because they did not keep up."
)
CACHE_VIOLATIONS_TOTAL = Counter(
    "pando_scheduler_cache_violations_total",
    "Violated invariants found on sampled paths of the tree and in sampled leases of pages; 0 is right.",
)
CONTENT_CHECK_SECONDS = Histogram(
    "pando_scheduler_content_check_seconds", "Time in which the content check judged one prompt."
)
VERDICTS_TOTAL = Counter(
    "pando_scheduler_content_verdicts_total",
    "Verdicts of the content check: allowed, cut (public only up to a finding), refused, failed (no verdict).",
    ["outcome"],
)
CONTENT_FINDINGS_TOTAL = Counter(
    "pando_scheduler_content_findings_total", "Findings that kept a prompt from becoming public, by rule.", ["rule"]
)
CONTENT_RULES_REFUSED = Gauge(
    "pando_scheduler_content_rules_refused",
    "1 while the file of rules is refused, so that earlier rules are in effect.",
)
STORAGE_MISSES = Gauge(
    "pando_scheduler_storage_misses",
    "Look-ups in storage that did not bring all that was asked for, since start; the workers count them by reason.",
)
STORAGE_UNUSED_PAGES = Gauge(
    "pando_scheduler_storage_unused_pages",
    "Pages read from storage without a snapshot after them, which recurrent layers need, since start.",
)
PREFILL_LEASES = Gauge("pando_scheduler_prefill_leases", "Prompts whose pages other groups may read now.")
REMOTE_PREFILLS_TOTAL = Counter(
    "pando_scheduler_remote_prefills_total",
    "Prompts that another group was asked to compute (asked), those whose missing pages have all arrived (fetched), and"
    " those computed here after all (failed).",
    ["outcome"],
)
REMOTE_PREFILL_TRANSFER_SECONDS_TOTAL = Counter(
    "pando_scheduler_remote_prefill_transfer_seconds_total",
    "Time from the start of transfers of fetched prompts' pages to their acknowledgement, added up over transfers; a"
    " prompt has one at a time.",
)
REMOTE_PREFILL_EXPOSED_SECONDS_TOTAL = Counter(
    "pando_scheduler_remote_prefill_exposed_seconds_total",
    "Time in which fetched prompts that the other group had computed waited for their last page. The share of the"
    " transfers' time that is hidden behind the computation is one minus this time divided by that of the transfers.",
)
REMOTE_PREFILL_MIN_TOKENS = Gauge(
    "pando_scheduler_remote_prefill_min_tokens",
    "Missing tokens of a prompt from which on another group is asked to compute it, as measured or as configured; of"
    " prompts with images, any number. Updated with each prompt for which the tokenizer names such a group.",
)
TRANSFERS_TOTAL = Counter(
    "pando_scheduler_transfers_total", "Transfers between the tiers that all ranks have finished.", ["direction"]
)
TRANSFER_BYTES_TOTAL = Counter(
    "pando_scheduler_transfer_bytes_total", "Bytes that each rank has moved between the tiers.", ["direction"]
)
TRANSFER_SECONDS_TOTAL = Counter(
    "pando_scheduler_transfer_seconds_total",
    "Time of the copies between the tiers, on the slowest rank.",
    ["direction"],
)
TRANSFERS_OPEN = Gauge("pando_scheduler_transfers_open", "Transfers that not all ranks have finished.")
LOAD_SKIPPED_TOKENS_TOTAL = Counter(
    "pando_scheduler_load_skipped_tokens_total",
    "Tokens that were computed although the host had them, as that was faster than loading.",
)
STORAGE_SKIPPED_TOKENS_TOTAL = Counter(
    "pando_scheduler_storage_skipped_tokens_total",
    "Tokens that were not looked up in storage, as computing them was faster than reading.",
)
DEFECTS_TOTAL = Counter(
    "pando_scheduler_defects_total",
    "Unexpected exceptions, by the part of the scheduler whose work has begun again; the log has each.",
    ["part"],
)
FLEET_CONNECTED = Gauge(
    "pando_scheduler_fleet_connected",
    "1 while evidence is counted together with the other groups; 0 also without fleet.state.",
)
CACHE_INFO = Gauge(
    "pando_scheduler_cache_info", "1 for the cache's tokens per page and its pages.", ["page_size", "device_pages"]
)
WEIGHTS_INFO = Gauge(
    "pando_scheduler_weights_info", "1 for the weights that serve, by the name that responses show.", ["weight_version"]
)
WEIGHT_UPDATES_TOTAL = Counter(
    "pando_scheduler_weight_updates_total", "Updates of the weights: replaced, or failed.", ["outcome"]
)
ROLE = Gauge(
    "pando_scheduler_role",
    "1 for what this group does with prompts: both, prefill or decode; 0 for the others.",
    ["role"],
)
ROLE_CHANGES_TOTAL = Counter(
    "pando_scheduler_role_changes_total",
    "Changes of this group's role, by the new role and the cause: asked (an operator), or load.",
    ["role", "cause"],
)
GROUP_READY = Gauge("pando_scheduler_worker_group_ready", "1 while all ranks carry out plans.")
