"""Pando's metrics under the names that vLLM gives them, for dashboards, autoscalers and routers made for vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.registry import RestrictedRegistry

    from common.settings import Settings


@dataclass(frozen=True, slots=True)
class VllmName:
    """A metric's name, without the suffix of a counter, and how its samples differ.

    `labels` are renamed, values multiplied by `scale`. `kind` is the type if it is another one.
    """

    name: str
    scale: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None


_MODEL = {"model": "model_name"}
# By the names in `services/scheduler/metrics.py` and `gateway/metrics.py`.
NAMES: dict[str, tuple[VllmName, ...]] = {
    "pando_scheduler_waiting_requests": (VllmName("vllm:num_requests_waiting"),),
    "pando_scheduler_running_rows": (VllmName("vllm:num_requests_running"),),
    "pando_scheduler_kv_usage_percent": (VllmName("vllm:kv_cache_usage_perc", scale=0.01),),
    "pando_scheduler_retractions": (VllmName("vllm:num_preemptions", kind="counter"),),
    "pando_scheduler_drafts": (VllmName("vllm:spec_decode_num_drafts", kind="counter"),),
    "pando_scheduler_draft_tokens": (VllmName("vllm:spec_decode_num_draft_tokens", kind="counter"),),
    "pando_scheduler_accepted_draft_tokens": (VllmName("vllm:spec_decode_num_accepted_tokens", kind="counter"),),
    # vLLM counts tokens here, too.
    "pando_scheduler_prompt_tokens": (VllmName("vllm:prompt_tokens"), VllmName("vllm:prefix_cache_queries")),
    "pando_scheduler_cached_tokens": (VllmName("vllm:prefix_cache_hits"),),
    "pando_scheduler_generated_tokens": (VllmName("vllm:generation_tokens"),),
    "pando_scheduler_queue_seconds": (VllmName("vllm:request_queue_time_seconds"),),
    "pando_scheduler_cache_info": (
        VllmName("vllm:cache_config_info", labels={"page_size": "block_size", "device_pages": "num_gpu_blocks"}),
    ),
    "pando_gateway_time_to_first_token_seconds": (VllmName("vllm:time_to_first_token_seconds", labels=_MODEL),),
    "pando_gateway_inter_token_latency_seconds": (VllmName("vllm:inter_token_latency_seconds", labels=_MODEL),),
}


class VllmNames(Collector):
    """Yields the metrics of `registry` that vLLM has, too."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        """`model` is the name of metrics that have no label for it."""
        self._registry = registry
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield them under vLLM's names, with vLLM's labels `model_name` and `engine`."""
        for metric in self._registry.collect():
            for name in NAMES.get(metric.name, ()):
                yield self._renamed(metric, name)

    def _renamed(self, metric: Metric, name: VllmName) -> Metric:
        kind = name.kind or metric.type
        renamed = Metric(name.name, metric.documentation, kind)
        ending = "_total" if kind == "counter" and metric.type != "counter" else ""
        for sample in metric.samples:
            labels = {"model_name": self._model, "engine": "0"}
            labels |= {name.labels.get(label, label): value for label, value in sample.labels.items()}
            full_name = name.name + (sample.name.removeprefix(metric.name) or ending)
            value = sample.value * name.scale
            renamed.samples.append(Sample(full_name, labels, value, sample.timestamp, sample.exemplar))
        return renamed


class WithVllmNames(CollectorRegistry):
    """A registry's metrics, followed by the same under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._inner = registry
        self._names = VllmNames(registry, model)

    def collect(self) -> Iterable[Metric]:
        """Yield all of them."""
        yield from self._inner.collect()
        yield from self._names.collect()

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return the metrics with these names, of Pando's own only."""
        return self._inner.restricted_registry(names)


def exposed(registry: CollectorRegistry, settings: Settings) -> CollectorRegistry:
    """Return the metrics of `registry` that a service with these settings exposes."""
    return WithVllmNames(registry, settings.model.name) if settings.metrics.vllm_names else registry
