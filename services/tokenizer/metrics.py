"""Prometheus metrics of the tokenizer."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS_TOTAL = Counter("pando_tokenizer_requests_total", "Requests that gateways submitted.")
REJECTIONS_TOTAL = Counter("pando_tokenizer_rejections_total", "Requests answered with a rejection.", ["code"])
PENDING_REQUESTS = Gauge("pando_tokenizer_pending_requests", "Requests that wait for their admission.")
PROMPT_TOKENS = Histogram(
    "pando_tokenizer_prompt_tokens",
    "Length of admitted prompts.",
    buckets=(16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144),
)
ENCODE_SECONDS = Histogram(
    "pando_tokenizer_encode_seconds",
    "Time to render and encode the prompts of one message, waiting for a thread included.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
)
ROUTED_TOTAL = Counter("pando_tokenizer_routed_requests_total", "Requests by scheduler group.", ["replica"])
STEERED_TOTAL = Counter(
    "pando_tokenizer_steered_requests_total", "Requests that were routed by a prefix that the fleet shares."
)
ROLE_WISHES_TOTAL = Counter(
    "pando_tokenizer_role_wishes_total",
    "Changes of the role of a scheduler group that this tokenizer asked for because of the load, by the new role.",
    ["role"],
)
REPLICA_SERVING = Gauge("pando_tokenizer_replica_serving", "1 while a scheduler group takes requests.", ["replica"])
SCHEDULER_CONNECTED = Gauge("pando_tokenizer_scheduler_connected", "1 while the scheduler can serve.")
IMAGES_TOTAL = Counter(
    "pando_tokenizer_images_total",
    "Images by outcome: prepared, kept from an earlier request, refused, failed by an error of the tokenizer, or the "
    "process that decoded it crashed, took too long, or was abandoned.",
    ["outcome"],
)
IMAGE_SECONDS = Histogram(
    "pando_tokenizer_image_seconds",
    "Time to decode the images of a request and to cut them for the model, waiting for a process included.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
