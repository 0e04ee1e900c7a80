"""Repeats a decision log, and finds the first operation whose outcome differs.

A log is lines of JSON: a header that describes the cache, then one line per operation. A process that restarts appends
another header, which starts a new section; a process that was killed may have left a partial line before that, or at
the end.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import orjson

from common.limits import Limits
from common.transfers import TransferAck, TransferId
from common.types import Sharing, SnapshotSlot, Subject, View
from services.scheduler.cache.config import CacheConfig, EvictionPolicy, PrivacyProfile
from services.scheduler.cache.debug.recorded import RecordedCache
from services.scheduler.cache.factory import CacheName, make_cache
from services.scheduler.cache.object_keys import ObjectKeys
from services.scheduler.cache.pages import PageAllocator
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.sharing.fleet import FleetNews
from services.scheduler.cache.tiers.config import HostConfig, PrefetchPolicy, StorageConfig, WritePolicy
from services.scheduler.cache.types import CandidateId, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from common.types import TokenIds
    from services.scheduler.cache.debug.decisions import Decision, Facts
    from services.scheduler.cache.interface import PrefixCache
    from services.scheduler.cache.state_snapshots import SnapshotEntry, StateSnapshots
    from services.scheduler.cache.tiers.host_tier import HostTier
    from services.scheduler.cache.types import LockId, PrefixLock, Scope

VERSION = 3
HEADER, END = "open", "lost"


class LogError(ValueError):
    """A line does not belong to a decision log."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The point where a replay and its log diverge: `logged` and `replayed` are the same operation's lines, decoded."""

    line: int
    operation: int
    logged: Facts
    replayed: Facts

    @property
    def fields(self) -> list[str]:
        """The differing fields, as `part.name`."""
        found = []
        for part in ("given", "outcome"):
            ours, theirs = self.logged.get(part, {}), self.replayed.get(part, {})
            found += [f"{part}.{name}" for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if self.logged.get("events") != self.replayed.get("events"):
            found.append("events")
        return found


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay. `is_lost`: the log ends where its writer was killed or could not keep up."""

    operations: int
    starts: int
    nodes: int
    cached_pages: int
    is_lost: bool = False
    difference: Difference | None = None


def encode_header(
    name: CacheName,
    page_size: int,
    capacity: int,
    config: CacheConfig,
    host: HostConfig | None = None,
    storage: StorageConfig | None = None,
) -> bytes:
    """Return the first line of a log."""
    rules = {**asdict(config), **asdict(config.profile), "mode": config.mode.value, "eviction": config.eviction.value}
    del rules["profile"]  # its constants are listed among the other rules
    opened: Facts = {
        "operation": HEADER,
        "version": VERSION,
        "cache": name,
        "page_size": page_size,
        "capacity": capacity,
    }
    if host is not None and host.pages:
        opened["host"] = {**asdict(host), "policy": host.policy.value}
    if storage is not None:
        opened["storage"] = {**asdict(storage), "policy": storage.policy.value}
    return orjson.dumps({**opened, "config": rules})


def encode(number: int, decision: Decision) -> bytes:
    """Return the line of the operation with this number, counted from 1 after each header."""
    facts = {
        "number": number,
        "operation": decision.operation,
        "given": decision.given,
        "outcome": decision.outcome,
        "events": decision.events,
    }
    return orjson.dumps(facts, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_end() -> bytes:
    """Return the line that ends a log whose writer has lost later operations."""
    return orjson.dumps({"operation": END})


def replay(lines: Iterable[bytes]) -> ReplayResult:
    """Repeat the operations of the log, up to the first difference.

    Raises:
        LogError: a line cannot be read, or is invalid at its position.
    """
    run: _Run | None = None
    operations = starts = 0
    is_lost = False
    cut: LogError | None = None
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            facts = _decode(line, at)
        except LogError as error:
            cut = cut or error
            continue
        if cut is not None and facts.get("operation") != HEADER:
            raise cut
        operation = facts.get("operation")
        if operation == HEADER:
            run, is_lost, cut = _open(facts, at), False, None
            starts += 1
        elif operation == END:
            is_lost = True
        elif run is None:
            raise LogError(f"line {at}: the log has to begin with a header, which describes its cache")
        else:
            operations += 1
            difference = run.compare(facts, line.strip(), at)
            if difference is not None:
                return ReplayResult(operations, starts, *run.totals, is_lost, difference)
    if run is None:
        raise cut or LogError("the log is empty")
    return ReplayResult(operations, starts, *run.totals, is_lost or cut is not None)


class _Run:
    """A cache that follows a log from one of its headers."""

    def __init__(self, make: Callable[[PageAllocator, SharingChoices], PrefixCache], allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._decisions: list[Decision] = []
        self._sharing: dict[str, Sharing] = {}
        choices = SharingChoices(lambda tenant: self._sharing.get(tenant, Sharing.TENANT))
        self._cache = RecordedCache(make(allocator, choices), allocator, self._decisions.append, choices)
        self._locks: dict[LockId, PrefixLock] = {}
        self._ids: dict[LockId, TokenIds] = {}
        # Snapshots that a session has pinned, or that are lent, by their numbers.
        self._entries: dict[int, SnapshotEntry] = {}
        self._operations: dict[str, Callable[[Facts], object]] = {
            "allocate": lambda given: allocator.try_allocate(given["count"]),
            "give_back": lambda given: allocator.release(_int32(given["pages"])),
            "exchange": lambda given: allocator.exchange(_int32(given["old"]), _int32(given["new"])),
            "restore": lambda given: allocator.restore(_int32(given["counts"])),
            "commit": self._commit,
            "commit_nothing": lambda given: self._open(self._cache.commit_nothing(_view(given)), _int32([])),
            "insert": self._insert,
            "release": lambda given: self._cache.release(self._locks.pop(given["lock"])),
            "evict": lambda given: self._cache.evict(given["pages"]),
            "flush": lambda given: self._cache.flush(),
            "forget": lambda given: self._cache.forget(Subject(*given["subject"]), given["session"]),
            "advance": lambda given: self._cache.advance(given["epoch"]),
            "share": lambda _given: self._cache.share(),
            "adopt": lambda given: self._cache.adopt(Limits.model_validate(given["limits"])),
            "pin": lambda given: self._cache.pin(_int32(given["token_ids"])),
            "unpin": lambda given: self._cache.unpin(_int32(given["token_ids"])),
            "take_candidates": lambda given: self._cache.take_candidates(),
            "forget_verdicts": lambda given: self._cache.forget_verdicts(),
            "learn": lambda given: self._cache.learn(FleetNews.from_description(given)),
            "load": self._load,
            "back_up_all": lambda given: self._host.back_up_all(),
            "plan_backups": lambda given: self._host.plan_backups(),
            "prefetch": lambda given: self._host.prefetch(
                _view(given),
                _int32(given["token_ids"]),
                given.get("max_pages"),
                given.get("least_pages", 0),
                is_batch=given.get("is_batch", False),
            ),
            "end_prefetch": self._end_prefetch,
            "plan_storage": lambda given: self._host.plan_storage(given["now"]),
            "finish": lambda given: self._host.finish(
                TransferAck(TransferId(given["transfer"]), given["done_pages"]), given.get("now", 0.0)
            ),
            "lose_workers": lambda given: self._host.forget_all(),
            "resolve": lambda given: self._cache.resolve(CandidateId(given["candidate"]), given["allowed_tokens"]),
            "fill_slot": lambda _given: self._states.try_allocate(),
            "free_slot": lambda given: self._states.release(SnapshotSlot(given["slot"])),
            "keep_slot": lambda given: self._states.attach(
                given["page"], tuple(given["scope"]), SnapshotSlot(given["slot"])
            ),
            "lend_snapshot": lambda given: self._note(
                self._states.try_lend_last(_int32(given["pages"]), tuple(given["scope"]))
            ),
            "take_back_snapshot": lambda given: self._states.give_back(self._entries[given["entry"]]),
            "pin_snapshot": lambda given: self._note(self._states.pin(_int32(given["pages"]), tuple(given["scope"]))),
            "unpin_snapshot": lambda given: self._states.unpin(self._entries[given["entry"]]),
            "repair_slots": lambda _given: self._states.repair(),
        }

    @property
    def totals(self) -> tuple[int, int]:
        """Number of nodes, and of allocated pages."""
        nodes = list(self._cache.dump())
        return len(nodes), self._allocator.capacity - self._allocator.free_pages

    def compare(self, facts: Facts, line: bytes, at: int) -> Difference | None:
        """Repeat the operation of one line; return the difference of its outcome, if there is one."""
        number = facts.get("number")
        operation = self._operations.get(facts.get("operation", ""))
        if operation is None or not isinstance(number, int):
            raise LogError(f"line {at}: unknown operation {facts.get('operation')!r}")
        self._decisions.clear()
        try:
            choices = facts["given"].get("sharing", {})
            self._sharing.update((tenant, Sharing(choice)) for tenant, choice in choices.items())
            operation(facts["given"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, AssertionError, OverflowError) as error:
            # The logged operation is impossible in this state.
            failure: Facts = {"given": facts.get("given"), "outcome": {"error": repr(error)}, "events": []}
            return Difference(at, number, facts, failure)
        replayed = [encode(number, decision) for decision in self._decisions]
        if replayed == [line]:
            return None
        shown: Facts = orjson.loads(replayed[0]) if replayed else {"outcome": {"error": "nothing to do"}}
        return None if shown == facts else Difference(at, number, facts, shown)

    @property
    def _host(self) -> HostTier:
        host = self._cache.host
        if host is None:
            raise KeyError("the header names no host tier")
        return host

    @property
    def _states(self) -> StateSnapshots:
        states = self._cache.snapshots
        if states is None:
            raise KeyError("the header names no snapshots")
        return states

    def _note(self, entry: SnapshotEntry | None) -> None:
        if entry is not None:
            self._entries[entry.number] = entry

    def _end_prefetch(self, given: Facts) -> None:
        fetch = self._host.storage.find(given["fetch"]) if self._host.storage else None
        if fetch is None:
            raise KeyError(f"no look-up {given['fetch']}")
        self._host.end_prefetch(fetch)

    def _load(self, given: Facts) -> None:
        def allocate(count: int) -> TokenIds | None:
            # Evicts as the scheduler does.
            if count > self._allocator.free_pages:
                self._cache.evict(count - self._allocator.free_pages)
            return self._allocator.try_allocate(count)

        self._host.load(_view(given), _int32(given["token_ids"]), allocate)

    def _commit(self, given: Facts) -> None:
        ids = _int32(given["token_ids"])
        lock = self._cache.commit(
            _view(given),
            ids,
            repeated=given["repeated"],
            may_promote=given["may_promote"],
            priority=given["priority"],
            session=given["session"],
        )
        self._open(lock, ids)

    def _open(self, lock: PrefixLock, ids: TokenIds) -> None:
        self._locks[lock.lock_id] = lock
        self._ids[lock.lock_id] = ids

    def _insert(self, given: Facts) -> None:
        lock = self._locks.pop(given["lock"])
        ids = np.concatenate([self._ids.pop(lock.lock_id), _int32(given["new_ids"])])
        table = _int32(given["table"])
        insertion = self._cache.insert(lock, ids[: given["tokens"]], table, given["prompt_tokens"])
        self._open(insertion.lock, ids)


def _decode(line: bytes, at: int) -> Facts:
    try:
        facts = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LogError(f"line {at}: {error}") from error
    if not isinstance(facts, dict):
        raise LogError(f"line {at}: no JSON object")
    return facts


class _NoNames:
    """Stands in for names in storage, which are not recorded: a replay stores nothing."""

    def keys(self, scope: Scope, hashes: Iterable[bytes]) -> ObjectKeys:
        return ObjectKeys(tuple(b"" for _ in hashes))

    def revoke(self, scope: Scope) -> None:
        """Do nothing."""

    def together(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def _open(facts: Facts, at: int) -> _Run:
    if facts.get("version") != VERSION:
        raise LogError(f"line {at}: version {facts.get('version')!r}, known is {VERSION}")
    try:
        name, rules = facts["cache"], dict(facts["config"])
        if name not in get_args(CacheName):
            raise LogError(f"line {at}: unknown cache {name!r}")
        rules.pop("mode")
        profile = PrivacyProfile(**{field.name: rules.pop(field.name) for field in fields(PrivacyProfile)})
        config = CacheConfig(**{**rules, "eviction": EvictionPolicy(rules["eviction"]), "profile": profile})
        allocator = PageAllocator(facts["capacity"])
        host = None
        if "host" in facts:
            host = HostConfig(**{**facts["host"], "policy": WritePolicy(facts["host"]["policy"])})
        page_size = facts["page_size"]
        storage = None
        if "storage" in facts:
            storage = StorageConfig(**{**facts["storage"], "policy": PrefetchPolicy(facts["storage"]["policy"])})

        def make(allocator: PageAllocator, choices: SharingChoices) -> PrefixCache:
            cache = make_cache(name, allocator, page_size, config, host, choices)
            if storage is not None and cache.host is not None:
                cache.host.add_storage(storage, _NoNames())
            return cache

        return _Run(make, allocator)
    except (KeyError, TypeError, ValueError) as error:
        raise LogError(f"line {at}: the header lacks or misnames something: {error!r}") from error


def _int32(values: Any) -> TokenIds:  # JSON's own types
    array = np.array(values, np.int32)
    if array.ndim != 1:
        raise ValueError(f"no list of numbers: {values!r}")
    return array


def _view(given: Facts) -> View:
    return view_of(tuple(given["view"]))
