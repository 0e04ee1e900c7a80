"""Puts a core together, by the settings, for workers of a given capacity."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.debug.replay import encode_header
from services.scheduler.cache.factory import (
    can_reuse,
    make_allocator,
    make_cache,
    resolve_cache,
    resolve_host,
    with_snapshots,
)
from services.scheduler.core.config import resolve_core
from services.scheduler.core.core import SchedulerCore
from services.scheduler.policy.policies import make_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.settings import SchedulerSettings
    from common.steps import EngineCapacity
    from services.scheduler.cache.sharing.choices import SharingChoices
    from services.scheduler.core.costs import OperationTimes
    from services.scheduler.decision_log import DecisionLog
    from services.scheduler.storage_desk import StorageDesk

# Of the first number of an output of the vision encoder; numbers have 64.
OUTPUT_BITS = 62


class CoreAssembler:
    """Has what cores depend on and outlives them: a core is replaced when the workers' capacity changes."""

    def __init__(
        self,
        settings: SchedulerSettings,
        choices: SharingChoices,
        storage: StorageDesk,
        decisions: DecisionLog | None,
        find_adapter: Callable[[str], str | None],
        *,
        has_fleet: bool,
    ) -> None:
        """Take what every core gets.

        Args:
            settings: Those of the scheduler.
            choices: The tenants' choices of sharing.
            storage: Attaches the workers' storage to a cache.
            decisions: The log of the cache's decisions, if they are recorded.
            find_adapter: Returns the digest of the adapter of a name.
            has_fleet: Whether evidence is counted together with other scheduler groups.
        """
        self._settings = settings
        self._choices = choices
        self._storage = storage
        self._decisions = decisions
        self._find_adapter = find_adapter
        self._has_fleet = has_fleet

    def assemble(self, capacity: EngineCapacity, times: OperationTimes) -> SchedulerCore:
        """Return a core with an empty cache; `times` measures the cache's operations.

        Raises:
            ConfigurationError: the settings contradict each other or what the workers have.
        """
        settings = self._settings
        config = resolve_core(settings, capacity, secrets.randbits(OUTPUT_BITS))
        rules = resolve_cache(
            settings.cache,
            capacity.device,
            content_check=settings.content_check.enabled,
            has_fleet=self._has_fleet,
        )
        rules = with_snapshots(rules, capacity)
        host = resolve_host(settings.host_tier, capacity)
        name = settings.cache.mode if can_reuse(capacity) else "chunk"
        allocator = make_allocator(name, config.device_pages, config.page_size, capacity.window_pool)
        cache = make_cache(name, allocator, config.page_size, rules, host, self._choices)
        storage = self._storage.attach(cache.host, capacity)
        if self._decisions is not None:
            sizes = config.page_size, config.device_pages
            self._decisions.begin(encode_header(name, *sizes, rules, host, storage))
            cache = RecordedCache(cache, allocator, self._decisions.note, self._choices)
        order = replace(make_order(settings.queue), batches=make_order(settings.queue))
        return SchedulerCore(config, allocator, cache, order, times, self._find_adapter)
