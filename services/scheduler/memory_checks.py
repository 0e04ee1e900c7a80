"""Checks a core's memory: pages, window pages, snapshots, the cache's tree, and pages that other groups read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.cache.debug.invariant_sampler import InvariantSampler
from services.scheduler.cache_meter import STATES

if TYPE_CHECKING:
    from services.scheduler.core.core import SchedulerCore

# Paths of the cache's tree, of each kind, whose invariants a check looks at: about 0.1 % of a core.
CHECKED_PATHS = 8
# Leases of pages whose promise a check looks at, in turn.
CHECKED_LEASES = 8
SHOWN_VIOLATIONS = 5  # per log line; one defect may show on many paths


class MemoryChecks:
    """Checks one core's memory. Faults are logged, repaired where that is safe, and never fatal."""

    def __init__(self, core: SchedulerCore) -> None:
        """Check the memory of `core`."""
        self._core = core
        self._sampler = InvariantSampler.of(core.memory.cache)
        self._log = get_logger("memory")

    def check(self) -> None:
        """Check all accounts, some paths of the tree and some leases; export the numbers of pages to Prometheus."""
        self._check_windows()
        self._check_snapshots()
        # Before a repair may free leaked pages.
        self._check_leases()
        self._check_pages()
        self._check_invariants()

    def _check_windows(self) -> None:
        """Check the page accounting of the sliding-window pool."""
        core = self._core
        accounts = core.memory.account_windows(core.rows)
        if accounts is None:
            return
        for state in STATES:
            metrics.PAGES.labels("device_window", state).set(getattr(accounts, state))
        if not accounts.is_exact:
            self._log.error("memory.window_leak", faults=core.memory.window_faults(core.rows))
            core.memory.repair_windows()

    def _check_snapshots(self) -> None:
        """Check the accounting of recurrent states' snapshots."""
        core = self._core
        accounts = core.memory.account_snapshots(core.rows)
        if accounts is None:
            return
        for state in STATES:
            metrics.PAGES.labels("device_snapshots", state).set(getattr(accounts, state))
        if not accounts.is_exact:
            self._log.error("memory.snapshot_leak", slots=accounts.unaccounted_references)
            core.memory.repair_snapshots()
        host = core.memory.cache.host
        on_host = None if host is None else host.account_snapshots()
        if on_host is not None:
            for state in STATES:
                metrics.PAGES.labels("host_snapshots", state).set(getattr(on_host, state))

    def _check_pages(self) -> None:
        """Check the accounting of pages; leaked ones are freed once no row runs, and no other group reads pages."""
        core = self._core
        accounts = core.memory.account(core.rows)
        for state in STATES:
            metrics.PAGES.labels("device", state).set(getattr(accounts, state))
        metrics.KV_USAGE_PERCENT.set(100 * accounts.protected / max(1, accounts.capacity))
        if accounts.is_exact:
            return
        report = core.memory.audit(core.rows)
        self._log.error(
            "memory.leak", leaked=[str(fault) for fault in report.leaked], dangling=[str(f) for f in report.dangling]
        )
        # A lease keeps its pages until its readers have ended, whatever the accounting says.
        if not core.rows.running and not len(core.exports):
            core.sessions.lose_pins()
            self._log.warning("memory.repaired", freed_pages=core.memory.repair())

    def _check_leases(self) -> None:
        """Check that pages which other groups may still read are neither free nor granted again."""
        wrong = self._core.exports.lent.faults(CHECKED_LEASES)
        if wrong:
            metrics.CACHE_VIOLATIONS_TOTAL.inc(len(wrong))
            self._log.error("memory.lease_violated", violations=wrong[:SHOWN_VIOLATIONS], count=len(wrong))

    def _check_invariants(self) -> None:
        """Check some paths of the cache's tree."""
        wrong = self._sampler.check(CHECKED_PATHS) if self._sampler else []
        if wrong:
            metrics.CACHE_VIOLATIONS_TOTAL.inc(len(wrong))
            self._log.error("cache.invariant_violated", violations=wrong[:SHOWN_VIOLATIONS], count=len(wrong))
