"""What the detokenizer tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPEN_CHOICES = Gauge("pando_detokenizer_open_choices", "Choices that are being decoded.")
SUBSCRIBERS = Gauge("pando_detokenizer_subscribers", "Gateways that listen.")
TOKENS_TOTAL = Counter("pando_detokenizer_tokens_total", "Tokens decoded.")
STOP_HITS_TOTAL = Counter("pando_detokenizer_stop_hits_total", "Choices ended by a stop string.")
GONE_TOTAL = Counter("pando_detokenizer_gone_total", "Choices whose subscriber was away.")
PUSH_SECONDS = Histogram(
    "pando_detokenizer_push_seconds",
    "Time to work through one push.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5),
)
