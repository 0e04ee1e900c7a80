"""The detokenizer's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

OPEN_CHOICES = Gauge("pando_detokenizer_open_choices", "Choices that are being decoded.")
SUBSCRIBERS = Gauge("pando_detokenizer_subscribers", "Subscribed gateways.")
TOKENS_TOTAL = Counter("pando_detokenizer_tokens_total", "Tokens decoded.")
STOP_HITS_TOTAL = Counter("pando_detokenizer_stop_hits_total", "Choices ended by a stop string or pattern.")
GONE_TOTAL = Counter("pando_detokenizer_gone_total", "Choices whose subscriber was disconnected.")
PUSH_SECONDS = Histogram(
    "pando_detokenizer_push_seconds",
    "Time to process one push.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5),
)
