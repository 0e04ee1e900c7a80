"""Evidence, demotions and quarantines that several scheduler groups have in common.

The cache reports what it has seen (`FleetReport`) and receives what the fleet knows (`FleetNews`); the scheduler's
fleet desk carries both. News takes effect at the next boundary, like every promotion.

A prefix is named by its chained page hash. Evidence is counted only at some depths, "rungs": each of the first eight
pages, then eight for each doubling. So a prompt of a thousand pages has 64 rungs, and at most an eighth of a shared
prefix is missed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from common.fleet.names import PREFIX_TOKENS, routing_digest
from common.types import Sharing
from services.scheduler.cache.keys import chain_hashes, plain_ids
from services.scheduler.cache.node import Quarantine
from services.scheduler.cache.sharing.counters import WindowCounts
from services.scheduler.cache.types import CacheEventKind, NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from services.scheduler.cache.node import Account, Node
    from services.scheduler.cache.sharing.counters import Window
    from services.scheduler.cache.sharing.demotion import DemotedChains, Demoter
    from services.scheduler.cache.store import NodeStore
    from services.scheduler.cache.types import Scope, SubjectKey

K = TypeVar("K")
V = TypeVar("V")

# Rungs for each doubling of the depth, and the depth in pages up to which every page is one.
_RUNGS = 8
# Reports that wait for the desk; older ones are dropped, which only delays sharing.
_KEPT_REPORTS = 16_384


@dataclass(frozen=True, slots=True)
class FleetClaim:
    """A subject's computation of nested prefixes from a prompt, `age` epochs ago.

    `chains` are those at the rungs, from the shallowest; those from index `demoted_from` on were demoted before, as far
    as this group knows. `routing` is the digest of the first tokens, None if the claim does not cover them.
    """

    subject: SubjectKey
    chains: tuple[bytes, ...]
    demoted_from: int
    routing: bytes | None
    age: int


@dataclass(frozen=True, slots=True)
class FleetUse:
    """Hits of subjects that have not computed a tenant's prefix: the decision to share it stays in force."""

    scope: Scope
    chains: tuple[bytes, ...]
    routing: bytes | None


@dataclass(frozen=True, slots=True)
class DemotionFact:
    """A subtree below the first page that `chain` names is not shared any more."""

    scope: Scope
    chain: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class QuarantineFact:
    """The node with the page that `chain` names is hidden from a subject, or with `is_whole` from a tenant."""

    scope: Scope
    chain: bytes
    fingerprint: int
    tenant: str
    is_whole: bool


@dataclass(frozen=True, slots=True)
class FleetRevocation:
    """Prefixes at rungs that this group has stopped sharing after a demotion, its own or another group's."""

    scope: Scope
    chains: tuple[bytes, ...]
    routing: bytes | None


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """One group's part of a window that has closed: hits on the node with the page that `chain` names.

    Those of a party's subjects that have not computed it, by fingerprint; not all of them if they are many. Or with
    `tries`, checksums of the continuations below the node that the one subject in `users` has tried in vain.
    """

    scope: Scope
    chain: bytes
    party: Scope
    hits: int
    users: tuple[int, ...]
    tries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeCounts:
    """All groups' counts of a window that this group has reported; `users` are the subjects that it has reported."""

    scope: Scope
    chain: bytes
    party: Scope
    users: tuple[int, ...]
    counts: WindowCounts
    tries: int = 0


@dataclass(slots=True)
class FleetReport:
    """Claims and facts of a cache since its last report."""

    # Evidence that becomes a claim at the next boundary: whether it is shared already can be looked up before.
    interests: deque[FleetClaim] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    claims: deque[FleetClaim] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    uses: deque[FleetUse] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    demotions: list[DemotionFact] = field(default_factory=list)
    quarantines: list[QuarantineFact] = field(default_factory=list)
    revocations: list[FleetRevocation] = field(default_factory=list)
    # Of the epoch that has ended last.
    probes: list[ProbeReport] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetNews:
    """News for a cache: prefixes that the fleet shares, by tenant, and facts of other groups.

    `is_alone`: the fleet cannot be reached, so what is shared by other groups' evidence is given up.
    """

    shared: tuple[tuple[str, bytes], ...] = ()
    demotions: tuple[DemotionFact, ...] = ()
    quarantines: tuple[QuarantineFact, ...] = ()
    probes: tuple[ProbeCounts, ...] = ()
    is_alone: bool = False

    def described(self) -> dict[str, Any]:
        """Return the news as JSON, for the decision log and for other groups."""
        return {
            "shared": [[tenant, chain.hex()] for tenant, chain in self.shared],
            "demotions": [{**asdict(fact), "chain": fact.chain.hex()} for fact in self.demotions],
            "quarantines": [{**asdict(fact), "chain": fact.chain.hex()} for fact in self.quarantines],
            "probes": [{**asdict(count), "chain": count.chain.hex()} for count in self.probes],
            "is_alone": self.is_alone,
        }

    @classmethod
    def from_description(cls, facts: Mapping[str, Any]) -> FleetNews:
        """Undo `described`.

        Raises:
            KeyError, TypeError, ValueError: `facts` are no such description.
        """

        def decoded(fact: Mapping[str, Any]) -> dict[str, Any]:
            return {**fact, "chain": bytes.fromhex(fact["chain"]), "scope": tuple(fact["scope"])}

        return cls(
            tuple((tenant, bytes.fromhex(chain)) for tenant, chain in facts["shared"]),
            tuple(DemotionFact(**decoded(fact)) for fact in facts["demotions"]),
            tuple(QuarantineFact(**decoded(fact)) for fact in facts["quarantines"]),
            tuple(_probe_counts(decoded(count)) for count in facts.get("probes", ())),
            facts["is_alone"],
        )


def _probe_counts(facts: Mapping[str, Any]) -> ProbeCounts:
    counts = WindowCounts(**facts["counts"])
    return ProbeCounts(**{**facts, "party": tuple(facts["party"]), "users": tuple(facts["users"]), "counts": counts})


def rungs(first: int, end: int) -> Iterator[int]:
    """Yield the depths in pages, above `first` and up to `end`, at which evidence is counted."""
    depth = first
    while True:
        step = 1 << max(0, (depth + 1).bit_length() - _RUNGS.bit_length())
        depth += step - depth % step
        if depth > end:
            return
        yield depth


class FleetLedger:
    """Owns what is to be reported, and what the fleet shares; without a fleet it does nothing."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._is_used = store.config.has_fleet
        self._report = FleetReport()
        # By tenant and chain: the epoch in which the fleet's decision was last learned.
        self._shared: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        # Private nodes whose evidence has been reported, by tenant and chain of the first rung.
        self._claimants: OrderedDict[tuple[str, bytes], dict[Node, None]] = OrderedDict()
        # Quarantines of other groups, for nodes that this group does not have yet.
        self._quarantines: OrderedDict[tuple[Scope, bytes], dict[int, Quarantine]] = OrderedDict()
        self._used_epoch: dict[Node, int] = {}
        # Changed nodes that have been reported since the last boundary, with the lengths of their edges.
        self._interests: dict[Node, int] = {}
        # Of the nodes in the last windows: their depths, and the chains of their first pages.
        self._first_chains: dict[Node, tuple[int, bytes]] = {}

    @property
    def has_quarantines(self) -> bool:
        """Whether any other group has reported a quarantine."""
        return bool(self._quarantines)

    @property
    def knows_shared(self) -> bool:
        """Whether the fleet shares any prefix, as far as this group knows."""
        return bool(self._shared)

    def take(self, demoted: DemotedChains) -> FleetReport:
        """Return the report since the last call."""
        taken, self._report = self._report, FleetReport()
        if self._is_used:
            for node in self._store.fresh:
                if self._interests.get(node) == len(node.key) or not self._is_evidence(node):
                    continue
                self._interests[node] = len(node.key)
                claim = self._claim_of(node, demoted)
                if claim is not None:
                    taken.interests.append(claim)
        return taken

    # --- reporting ---

    def claim(self, nodes: Iterable[Node], demoted: DemotedChains) -> None:
        """Report the evidence in private nodes that have changed since the last boundary."""
        if not self._is_used:
            return
        self._interests.clear()
        for node in nodes:
            claim = self._claim_of(node, demoted) if self._is_evidence(node) else None
            if claim is None:
                continue
            self._report.claims.append(claim)
            key = claim.subject[0], claim.chains[0]
            claimants = self._claimants.setdefault(key, {})
            claimants[node] = None
            self._claimants.move_to_end(key)
            self._trim(self._claimants)
            while len(claimants) > self._store.config.profile.creators_limit:
                del claimants[next(iter(claimants))]

    def _is_evidence(self, node: Node) -> bool:
        oldest = self._store.epoch - self._store.config.promotion_epochs
        return (
            not node.is_dead
            and not node.is_shared
            and node.prompt_epoch is not None
            and node.prompt_epoch >= oldest
            and not node.no_promote
            and node.owner.tenant.sharing is not Sharing.NONE
        )

    def _claim_of(self, node: Node, demoted: DemotedChains) -> FleetClaim | None:
        tree, account = self._store.tree, node.owner
        top, epoch = node, node.prompt_epoch
        assert epoch is not None, "it is evidence"
        while top.parent is not None and top.parent.owner is account:
            top = top.parent
            if not self._is_evidence(top):
                return None
            assert top.prompt_epoch is not None
            epoch = min(epoch, top.prompt_epoch)
        assert top.parent is not None, "the root is public"
        key = tree.path_key(node)
        first, end = tree.depth_pages(top.parent), len(key) // tree.page_bytes
        depths = list(rungs(first, end))
        if not depths:
            return None
        hashes = chain_hashes(key, tree.page_bytes)
        scope = account.tenant.scope
        since = demoted.first_of(scope, hashes)
        if top.generation or top.parent.generation:
            since = 0
        chains = tuple(hashes[depth - 1] for depth in depths)
        demoted_from = sum(depth - 1 < since for depth in depths)
        covers = first * tree.page_size < PREFIX_TOKENS <= end * tree.page_size
        routing = _routing(key) if covers else None
        age = self._store.epoch - epoch
        return FleetClaim(account.subject, chains, demoted_from, routing, age)

    def note_uses(self) -> None:
        """Report the tenants' nodes that other subjects than their creators have hit in the epoch that ends."""
        if not self._is_used:
            return
        epoch, every = self._store.epoch, max(1, self._store.config.promotion_epochs // 4)
        self._used_epoch = {node: used for node, used in self._used_epoch.items() if epoch - used < every}
        for node in self._store.touched:
            if node.is_dead or not node.is_shared or node.is_public or node in self._used_epoch:
                continue
            self._used_epoch[node] = epoch
            chains, routing = self._rungs_from(node, 0)
            if chains:
                self._report.uses.append(FleetUse(node.owner_id, chains, routing))

    def note_demotion(self, top: Node, generation: int, *, is_news: bool) -> None:
        """Report that a subtree is about to be demoted, on other groups' news or by this group's own detection."""
        if not self._is_used:
            return
        tree, scope = self._store.tree, top.owner_id
        start = tree.depth_pages(top) - top.size
        if not is_news:
            chain = chain_hashes(tree.path_key(top), tree.page_bytes)[start]
            self._report.demotions.append(DemotionFact(scope, chain, generation))
        for node in (top, *tree.walk_owned(top.owner, top=top)):
            chains, routing = self._rungs_from(node, start)
            self._report.revocations.append(
                FleetRevocation(scope, chains, routing if start * tree.page_size < PREFIX_TOKENS else None)
            )
            for chain in chains:
                if scope:
                    self._shared.pop((scope[0], chain), None)
            for chain in self._chains_of(node):
                self._quarantines.pop((scope, chain), None)

    def note_quarantine(self, node: Node, fingerprint: int, quarantine: Quarantine) -> None:
        """Report a quarantine that this group's detection has found."""
        if self._is_used:
            chain = self._chains_of(node)[0]
            fact = QuarantineFact(node.owner_id, chain, fingerprint, quarantine.tenant, quarantine.is_whole)
            self._report.quarantines.append(fact)

    def note_windows(
        self,
        hits: Iterable[tuple[Node, Scope, Window]],
        tries: Iterable[tuple[Node, Account, Sequence[int]]],
    ) -> None:
        """Report the windows that have closed: hits by party, and continuations that subjects have tried in vain."""
        if not self._is_used:
            return
        known, self._first_chains = self._first_chains, {}
        reports = self._report.probes = []
        # As many subjects make a window healthy, whatever the others are.
        config = self._store.config
        enough = config.promotion_subjects * config.profile.repromotion_factor
        for node, party, window in hits:
            assert window.users is not None, "there were hits"
            # A sketch has forgotten the subjects, which are enough: any distinct numbers count as much.
            users = (window.users.members or tuple(range(enough)))[:enough]
            reports.append(ProbeReport(node.owner_id, self._first_chain(node, known), party, window.hits, users))
            if len(reports) == _KEPT_REPORTS:
                return
        for node, account, tried in tries:
            chain = self._first_chain(node, known)
            reports.append(ProbeReport(node.owner_id, chain, account.party, 0, (account.fingerprint,), tuple(tried)))
            if len(reports) == _KEPT_REPORTS:
                return

    def _first_chain(self, node: Node, known: Mapping[Node, tuple[int, bytes]]) -> bytes:
        """Return the chained hash of a node's first page; `known` are those of the windows before."""
        depth = self._store.tree.depth_pages(node) - node.size
        entry = self._first_chains.get(node) or known.get(node)
        if entry is None or entry[0] != depth:
            entry = depth, self._chains_of(node)[0]
        self._first_chains[node] = entry
        return entry[1]

    def _chains_of(self, node: Node) -> list[bytes]:
        """Return the chained hashes of a node's pages."""
        tree = self._store.tree
        return chain_hashes(tree.path_key(node), tree.page_bytes)[-node.size :]

    def _rungs_from(self, node: Node, start: int) -> tuple[tuple[bytes, ...], bytes | None]:
        """Return the chains at the rungs of a node's path below depth `start`, and the digest of its first tokens."""
        tree = self._store.tree
        key = tree.path_key(node)
        hashes = chain_hashes(key, tree.page_bytes)
        return tuple(hashes[depth - 1] for depth in rungs(start, len(hashes))), _routing(key)

    # --- learning ---

    def learn_shared(self, tenant: str, chain: bytes) -> Iterable[Node]:
        """Record that the fleet shares a prefix; return the nodes with evidence of it."""
        self._shared[tenant, chain] = self._store.epoch
        self._shared.move_to_end((tenant, chain))
        self._trim(self._shared)
        return self._claimants.get((tenant, chain), {})

    def forget_shared(self) -> None:
        """Decide alone from now on."""
        self._shared.clear()

    def shared_pages(self, scope: Scope, hashes: Sequence[bytes]) -> int:
        """Return the number of a run's leading pages that the fleet shares, given the run's chained hashes."""
        if not self._shared:
            return 0
        oldest = self._store.epoch - self._store.config.promotion_epochs
        for pages in range(len(hashes), 0, -1):
            learned = self._shared.get((scope[0], hashes[pages - 1]))
            if learned is not None and learned >= oldest:
                return pages
        return 0

    def remember_quarantine(self, fact: QuarantineFact) -> Quarantine:
        """Record a quarantine of another group, also for nodes that are shared here later."""
        quarantine = Quarantine(self._store.epoch, fact.tenant, fact.is_whole)
        self._quarantines.setdefault((fact.scope, fact.chain), {})[fact.fingerprint] = quarantine
        self._trim(self._quarantines)
        return quarantine

    def quarantines_of(self, node: Node) -> dict[int, Quarantine]:
        """Return other groups' quarantines of any page of a shared node."""
        found: dict[int, Quarantine] = {}
        for chain in self._chains_of(node):
            found.update(self._quarantines.get((node.owner_id, chain), {}))
        return found

    def _trim(self, memory: OrderedDict[K, V]) -> None:
        while len(memory) > self._store.config.profile.remembered_chains:
            memory.popitem(last=False)


class ProbeJudge(Protocol):
    """Tests the fleet's counts of windows."""

    def may_suspect(self, probes: ProbeCounts) -> bool:
        """Return whether counts could look like probing at any node."""

    def judge(self, windows: Iterable[tuple[Node, ProbeCounts]]) -> None:
        """Hide nodes from the subjects that appear to probe them."""


class FleetFollower:
    """Applies news at boundaries."""

    def __init__(self, store: NodeStore, ledger: FleetLedger, demoter: Demoter, detector: ProbeJudge) -> None:
        self._store = store
        self._ledger = ledger
        self._demoter = demoter
        self._detector = detector
        self._news: list[FleetNews] = []

    def learn(self, news: FleetNews) -> None:
        """Keep news until the next boundary."""
        self._news.append(news)

    def apply(self) -> list[Node]:
        """Apply the news; return the nodes that may have enough evidence now."""
        news, self._news = self._news, []
        examined: dict[Node, None] = {}
        for one in news:
            if one.is_alone:
                self._ledger.forget_shared()
                self._give_up()
            for fact in one.demotions:
                self._demote(fact)
            for quarantine in one.quarantines:
                self._quarantine(quarantine)
            self._judge(one.probes)
            for tenant, chain in one.shared:
                examined.update(dict.fromkeys(self._ledger.learn_shared(tenant, chain)))
        return list(examined)

    def _give_up(self) -> None:
        """Return nodes to their creators that are shared by other groups' evidence only."""
        least = self._store.config.promotion_subjects
        tree = self._store.tree
        for tenant in self._store.accounts.tenants():
            for node in [each for top in tenant.tops for each in (top, *tree.walk_owned(tenant, top=top))]:
                if node.is_dead or node.promoted is None or node.promoted[0] >= least:
                    continue
                if sum(creator.evidence is not None for creator in (node.creators or {}).values()) < least:
                    self._demoter.demote(node, is_suspect=False)

    def _demote(self, fact: DemotionFact) -> None:
        self._demoter.demoted.add(fact.scope, fact.chain, fact.generation)
        found = self._find(fact.scope, fact.chain)
        if found is None:
            return
        node, index = found
        # The upper part stays shared; `node` is the lower one. A part of a soft-free node cannot stay soft-free.
        if index and node.state is NodeState.LIVE:
            self._store.split(node, index)
        if not node.pinned:
            self._demoter.demote(node, is_news=True)

    def _quarantine(self, fact: QuarantineFact) -> None:
        quarantine = self._ledger.remember_quarantine(fact)
        found = self._find(fact.scope, fact.chain)
        if found is None or found[0].pinned:
            return
        node, _ = found
        node.quarantined = {**(node.quarantined or {}), fact.fingerprint: quarantine}
        self._store.emit(CacheEventKind.QUARANTINED, node)
        if not fact.is_whole:
            self._store.tier.distrust([fact.fingerprint])

    def _judge(self, probes: Iterable[ProbeCounts]) -> None:
        found = ((self._find(one.scope, one.chain), one) for one in probes if self._detector.may_suspect(one))
        self._detector.judge((match[0], one) for match, one in found if match is not None)

    def _find(self, scope: Scope, chain: bytes) -> tuple[Node, int] | None:
        """Return the node of `scope` that has the page named by `chain`, and the page's index in it."""
        tree, owner = self._store.tree, self._owner(scope)
        if owner is None:
            return None
        for node in tree.walk_owned(self._store.accounts.public, owner):
            if node.owner is not owner:
                continue
            own = chain_hashes(tree.path_key(node), tree.page_bytes)[-node.size :]
            if chain in own:
                return node, own.index(chain)
        return None

    def _owner(self, scope: Scope) -> Account | None:
        accounts = self._store.accounts
        if not scope:
            return accounts.public
        return next((account for account in accounts.tenants() if account.scope == scope), None)


def _routing(key: bytes) -> bytes | None:
    """Return the digest by which tokenizers know the prompts that begin with a key, as these hash ids without tags.

    An adapter's tags stay where the prompt does not begin with an image: the base model's prompts differ by them.
    """
    ids = np.frombuffer(key, "<i4")
    return routing_digest(plain_ids(key) if (ids[:PREFIX_TOKENS] < 0).any() else ids)
