"""Carries evidence, demotions, quarantines and pins between the cache and the state that the groups share.

While the server answers, a group applies what another has reported by its second next poll, at the next boundary.
Facts are read from a stream by position, so that a group misses none. A group that cannot reach the server decides
alone, by its own evidence; after `LEASE_EPOCHS` it gives up what it shares by other groups' evidence only, as it would
not learn of a demotion. It reports what it has kept meanwhile when the server answers again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.errors import BrokenStateError
from common.fleet.names import routing_digest
from common.fleet.state import (
    START,
    FleetRulesError,
    FleetStateAwayError,
    NamedEvidence,
    NamedWindow,
    PromotionRules,
)
from common.logs import get_logger
from services.scheduler import metrics
from services.scheduler.cache.config import PrivacyProfile
from services.scheduler.cache.sharing.counters import WindowCounts
from services.scheduler.cache.sharing.fleet import FleetNews, ProbeCounts
from services.scheduler.defects import MAX_PAUSE_S, changing_state, note_defect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from common.fleet.names import FleetKeys
    from common.fleet.state import FleetState
    from common.settings import CacheSettings
    from common.types import TokenIds
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.sharing.fleet import (
        FleetClaim,
        FleetReport,
        FleetRevocation,
        FleetUse,
        ProbeReport,
    )

POLL_INTERVAL_S = 0.5
# Epochs without an answer of the server after which a group gives up what it shares by others' evidence only; a restart
# of the server takes less.
LEASE_EPOCHS = 6
# Claims and facts kept while the server is away, and facts by which repeated ones are recognised.
_KEPT = 16_384
_NONCE_BYTES = 12


def rules_of(settings: CacheSettings) -> PromotionRules:
    """Return the rules of promotion, which all groups must have in common."""
    factor = PrivacyProfile().repromotion_factor
    return PromotionRules(settings.promotion_subjects, factor, settings.promotion_epochs, settings.epoch_seconds)


@dataclass(slots=True)
class _Prefixes:
    """Nested prefixes that this group has evidence of; the fleet shares those before index `shared`."""

    tenant: str
    chains: tuple[bytes, ...]
    names: tuple[bytes, ...]
    # The last epoch in which it is looked up.
    until: int
    shared: int = 0
    # Claims with the epochs in which they were reported.
    claims: list[tuple[FleetClaim, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Outbox:
    """Messages to send, in this order."""

    facts: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT))
    revocations: deque[FleetRevocation] = field(default_factory=lambda: deque(maxlen=_KEPT))
    pins: deque[tuple[TokenIds, bool]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    claims: deque[tuple[FleetClaim, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    uses: deque[FleetUse] = field(default_factory=lambda: deque(maxlen=_KEPT))


class FleetDesk:
    """One group's exchange with the state that the groups share."""

    def __init__(
        self, state: FleetState, keys: FleetKeys, rules: PromotionRules, cache: Callable[[], PrefixCache | None]
    ) -> None:
        """`cache` returns the current cache; None while there is none. A new cache starts empty."""
        self._state = state
        self._keys = keys
        self._rules = rules
        self._find_cache = cache
        self._cipher = AESGCM(keys.sealing)
        self._log = get_logger("fleet")
        self._is_away: str | None = ""
        # Until the next exchange: longer after defects.
        self._pause_s = POLL_INTERVAL_S
        self._outbox = _Outbox()
        # Facts of this group, to be published again if the server has lost its data.
        self._published: deque[bytes] = deque(maxlen=_KEPT)
        self._incarnation: bytes | None = None
        self._begin(None)

    def _begin(self, cache: PrefixCache | None) -> None:
        """Start to follow a cache that knows nothing."""
        self._cache = cache
        self._position = START
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._prefixes: dict[tuple[str, bytes], _Prefixes] = {}
        self._pins: dict[bytes, TokenIds] = {}
        # Of this cache, in the sums of windows.
        self._group = secrets.token_bytes(8)
        # Windows of the last epoch that have not been counted, and the epoch in which they were reported.
        self._windows: tuple[int, list[ProbeReport]] = 0, []
        # Prefixes to look up at once.
        self._new: list[_Prefixes] = []
        self._looked_at: int | None = None
        self._answered_epoch = 0 if cache is None else cache.epoch
        self._is_alone = False

    def announce_pin(self, token_ids: TokenIds, is_pinned: bool) -> None:
        """Let the other groups pin a prompt that this group has pinned, or unpin it."""
        self._outbox.pins.append((token_ids, is_pinned))

    async def run(self) -> None:
        """Exchange until cancelled."""
        try:
            while True:
                await self.poll()
                await asyncio.sleep(self._pause_s)
        finally:
            await self._state.close()

    async def poll(self) -> None:
        """Send and receive once; if the server does not answer, keep what has to be sent.

        Raises:
            BrokenStateError: the cache is half changed, or lacks a decision of another group.
        """
        cache = self._find_cache()
        if cache is None:
            return
        if cache is not self._cache:
            self._begin(cache)
        try:
            self._collect(cache)
            await self._exchange(cache)
        except (FleetStateAwayError, FleetRulesError) as error:
            self._note_away(cache, str(error))
        except BrokenStateError:
            raise
        except Exception as error:  # noqa: BLE001  (requests go on, by this group's own evidence)
            self._begin_again(cache, error)
        else:
            self._pause_s = POLL_INTERVAL_S
            self._note_answer(cache)

    def _begin_again(self, cache: PrefixCache, error: Exception) -> None:
        """After a defect, behave as if the server had been away: read all facts again, and keep the decisions to send.

        Evidence is dropped, as it may be what has led to the defect; without it, a prompt is shared later.
        """
        note_defect("fleet")
        self._outbox.claims.clear()
        self._outbox.uses.clear()
        self._prefixes.clear()
        self._new = []
        self._windows = 0, []
        self._position = START
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._note_away(cache, f"a defect: {type(error).__name__}")

    # --- availability ---

    def _note_away(self, cache: PrefixCache, reason: str) -> None:
        metrics.FLEET_CONNECTED.set(0)
        if self._is_away != reason:
            self._is_away = reason
            self._log.error("fleet.away", reason=reason)
        if not self._is_alone and cache.epoch - self._answered_epoch > LEASE_EPOCHS:
            self._is_alone = True
            with changing_state():
                cache.learn(FleetNews(is_alone=True))
            for entry in self._prefixes.values():
                entry.shared = 0
            self._log.warning("fleet.alone", epochs=cache.epoch - self._answered_epoch)

    def _note_answer(self, cache: PrefixCache) -> None:
        metrics.FLEET_CONNECTED.set(1)
        if self._is_away is not None:
            self._is_away = None
            self._log.info("fleet.connected", rules=str(self._rules))
        self._is_alone, self._answered_epoch = False, cache.epoch

    # --- sending ---

    def _collect(self, cache: PrefixCache) -> None:
        """Move a cache's report to the outbox."""
        # Decisions that the other groups did not get would be as bad as a cache that is half changed.
        with changing_state():
            report, epoch = cache.take_report(), cache.epoch
            # A demotion ends the quarantines that led to it.
            for quarantine in report.quarantines:
                self._outbox.facts.append(self._seal_fact(FleetNews(quarantines=(quarantine,))))
            for demotion in report.demotions:
                self._outbox.facts.append(self._seal_fact(FleetNews(demotions=(demotion,))))
            self._outbox.revocations.extend(report.revocations)
        self._note_evidence(report, epoch)

    def _note_evidence(self, report: FleetReport, epoch: int) -> None:
        revoked = {revocation.scope for revocation in report.revocations}
        for entry in self._prefixes.values():
            if (entry.tenant,) in revoked:
                entry.shared = 0
        if report.probes:
            self._windows = epoch, report.probes
        self._outbox.claims.extend((claim, epoch) for claim in report.claims)
        self._outbox.uses.extend(report.uses)
        oldest = epoch - self._rules.epochs
        for key, entry in list(self._prefixes.items()):
            entry.claims = [(claim, at) for claim, at in entry.claims if at - claim.age >= oldest]
            if entry.until < epoch:
                del self._prefixes[key]
        self._new = [self._note_prefixes(claim, epoch + 1) for claim in report.interests]

    async def _exchange(self, cache: PrefixCache) -> None:
        incarnation = await self._state.incarnation()
        if incarnation != self._incarnation:
            self._report_again()
            self._position, self._incarnation = START, incarnation
        await self._send(cache.epoch)
        await self._receive(cache)
        _learn(cache, FleetNews(probes=await self._count_windows(cache.epoch)))
        # All prefixes once in each epoch, and new ones at once.
        is_new_epoch, self._looked_at = self._looked_at != cache.epoch, cache.epoch
        entries = list(self._prefixes.values()) if is_new_epoch else self._new
        _learn(cache, FleetNews(shared=await self._look_up(entries)))

    def _report_again(self) -> None:
        """Prepare to send what a server without data has to know."""
        self._outbox.facts.extendleft(reversed(self._published))
        self._outbox.pins.extendleft((ids, True) for ids in self._pins.values())
        for entry in self._prefixes.values():
            self._outbox.claims.extendleft(entry.claims)
        self._prefixes.clear()

    async def _send(self, epoch: int) -> None:
        """Send the outbox. What cannot be sent stays in it."""
        box = self._outbox
        while box.facts:
            await self._state.publish(box.facts[0])
            self._published.append(box.facts.popleft())
        while box.revocations:
            revoked = box.revocations[0]
            await self._state.revoke(self._names(revoked.scope, revoked.chains, revoked.routing), self._window_ms)
            box.revocations.popleft()
        while box.pins:
            await self._send_pin(*box.pins[0])
            box.pins.popleft()
        if not box.claims:
            # It compares the rules.
            await self._state.add_evidence((), self._rules)
        while box.claims:
            claim, at = box.claims[0]
            await self._state.add_evidence([self._evidence(claim, epoch - at)], self._rules)
            box.claims.popleft()
            entry = self._note_prefixes(claim, at - claim.age + self._rules.epochs)
            entry.claims.append((claim, at))
            self._new.append(entry)
        while box.uses:
            use = box.uses[0]
            await self._state.renew(self._names(use.scope, use.chains, use.routing), self._window_ms)
            box.uses.popleft()

    async def _count_windows(self, epoch: int) -> tuple[ProbeCounts, ...]:
        """Report the windows that have closed, and return all groups' sums; of an epoch before, they are too old."""
        reported, reports = self._windows
        if epoch != reported or not reports:
            return ()
        windows = [self._window(report) for report in reports]
        sums = await self._state.count_windows(self._group, windows, self._rules.epoch_s)
        self._windows = epoch, []
        return tuple(
            ProbeCounts(one.scope, one.chain, one.party, one.users, WindowCounts(0, 0), tries=distinct)
            if one.tries
            else ProbeCounts(one.scope, one.chain, one.party, one.users, WindowCounts(hits, distinct, *before))
            for one, (hits, distinct, *before) in zip(reports, sums, strict=True)
        )

    def _window(self, report: ProbeReport) -> NamedWindow:
        name = self._keys.window(report.scope, report.chain, report.party)
        if not report.tries:
            return NamedWindow(name, report.hits, tuple(self._keys.mark(name, user) for user in report.users))
        # Of one subject. Negative numbers stand for continuations that are not known, other ones in each group.
        name = self._keys.mark(name, b"tries", *report.users)
        tries = (self._keys.mark(name, tried, *((self._group,) if tried < 0 else ())) for tried in report.tries)
        return NamedWindow(name, 0, tuple(tries))

    @property
    def _window_ms(self) -> int:
        return self._rules.window_ms

    def _names(self, scope: tuple[str, ...], chains: Iterable[bytes], routing: bytes | None) -> list[bytes]:
        names = [self._keys.chain(scope, chain) for chain in chains]
        return names if routing is None else [*names, self._keys.routing(scope, routing)]

    def _evidence(self, claim: FleetClaim, since: int) -> NamedEvidence:
        tenant, subject = claim.subject
        names = self._names((tenant,), claim.chains, claim.routing)
        # The routing name, if there is one, is the last; its prefix is no longer than the first of the others.
        prefixes = [
            (name, self._keys.tag(name, tenant, subject), index >= claim.demoted_from)
            for index, name in enumerate(names[: len(claim.chains)])
        ]
        prefixes += [(name, self._keys.tag(name, tenant, subject), False) for name in names[len(claim.chains) :]]
        return NamedEvidence(tuple(prefixes), claim.age + since)

    def _note_prefixes(self, claim: FleetClaim, until: int) -> _Prefixes:
        tenant = claim.subject[0]
        key = tenant, claim.chains[-1]
        entry = self._prefixes.get(key)
        if entry is None or len(claim.chains) > len(entry.chains):
            names = tuple(self._names((tenant,), claim.chains, None))
            claims = [] if entry is None else entry.claims
            entry = self._prefixes[key] = _Prefixes(tenant, claim.chains, names, until, 0, claims)
        entry.until = max(entry.until, until)
        while len(self._prefixes) > _KEPT:
            del self._prefixes[next(iter(self._prefixes))]
        return entry

    async def _send_pin(self, token_ids: TokenIds, is_pinned: bool) -> None:
        name = self._pin_name(token_ids)
        packed = zlib.compress(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
        await self._state.set_pin(name, self._seal(packed) if is_pinned else None)
        if is_pinned:
            self._pins[name] = token_ids
        else:
            self._pins.pop(name, None)
        await self._route_pin(token_ids)

    async def _route_pin(self, token_ids: TokenIds) -> None:
        """Let prompts that begin like a pin be routed as sharing a prefix, or not any more."""
        digest = routing_digest(token_ids)
        if digest is not None:
            is_shared = any(routing_digest(ids) == digest for ids in self._pins.values())
            await self._state.share_forever(self._keys.routing((), digest), is_shared=is_shared)

    def _pin_name(self, token_ids: TokenIds) -> bytes:
        return self._keys.chain((), b"pin" + np.ascontiguousarray(token_ids, dtype="<i4").tobytes())

    # --- receiving ---

    async def _receive(self, cache: PrefixCache) -> None:
        """Apply other groups' pins, and at once those of their facts that this one does not have yet."""
        await self._receive_pins(cache)
        position, sealed = await self._state.read(self._position)
        for one in sealed:
            opened = self._open(one)
            if opened is None:
                continue
            try:
                fact = orjson.loads(opened)
                identity, news = fact["id"], FleetNews.from_description(fact["news"])
            except (KeyError, TypeError, ValueError):
                self._log.exception("fleet.fact_unreadable")
                continue
            if identity not in self._seen:
                # Before anything else is asked of the server, which may not answer: none is read a second time.
                _learn(cache, news)
                self._seen[identity] = None
        self._position = position
        while len(self._seen) > 4 * _KEPT:
            self._seen.popitem(last=False)

    async def _receive_pins(self, cache: PrefixCache) -> None:
        names = await self._state.pin_names()
        for name in names - self._pins.keys():
            sealed = await self._state.pin(name)
            packed = None if sealed is None else self._open(sealed)
            if packed is not None:
                token_ids = np.frombuffer(zlib.decompress(packed), "<i4").astype(np.int32)
                with changing_state():
                    self._pins[name] = token_ids
                    cache.pin(token_ids)
        for name in self._pins.keys() - names:
            with changing_state():
                cache.unpin(self._pins.pop(name))

    async def _look_up(self, entries: Sequence[_Prefixes]) -> tuple[tuple[str, bytes], ...]:
        """Return the prefixes in `entries` that the fleet has begun to share."""
        found: dict[tuple[str, bytes], None] = {}
        # Several subjects' claims of one prompt have one entry.
        distinct = {id(entry): entry for entry in entries}.values()
        while True:
            pending = [entry for entry in distinct if entry.shared < len(entry.names)]
            names = list({entry.names[entry.shared]: None for entry in pending})
            shared = await self._state.look_up(names) if names else set()
            for entry in pending:
                if entry.names[entry.shared] in shared:
                    # With the first one, under which the cache knows the nodes.
                    found[entry.tenant, entry.chains[entry.shared]] = None
                    found[entry.tenant, entry.chains[0]] = None
                    entry.shared += 1
            if not shared:
                return tuple(found)

    # --- sealing ---

    def _seal_fact(self, news: FleetNews) -> bytes:
        # The cache that the news came from has it already.
        identity = secrets.token_hex(8)
        self._seen[identity] = None
        return self._seal(orjson.dumps({"id": identity, "news": news.described()}))

    def _seal(self, text: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, text, None)

    def _open(self, sealed: bytes) -> bytes | None:
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError):
            self._log.error("fleet.fact_forged")
            return None


def _learn(cache: PrefixCache, news: FleetNews) -> None:
    if news.shared or news.demotions or news.quarantines or news.probes:
        with changing_state():
            cache.learn(news)
