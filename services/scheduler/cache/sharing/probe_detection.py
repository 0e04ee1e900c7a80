"""Probe detection: monitors the use of shared nodes, and hides them from subjects that appear to probe them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

from common.types import Sharing
from services.scheduler.cache.node import Account, Quarantine
from services.scheduler.cache.sharing.counters import DistinctCount, Window
from services.scheduler.cache.types import CacheEventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from services.scheduler.cache.keys import PagedKey
    from services.scheduler.cache.node import Node
    from services.scheduler.cache.sharing.counters import WindowCounts
    from services.scheduler.cache.sharing.demotion import Demoter
    from services.scheduler.cache.sharing.fleet import FleetLedger, ProbeCounts
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import Scope


class ProbeDetector:
    """Counts hits on shared nodes, and tests each window when it closes.

    Probing appears as many hits by few subjects. That alone is not sufficient: three users of an application may send
    ten thousand requests. But only hits of subjects that have not computed the text themselves are counted, and a
    window with as many of these subjects as a promotion requires is healthy regardless of its hits: they are the same
    evidence again. The node is hidden from a suspect until the suspect computes the text itself, which costs an honest
    one a single prefill.

    Each tenant is judged by its own subjects only, also at PUBLIC nodes: however many subjects a rival invents, it
    changes only its own view. When several of a tenant's subjects are quarantined at a TENANT node, the node is
    demoted; at a PUBLIC one, the whole tenant is quarantined, and only several such tenants demote it.

    In a fleet, each group tests its own windows, and reports them; the sums over all groups come back from the shared
    state and are tested by the same rules, so that probes spread over groups count as if made at one.
    """

    def __init__(self, store: NodeStore, demoter: Demoter, fleet: FleetLedger) -> None:
        """Monitor the nodes of `store`; `demoter` demotes them, `fleet` reports quarantines."""
        self._store = store
        self._demoter = demoter
        self._fleet = fleet
        self._enough = store.config.promotion_subjects
        # Distinct missing continuations in this epoch, by node and subject, and the number of these pairs by party.
        self._tries: dict[tuple[Node, int], tuple[Account, DistinctCount]] = {}
        self._watched: Counter[Scope] = Counter()
        # PUBLIC nodes that a subject of a quarantined tenant has computed itself.
        self._proven: dict[Node, None] = {}

    def count(self, node: Node, account: Account, key: PagedKey, pages: int) -> None:
        """Count one request's hit on each shared node up to `node`.

        Args:
            node: The end of the match in the requester's view.
            account: The requester.
            key: The request's tokens.
            pages: The depth of `node` in pages; the key's next page, if there is a whole one, is not below it.
        """
        deepest = node
        while not deepest.owner.is_shared:
            assert deepest.parent is not None, "the root is public"
            deepest = deepest.parent
        at, subject = deepest, account.subject
        while (parent := at.parent) is not None:
            if at.creators is None or subject not in at.creators:
                self._count_hit(at, account)
            at = parent
        if deepest is not node or node.parent is None or pages >= key.pages:
            return
        if subject not in (node.creators or ()):
            self._count_try(node, account, key.page(pages))

    def _count_hit(self, node: Node, account: Account) -> None:
        if not node.hit_cur:
            self._store.touched.append(node)
        node.hit_cur += 1
        if node.u_cnt_l is None:
            node.u_cnt_l = DistinctCount()
        node.u_cnt_l.add(account.fingerprint)
        if node.owner.is_public:
            if node.parties is None:
                node.parties = {}
            node.parties.setdefault(account.party, Window()).add(account.fingerprint)

    def _count_try(self, node: Node, account: Account, missing_page: bytes) -> None:
        found = self._tries.get((node, account.fingerprint))
        if found is None:
            if self._watched[account.party] >= self._store.config.profile.watched_pairs:
                return
            self._watched[account.party] += 1
            found = self._tries[node, account.fingerprint] = account, DistinctCount()
        found[1].add(crc32(missing_page))

    def close(self) -> None:
        """Test the windows that end as the store's epoch begins, and start new ones."""
        touched, self._store.touched = self._store.touched, []
        suspects: dict[Node, dict[int, str]] = {}
        shared = [node for node in touched if not node.is_dead and node.is_shared]
        self._fleet.note_windows(
            ((node, *each) for node in shared if not node.pinned for each in _windows(node) if each[1].hits),
            (
                (node, account, tries.members)
                for (node, _), (account, tries) in self._tries.items()
                if node.is_shared and not (node.is_dead or node.pinned)
            ),
        )
        for node in shared:
            if not node.pinned and (found := dict(self._suspects(node))):
                suspects[node] = found
            node.roll_over(self._store.epoch)
        for (node, fingerprint), (account, tries) in self._tries.items():
            is_over = tries.count >= self._store.config.profile.continuation_limit
            if is_over and node.is_shared and not (node.is_dead or node.pinned):
                suspects.setdefault(node, {})[fingerprint] = account.scope[0]
        self._tries.clear()
        self._watched.clear()
        self._end_quarantines()
        self._act(suspects)

    def may_suspect(self, probes: ProbeCounts) -> bool:
        """Whether the fleet's counts of a window could look like probing at any node."""
        profile, counts = self._store.config.profile, probes.counts
        if probes.tries:
            return probes.tries >= profile.continuation_limit
        return counts.hits >= profile.hit_min and counts.users <= profile.diversity_min * counts.hits

    def judge(self, windows: Iterable[tuple[Node, ProbeCounts]]) -> None:
        """Test the fleet's counts of windows, as `close` does with those of this group alone."""
        suspects: dict[Node, dict[int, str]] = {}
        for node, probes in windows:
            if not node.is_shared or node.pinned:
                continue
            if not probes.tries and not self._is_suspect(node, probes.party, probes.counts):
                continue
            # They have computed it since, or are quarantined already.
            cleared = {Account(subject).fingerprint for subject in node.creators or ()} | set(node.quarantined or ())
            found = {user: probes.party[0] for user in probes.users if user not in cleared}
            if found:
                suspects.setdefault(node, {}).update(found)
        self._act(suspects)

    def _act(self, suspects: Mapping[Node, dict[int, str]]) -> None:
        # All are quarantined before any is demoted, so that the result does not depend on the boundaries of nodes.
        for node, found in suspects.items():
            self._quarantine(node, found)
        # A demotion includes the nodes below.
        for node in sorted(suspects, key=self._store.tree.depth_pages):
            if not node.is_dead:
                self._judge(node, set(suspects[node].values()))

    def admit(self, node: Node, account: Account, *, is_evidence: bool) -> None:
        """Record that a view has computed a shared node's tokens itself, which ends its subject's quarantine.

        Only with `is_evidence` it also counts towards ending its tenant's quarantine.
        """
        if node.quarantined is not None:
            node.quarantined.pop(account.fingerprint, None)
            node.quarantined = node.quarantined or None
            self._proven[node] = None
        epoch = self._store.epoch
        node.add_creator(account, epoch, self._store.config, evidence=epoch if is_evidence else None)

    def _suspects(self, node: Node) -> Iterator[tuple[int, str]]:
        """Yield the fingerprints and tenants of subjects that appear to probe a node, as its window closes."""
        for party, window in _windows(node):
            if window.hits >= self._store.config.profile.hit_min and self._is_suspect(node, party, window.counts):
                assert window.users is not None, "there were hits"
                for fingerprint in window.users.members:
                    yield fingerprint, party[0]

    def _is_suspect(self, node: Node, party: Scope, window: WindowCounts) -> bool:
        """Whether a party's hits look like probing, by the closing window and the previous one."""
        profile, users, hits = self._store.config.profile, window.users, window.hits
        enough = self._enough * (profile.repromotion_factor if node.generation else 1)
        if users >= enough or users > profile.diversity_min * hits:
            return False
        before = window.previous_hits
        was_low = before >= profile.hit_min and window.previous_users <= min(profile.diversity_min * before, enough - 1)
        has_jumped = window.previous_users <= 1 and hits >= profile.jump_factor * max(before, 1)
        if was_low or not has_jumped:
            return was_low
        return sum(subject[: len(party)] == party for subject in node.creators or ()) <= profile.few_creators

    def _quarantine(self, node: Node, suspects: dict[int, str]) -> None:
        store, epoch = self._store, self._store.epoch
        quarantined = node.quarantined = dict(node.quarantined or {})
        for fingerprint, tenant in sorted(suspects.items()):
            quarantined[fingerprint] = Quarantine(epoch, tenant)
            self._fleet.note_quarantine(node, fingerprint, quarantined[fingerprint])
        store.emit(CacheEventKind.QUARANTINED, node)
        store.tier.distrust(sorted(suspects))

    def _judge(self, node: Node, tenants: set[str]) -> None:
        """Hide a node from tenants of which several subjects have been quarantined recently, or demote it."""
        store, epoch, quarantined = self._store, self._store.epoch, node.quarantined
        assert quarantined is not None, "there are suspects"
        oldest = epoch - store.config.profile.quarantine_epochs
        recent = Counter(one.tenant for one in quarantined.values() if one.since >= oldest and not one.is_whole)
        probing = [
            store.accounts.owner((tenant,))
            for tenant in sorted(tenants)
            if recent[tenant] >= store.config.profile.demotion_quarantines
        ]
        if not node.is_public:
            if probing:
                self._demoter.demote(node)
            return
        for account in probing:
            if account.sharing is not Sharing.NONE:
                quarantined[account.fingerprint] = Quarantine(epoch, account.scope[0], is_whole=True)
                self._fleet.note_quarantine(node, account.fingerprint, quarantined[account.fingerprint])
            store.accounts.forget_if_empty(account)
        whole = sum(one.is_whole and one.since >= oldest for one in quarantined.values())
        if whole >= store.config.profile.demotion_tenants:
            self._demoter.demote(node)

    def _end_quarantines(self) -> None:
        """Show nodes again to tenants of which enough subjects have computed them since, as evidence."""
        proven, self._proven = self._proven, {}
        required = self._enough * self._store.config.profile.repromotion_factor
        for node in proven:
            if node.is_dead or node.quarantined is None:
                continue
            for fingerprint, quarantine in list(node.quarantined.items()):
                if quarantine.is_whole and required <= sum(
                    subject[0] == quarantine.tenant
                    and creator.evidence is not None
                    and creator.evidence >= quarantine.since
                    for subject, creator in (node.creators or {}).items()
                ):
                    del node.quarantined[fingerprint]
            node.quarantined = node.quarantined or None


def _windows(node: Node) -> Iterable[tuple[Scope, Window]]:
    """Return the windows of a shared node by the parties that are judged together."""
    if node.is_public:
        return (node.parties or {}).items()
    return ((node.owner.scope, Window(node.hit_cur, node.u_cnt_l, node.hit_pre, node.u_pre)),)
