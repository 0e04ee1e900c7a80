"""Prometheus metrics of the gateway; their names carry units."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from common.tracing import exemplar_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from common.requests import GenerateRequest
    from gateway.ledger.entries import Tokens

# Number of tenants with a label value of their own.
MOST_TENANTS = 100
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """All metrics of the gateway, registered in the given registry."""

    def __init__(self, registry: CollectorRegistry, exposed: CollectorRegistry | None = None) -> None:
        """`exposed` is what readers see of the registry, if it differs."""
        self._exposed = exposed or registry
        self.requests = Counter(
            "pando_gateway_requests_total", "HTTP requests that ended.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "pando_gateway_request_seconds", "HTTP requests, from headers to last byte.", ["route"], registry=registry
        )
        self.open_requests = Gauge(
            "pando_gateway_open_requests", "Prompts that are being continued now.", registry=registry
        )
        self._paces: dict[str, ModelPace] = {}
        registry.register(PaceCollector(self._paces))
        self.prompt_tokens = Counter(
            "pando_gateway_prompt_tokens_total", "Prompt tokens of finished requests.", ["model"], registry=registry
        )
        self.cached_tokens = Counter(
            "pando_gateway_cached_prompt_tokens_total",
            "Prompt tokens of finished requests that were served from the cache.",
            ["model"],
            registry=registry,
        )
        self.aborts = Counter(
            "pando_gateway_aborts_total", "Requests ended before their finish.", ["cause"], registry=registry
        )
        self.refusals = Counter(
            "pando_gateway_refusals_total",
            "Requests refused because of a limit or a missing permission.",
            ["tenant", "cause"],
            registry=registry,
        )
        self._tenants = FewLabels(MOST_TENANTS)
        self.tenant_tokens = Counter(
            "pando_gateway_tenant_tokens_total",
            "Tokens that the ledger has charged: of prompts (prompt), of these from the cache (cached), and of output "
            "(output), of these determined by a grammar (forced) and of accepted drafts (drafted).",
            ["tenant", "kind"],
            registry=registry,
        )
        self.tenant_cached_tokens = Counter(
            "pando_gateway_tenant_cached_tokens_total",
            "Prompt tokens from the cache that the ledger has charged, by tier and level.",
            ["tenant", "tier", "level"],
            registry=registry,
        )
        self.resumptions = Counter(
            "pando_gateway_resumptions_total", "Choices submitted again after a failure.", ["model"], registry=registry
        )
        self.unshared_limits = Counter(
            "pando_gateway_unshared_limits_total",
            "Requests held to this gateway's own limits, as the state that gateways share was away.",
            registry=registry,
        )
        self.connected = Gauge(
            "pando_gateway_link_connected",
            "1 while the stream to a service, or the shared state (link state), is up; "
            "without a model where there is only one.",
            ["link", "model"],
            registry=registry,
        )

    def pace_of(self, model: str) -> ModelPace:
        """Return the counts of a model's tokens."""
        pace = self._paces.get(model)
        if pace is None:
            pace = self._paces[model] = ModelPace()
        return pace

    def refuse(self, tenant: str | None, cause: str) -> None:
        """Count a refused request; the tenant is None without a valid credential."""
        self.refusals.labels("" if tenant is None else self._tenants.of(tenant), cause).inc()

    def charge(self, tenant: str, tokens: Tokens) -> None:
        """Count tokens that the ledger has charged to a tenant."""
        label = self._tenants.of(tenant)
        for kind in ("prompt", "cached", "output", "forced", "drafted"):
            self.tenant_tokens.labels(label, kind).inc(max(getattr(tokens, f"{kind}_tokens"), 0))
        for tier, levels in tokens.cached_by_tier().items():
            for level, amount in levels.items():
                if amount > 0:
                    self.tenant_cached_tokens.labels(label, tier, level).inc(amount)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics, and their media type.

        They are in the Prometheus text format, or in OpenMetrics, which has exemplars, if the header `accept` names it.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self._exposed), media_type


class FewLabels:
    """Limits the number of a label's values: the first ones are kept, and all later ones become OTHER."""

    OTHER = "other"

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def of(self, value: str) -> str:
        """Return the label value for `value`."""
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return self.OTHER
        self._seen.add(value)
        return value


class Times:
    """A histogram of seconds. Unlike Prometheus' own one, it takes no locks: the event loop alone adds to it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Count the values up to each of `bounds`, which rise, and those above all of them."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        # The latest value with an exemplar, by place.
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, seconds: float, exemplar: dict[str, str] | None) -> None:
        """Count a value; `exemplar` are the labels of its trace."""
        place = bisect_left(self._bounds, seconds)
        self._counts[place] += 1
        self._sum += seconds
        if exemplar is not None:
            self._exemplars[place] = Exemplar(exemplar, seconds, time.time())

    def add_to(self, metric: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the counts to a metric."""
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for place, total in enumerate(itertools.accumulate(self._counts)):
            exemplar = self._exemplars.get(place)
            buckets.append((bounds[place], total) if exemplar is None else (bounds[place], total, exemplar))
        metric.add_metric(labels, buckets, self._sum)


class ModelPace:
    """The tokens of one model, and their times."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first_token_seconds = Times(FIRST_TOKEN_BUCKETS_S)
        self.inter_token_seconds = Times(TOKEN_BUCKETS_S)


class PaceCollector(Collector):
    """Exposes the counts of each model's tokens."""

    def __init__(self, paces: Mapping[str, ModelPace]) -> None:
        """Read from `paces`, by the models' names."""
        self._paces = paces

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        first = HistogramMetricFamily(
            "pando_gateway_time_to_first_token_seconds",
            "From the parsed request to the first token of a choice.",
            labels=["model"],
        )
        between = HistogramMetricFamily(
            "pando_gateway_inter_token_latency_seconds",
            "Between two arrivals of tokens of one choice.",
            labels=["model"],
        )
        tokens = CounterMetricFamily(
            "pando_gateway_completion_tokens_total", "Generated tokens received from the pipeline.", labels=["model"]
        )
        # A copy, as metrics are read in another thread.
        for model, pace in list(self._paces.items()):
            pace.first_token_seconds.add_to(first, [model])
            pace.inter_token_seconds.add_to(between, [model])
            tokens.add_metric([model], pace.tokens)
        return first, between, tokens


class Pace:
    """Observes the latency of one request's tokens."""

    def __init__(self, metrics: GatewayMetrics, request: GenerateRequest, clock: Callable[[], float]) -> None:
        """Start now; `clock` is monotonic, in seconds. The request's trace is the exemplar of its times."""
        self._of_model = metrics.pace_of(request.model)
        self._exemplar = exemplar_of(request.options.trace)
        # Lines of batches wait while other requests run, for hours if need be.
        self._has_latency = not request.options.is_batch
        self._clock = clock
        self._started_at = clock()
        self._last_at: dict[int, float] = {}

    def note(self, choice: int, tokens: int) -> None:
        """Record the arrival of `tokens` tokens of `choice`."""
        if not tokens:
            return
        self._of_model.tokens += tokens
        if not self._has_latency:
            return
        now = self._clock()
        last = self._last_at.get(choice)
        if last is None:
            self._of_model.first_token_seconds.observe(now - self._started_at, self._exemplar)
        else:
            self._of_model.inter_token_seconds.observe(now - last, self._exemplar)
        self._last_at[choice] = now
