"""Counts and times of prompts that other groups computed, from the metrics of a deployment's schedulers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.transfers import TransferDirection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREFIX = "pando_scheduler_remote_prefill"
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """Counts of all schedulers since their start, or between two times.

    `copied_bytes` and `copy_s` are those of all pages that were read, on one rank; `transfer_s` and `exposed_s` are
    those of the prompts that were fetched completely.
    """

    asked: float = 0.0
    fetched: float = 0.0
    failed: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    copied_bytes: float = 0.0
    copy_s: float = 0.0

    def __add__(self, other: PrefillCounts) -> PrefillCounts:
        return PrefillCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, before: PrefillCounts) -> PrefillCounts:
        """Return the differences from the earlier counts `before`."""
        return PrefillCounts(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))

    def figures(self) -> Iterator[tuple[str, float, str]]:
        """Yield names, values and units; nothing if no prompt was asked for."""
        if not self.asked:
            return
        yield "remote_prefills_asked", self.asked, "requests"
        yield "remote_prefills_fetched", self.fetched, "requests"
        yield "remote_prefills_failed", self.failed, "requests"
        if self.fetched:
            yield "transfer_mean", 1e3 * self.transfer_s / self.fetched, "ms"
            yield "transfer_exposed_mean", 1e3 * self.exposed_s / self.fetched, "ms"
        if self.transfer_s:
            # Below 0 if pages also waited for their transfers to begin.
            yield "transfer_hidden_share", 1 - self.exposed_s / self.transfer_s, "share"
        if self.copy_s:
            yield "transfer_rate", self.copied_bytes / self.copy_s / 1e9, "GB/s"


def read_remote_prefills(ports: Sequence[int]) -> PrefillCounts:
    """Return the sum of what the schedulers with these metrics ports on this host have counted.

    Raises:
        httpx.HTTPError: one does not answer.
    """
    total = PrefillCounts()
    for port in ports:
        response = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=TIMEOUT_S)
        total += parse_remote_prefills(response.raise_for_status().text)
    return total


def parse_remote_prefills(text: str) -> PrefillCounts:
    """Parse a scheduler's counts from Prometheus' text format; those that it does not export are 0."""
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    outcomes = (samples.get((f"{PREFIX}s_total", (name,)), 0.0) for name in ("asked", "fetched", "failed"))
    times = (samples.get((f"{PREFIX}_{name}_seconds_total", ()), 0.0) for name in ("transfer", "exposed"))
    names = (f"pando_scheduler_transfer_{name}_total" for name in ("bytes", "seconds"))
    from_peers = [each.value for each in TransferDirection if each.is_from_peer]
    moved = (sum(samples.get((name, (direction,)), 0.0) for direction in from_peers) for name in names)
    return PrefillCounts(*outcomes, *times, *moved)
