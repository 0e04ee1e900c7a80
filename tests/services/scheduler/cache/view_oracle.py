"""What each user may see, page by page and in so few words that it is plainly right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.cache.config import CacheConfig

# All tokens from the first one to a page's last.
Path = tuple[int, ...]


@dataclass(slots=True)
class Private:
    evidence: int | None
    generation: int = 0
    no_promote: bool = False
    sessions: set[str] | None = None


@dataclass(slots=True)
class Public:
    creators: dict[str, int]
    generation: int
    epoch: int
    hits: int = 0
    users: set[str] = field(default_factory=set)
    previous_hits: int = 0
    previous_users: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    pinned: bool = False

    def roll(self, epoch: int) -> None:
        gap = epoch - self.epoch
        if gap:
            self.previous_hits, self.previous_users = (self.hits, len(self.users)) if gap == 1 else (0, 0)
            self.hits, self.users, self.epoch = 0, set(), epoch


@dataclass(slots=True, eq=False)
class Held:
    """What a row's lease stands for: the first `length` tokens."""

    user: str
    ids: list[int]
    length: int
    is_closed: bool = False
    session: str | None = None


class ViewOracle:
    def __init__(self, config: CacheConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self.epoch = 0
        self.private: dict[str, dict[Path, Private]] = {}
        self.public: dict[Path, Public] = {}
        self.demoted: dict[Path, int] = {}
        self.held: list[Held] = []
        self.pins: list[Path] = []
        self.pending_pins: list[Path] = []

    def paths(self, ids: list[int], limit: int | None = None) -> list[Path]:
        limit = len(ids) if limit is None else limit
        return [tuple(ids[:end]) for end in range(self.page_size, limit + 1, self.page_size)]

    def sees(self, user: str, path: Path) -> bool:
        if path in self.public:
            return user not in self.public[path].quarantined
        return path in self.private.get(user, {})

    def match(self, user: str, ids: list[int]) -> int:
        length = 0
        for path in self.paths(ids, len(ids) - 1):
            if not self.sees(user, path):
                break
            length = len(path)
        return length

    def commit(self, user: str, ids: list[int], *, repeated: bool, session: str | None) -> Held:
        held = Held(user, ids, self.match(user, ids), session=session)
        self.tag(held)
        for path in self.paths(ids, held.length):
            if path in self.public and not repeated and user not in self.public[path].creators:
                public = self.public[path]
                public.roll(self.epoch)
                public.hits += 1
                public.users.add(user)
        self.held.append(held)
        return held

    def insert(self, held: Held, ids: list[int], prompt_tokens: int, *, may_promote: bool) -> None:
        if held.is_closed:
            return
        mine = self.private.setdefault(held.user, {})
        whole_prompt = prompt_tokens // self.page_size * self.page_size
        for path in self.paths(ids)[held.length // self.page_size :]:
            evidence = self.epoch if may_promote and len(path) <= whole_prompt else None
            if path in self.public:
                self.public[path].creators[held.user] = self.epoch
                self.public[path].quarantined.pop(held.user, None)
            elif path not in mine and self.is_pinned(path):
                above = path[: -self.page_size]
                generation = self.public[above].generation if above else 0
                self.public[path] = Public({held.user: self.epoch}, generation, self.epoch, pinned=True)
            elif path not in mine:
                sessions = None if held.session is None else {held.session}
                mine[path] = Private(evidence, no_promote=not may_promote, sessions=sessions)
            elif evidence is not None:
                mine[path].evidence = evidence
        held.ids = ids
        held.length = max(held.length, len(ids) // self.page_size * self.page_size)
        self.tag(held)

    def tag(self, held: Held) -> None:
        """Note whose a held path is; what requests without session have used is nobody's alone."""
        for path in self.paths(held.ids, held.length):
            entry = self.private.get(held.user, {}).get(path)
            if entry is not None and entry.sessions is not None:
                entry.sessions = None if held.session is None else entry.sessions | {held.session}

    def release(self, held: Held) -> None:
        self.held.remove(held)

    def locked(self) -> set[tuple[str | None, Path]]:
        found: set[tuple[str | None, Path]] = set()
        for held in self.held:
            found.update(self.key(held.user, path) for path in self.paths(held.ids, held.length))
        return found

    def key(self, user: str, path: Path) -> tuple[str | None, Path]:
        return (None if path in self.public else user), path

    def entries(self) -> set[tuple[str | None, Path]]:
        found: set[tuple[str | None, Path]] = {(None, path) for path in self.public}
        found.update((user, path) for user, mine in self.private.items() for path in mine)
        return found

    def drop(self, entries: set[tuple[str | None, Path]]) -> None:
        for user, path in entries:
            if user is None:
                del self.public[path]
            else:
                del self.private[user][path]

    def forget(self, user: str, session: str | None) -> None:
        mine = self.private.pop(user, {})
        if session is not None:
            for entry in mine.values():
                entry.sessions = None if entry.sessions is None else entry.sessions - {session}
            self.private[user] = {path: entry for path, entry in mine.items() if entry.sessions != set()}
        for held in self.held:
            if held.user == user and (held.is_closed or session in (None, held.session)):
                held.is_closed = True
                left = {*self.public, *self.private.get(user, {})}
                held.length = sum(self.page_size for path in self.paths(held.ids, held.length) if path in left)
        if session is not None:
            return
        for public in self.public.values():
            public.creators.pop(user, None)

    # --- pins ---

    def pin(self, ids: list[int]) -> int:
        path = tuple(ids[: len(ids) // self.page_size * self.page_size])
        if path and path not in self.pins + self.pending_pins:
            self.pending_pins.append(path)
        return len(path)

    def unpin(self, ids: list[int]) -> bool:
        path = tuple(ids[: len(ids) // self.page_size * self.page_size])
        if path in self.pending_pins:
            self.pending_pins.remove(path)
            return True
        if path not in self.pins:
            return False
        self.pins.remove(path)
        for path, public in self.public.items():
            public.pinned = public.pinned and self.is_pinned(path)
        return True

    def is_pinned(self, path: Path) -> bool:
        return any(pin[: len(path)] == path for pin in self.pins)

    def publish_pins(self) -> None:
        self.pins += self.pending_pins
        self.pending_pins = []
        for pin in self.pins:
            for path in self.paths(list(pin)):
                owners = {user: mine[path] for user, mine in self.private.items() if path in mine}
                if path in self.public:
                    self.public[path].pinned = True
                elif owners:
                    self.publish(path, owners, max(entry.generation for entry in owners.values()))
                    self.public[path].pinned = True
                else:
                    break

    # --- epochs ---

    def advance(self, epoch: int, soft: set[Path]) -> None:
        for path in sorted(self.public, key=len):
            if path in self.public and not self.public[path].pinned and (suspects := self.suspects(self.public[path])):
                self.quarantine(path, suspects, epoch, soft)
        for public in self.public.values():
            if public.hits:
                public.roll(epoch)
        self.epoch = epoch
        self.publish_pins()
        while self.promote_one():
            pass

    def suspects(self, public: Public) -> set[str]:
        config = self.config
        enough = config.promotion_subjects * (config.repromotion_factor if public.generation else 1)
        users = len(public.users)
        if public.epoch != self.epoch or public.hits < config.hit_min or users >= enough:
            return set()
        if users > config.diversity_min * public.hits:
            return set()
        was_low = (
            public.previous_hits >= config.hit_min
            and public.previous_users < enough
            and public.previous_users <= config.diversity_min * public.previous_hits
        )
        jumped = (
            public.previous_users <= 1
            and public.hits >= config.jump_factor * max(public.previous_hits, 1)
            and len(public.creators) <= config.few_creators
        )
        return public.users if was_low or jumped else set()

    def quarantine(self, path: Path, suspects: set[str], epoch: int, soft: set[Path]) -> None:
        public = self.public[path]
        public.quarantined.update(dict.fromkeys(suspects, epoch))
        recent = sum(since >= epoch - self.config.quarantine_epochs for since in public.quarantined.values())
        if recent >= self.config.demotion_quarantines:
            self.demote(path, soft)

    def demote(self, top: Path, soft: set[Path]) -> None:
        below = sorted((path for path in self.public if path[: len(top)] == top), key=len)
        self.demoted[top] = self.public[top].generation + 1
        gone = {path: self.public.pop(path) for path in below}
        for path, public in gone.items():
            for user, evidence in public.creators.items():
                mine = self.private.setdefault(user, {})
                is_reached = path == top or path[: -self.page_size] in mine
                if is_reached and path not in soft:
                    mine[path] = Private(evidence, public.generation + 1)
        for mine in self.private.values():
            for path in sorted(mine, key=len):
                if len(path) > len(top) and path[: len(top)] == top and path[: -self.page_size] not in mine:
                    del mine[path]
        for held in self.held:
            path = tuple(held.ids[: held.length])
            if path[: len(top)] == top and path not in self.private.get(held.user, {}):
                held.is_closed = True
                held.length = len(top) - self.page_size

    def promote_one(self) -> bool:
        """Publish one page that has the evidence and whose parent is public."""
        for path in sorted(
            {path for mine in self.private.values() for path in mine}, key=lambda path: (len(path), path)
        ):
            above = path[: -self.page_size]
            if above and above not in self.public:
                continue
            owners = {user: mine[path] for user, mine in self.private.items() if path in mine}
            evidence = self.evidence(owners)
            generation = max(
                self.public[above].generation if above else 0,
                self.demoted.get(path, 0),
                *(entry.generation for entry in owners.values()),
            )
            factor = self.config.repromotion_factor if generation else 1
            if len(evidence) >= self.config.promotion_subjects * factor:
                self.publish(path, owners, generation)
                return True
        return False

    def evidence(self, owners: dict[str, Private]) -> dict[str, int]:
        oldest = self.epoch - self.config.promotion_epochs
        return {
            user: entry.evidence
            for user, entry in owners.items()
            if entry.evidence is not None and not entry.no_promote and entry.evidence >= oldest
        }

    def publish(self, path: Path, owners: dict[str, Private], generation: int) -> None:
        evidence = self.evidence(owners)
        creators = {user: evidence.get(user, self.epoch) for user in owners}
        self.public[path] = Public(creators, generation, self.epoch)
        for user in owners:
            del self.private[user][path]

    # --- comparison ---

    def standing(self) -> dict[tuple[str | None, Path], tuple[object, ...]]:
        found: dict[tuple[str | None, Path], tuple[object, ...]] = {}
        for user, mine in self.private.items():
            found.update(
                ((user, path), (one.evidence, one.no_promote, one.generation, one.sessions))
                for path, one in mine.items()
            )
        for path, public in self.public.items():
            hits = public.hits if public.epoch == self.epoch else 0
            found[None, path] = (set(public.creators), hits, public.generation, public.pinned)
        return found
