"""What each view has, page by page and in so few words that it is plainly right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import Sharing

if TYPE_CHECKING:
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.types import Scope, SubjectKey

# All tokens from the first one to a page's last.
Path = tuple[int, ...]
Entry = tuple["Scope", Path]


@dataclass(slots=True)
class Private:
    evidence: int | None
    generation: int = 0
    no_promote: bool = False
    sessions: set[str] | None = None


@dataclass(slots=True)
class Use:
    hits: int = 0
    users: set[SubjectKey] = field(default_factory=set)
    previous_hits: int = 0
    previous_users: int = 0


@dataclass(slots=True)
class Shared:
    # By subject: when it last computed the page, and in which of its views.
    creators: dict[SubjectKey, tuple[int, tuple[str, ...]]]
    generation: int
    epoch: int
    parties: dict[Scope, Use] = field(default_factory=dict)
    quarantined: dict[SubjectKey, int] = field(default_factory=dict)
    quarantined_tenants: dict[str, int] = field(default_factory=dict)
    # The epochs in which creators last computed it by requests whose text may be shared.
    proofs: dict[SubjectKey, int] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)
    pinned: bool = False

    @property
    def hits(self) -> int:
        return sum(use.hits for use in self.parties.values())

    def roll(self, epoch: int) -> None:
        gap = epoch - self.epoch
        if gap:
            closed = self.parties if gap == 1 else {}
            self.parties = {party: Use(0, set(), use.hits, len(use.users)) for party, use in closed.items() if use.hits}
            self.epoch = epoch

    def add_creator(self, view: Scope, epoch: int) -> None:
        before, salts = self.creators.get(view[:2], (epoch, ()))
        salts = (*(salt for salt in salts if salt != view[2]), view[2])
        self.creators[view[:2]] = max(before, epoch), salts


@dataclass(slots=True, eq=False)
class Held:
    """What a row's lock stands for: the first `length` tokens."""

    view: Scope
    ids: list[int]
    length: int
    is_closed: bool = False
    session: str | None = None


class ViewOracle:
    def __init__(self, config: CacheConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self.epoch = 0
        self.sharing: dict[str, Sharing] = {}
        self.private: dict[Scope, dict[Path, Private]] = {}
        # Of the public, (), and of tenants.
        self.shared: dict[Scope, dict[Path, Shared]] = {(): {}}
        self.demoted: dict[Entry, int] = {}
        self.held: list[Held] = []
        self.pins: list[Path] = []
        self.pending_pins: list[Path] = []

    @property
    def public(self) -> dict[Path, Shared]:
        return self.shared[()]

    def of_tenant(self, tenant: str) -> dict[Path, Shared]:
        return self.shared.setdefault((tenant,), {})

    def choice(self, tenant: str) -> Sharing:
        return self.sharing.get(tenant, Sharing.TENANT)

    def paths(self, ids: list[int], limit: int | None = None) -> list[Path]:
        limit = len(ids) if limit is None else limit
        return [tuple(ids[:end]) for end in range(self.page_size, limit + 1, self.page_size)]

    def scope_at(self, view: Scope, path: Path) -> Scope | None:
        """Return whose page a view has there, hidden or not."""
        for scope in ((), view[:1]):
            if path in self.shared.get(scope, {}):
                return scope
        return view if path in self.private.get(view, {}) else None

    def sees(self, view: Scope, path: Path) -> bool:
        scope = self.scope_at(view, path)
        if scope is None or scope == view:
            return scope is not None
        page, subject = self.shared[scope][path], view[:2]
        if subject in page.quarantined:
            return False
        return view[0] not in page.quarantined_tenants or subject in page.creators

    def match(self, view: Scope, ids: list[int]) -> int:
        length = 0
        for path in self.paths(ids, len(ids) - 1):
            if not self.sees(view, path):
                break
            length = len(path)
        return length

    def commit(self, view: Scope, ids: list[int], *, repeated: bool, session: str | None) -> Held:
        held = Held(view, ids, self.match(view, ids), session=session)
        self.tag(held)
        party = view[:2] if self.choice(view[0]) is Sharing.NONE else view[:1]
        for path in [] if repeated else self.paths(ids, held.length):
            scope = self.scope_at(view, path)
            assert scope is not None
            if scope != view and view[:2] not in (page := self.shared[scope][path]).creators:
                page.roll(self.epoch)
                use = page.parties.setdefault(party, Use())
                use.hits += 1
                use.users.add(view[:2])
        self.held.append(held)
        return held

    def insert(self, held: Held, ids: list[int], prompt_tokens: int, *, may_promote: bool) -> None:
        if held.is_closed:
            return
        view = held.view
        mine = self.private.setdefault(view, {})
        whole_prompt = prompt_tokens // self.page_size * self.page_size
        is_evidence = may_promote and self.choice(view[0]) is not Sharing.NONE
        for path in self.paths(ids)[held.length // self.page_size :]:
            evidence = self.epoch if is_evidence and len(path) <= whole_prompt else None
            scope = self.scope_at(view, path)
            if scope == view:
                if evidence is not None:
                    mine[path].evidence = evidence
            elif scope is not None:
                page = self.shared[scope][path]
                page.add_creator(view, self.epoch)
                if is_evidence:
                    page.proofs[view[:2]] = self.epoch
                page.quarantined.pop(view[:2], None)
            elif self.is_pinned(path):
                above = path[: -self.page_size]
                generation = self.public[above].generation if above else 0
                self.public[path] = Shared({}, generation, self.epoch, pinned=True)
                self.public[path].add_creator(view, self.epoch)
            else:
                sessions = None if held.session is None else {held.session}
                mine[path] = Private(evidence, no_promote=not may_promote, sessions=sessions)
        held.ids = ids
        held.length = max(held.length, len(ids) // self.page_size * self.page_size)
        self.tag(held)

    def tag(self, held: Held) -> None:
        """Note whose a held path is; what requests without session have used is of no session alone."""
        for path in self.paths(held.ids, held.length):
            entry = self.private.get(held.view, {}).get(path)
            if entry is not None and entry.sessions is not None:
                entry.sessions = None if held.session is None else entry.sessions | {held.session}

    def release(self, held: Held) -> None:
        self.held.remove(held)

    def locked(self) -> set[Entry]:
        return {
            (self.scope_at(held.view, path) or (), path)
            for held in self.held
            for path in self.paths(held.ids, held.length)
        }

    def entries(self) -> set[Entry]:
        found: set[Entry] = {(scope, path) for scope, pages in self.shared.items() for path in pages}
        found.update((view, path) for view, mine in self.private.items() for path in mine)
        return found

    def drop(self, entries: set[Entry]) -> None:
        for scope, path in entries:
            if len(scope) < 3:
                del self.shared[scope][path]
            else:
                del self.private[scope][path]

    def forget(self, subject: SubjectKey, session: str | None) -> None:
        for view in [view for view in self.private if view[:2] == subject]:
            mine = self.private.pop(view)
            if session is not None:
                for entry in mine.values():
                    entry.sessions = None if entry.sessions is None else entry.sessions - {session}
                self.private[view] = {path: entry for path, entry in mine.items() if entry.sessions != set()}
        for held in self.held:
            if held.view[:2] == subject and (held.is_closed or session in (None, held.session)):
                held.is_closed = True
                left = [
                    path for path in self.paths(held.ids, held.length) if self.scope_at(held.view, path) is not None
                ]
                held.length = len(left) * self.page_size
        if session is None:
            for scope in ((), subject[:1]):
                for page in self.shared.get(scope, {}).values():
                    page.creators.pop(subject, None)
                    page.proofs.pop(subject, None)

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
        for path, page in self.public.items():
            page.pinned = page.pinned and self.is_pinned(path)
        return True

    def is_pinned(self, path: Path) -> bool:
        return any(pin[: len(path)] == path for pin in self.pins)

    def publish_pins(self) -> None:
        self.pins += self.pending_pins
        self.pending_pins = []
        for pin in self.pins:
            for path in self.paths(list(pin)):
                above = path[: -self.page_size]
                if path in self.public:
                    self.public[path].pinned = True
                elif any(entry[1] == path for entry in self.entries()):
                    self.share((), path, self.public[above].generation if above else 0)
                    self.public[path].pinned = True
                else:
                    break

    # --- epochs ---

    def advance(self, epoch: int, soft: set[Entry], sharing: dict[str, Sharing]) -> None:
        before, self.epoch = self.epoch, epoch
        changed = {tenant for tenant in sharing if sharing[tenant] is not self.choice(tenant)}
        self.sharing = dict(sharing)
        for tenant in changed:
            if sharing[tenant] is Sharing.NONE:
                for path in sorted(self.of_tenant(tenant), key=len):
                    if path in self.of_tenant(tenant):
                        self.demote((tenant,), path, soft, is_suspect=False)
        if self.config.share_across_tenants:
            self.withdraw(soft)
        self.close_windows(before, soft)
        self.reach_boundary()

    def reach_boundary(self) -> None:
        self.publish_pins()
        while self.promote_one():
            pass

    def withdraw(self, soft: set[Entry]) -> None:
        for path in sorted(self.public, key=len):
            page = self.public.get(path)
            if page is None or page.pinned or not page.tenants:
                continue
            if sum(self.choice(tenant) is Sharing.GLOBAL for tenant in page.tenants) < 2:
                self.demote((), path, soft, is_suspect=False)

    def close_windows(self, closing: int, soft: set[Entry]) -> None:
        suspects: dict[Entry, set[SubjectKey]] = {}
        for scope, pages in self.shared.items():
            for path, page in pages.items():
                if not page.pinned and page.epoch == closing:
                    suspects[scope, path] = self.suspects(page)
                if page.hits:
                    page.roll(self.epoch)
                required = self.config.promotion_subjects * self.config.profile.repromotion_factor
                for tenant, since in list(page.quarantined_tenants.items()):
                    proofs = [made for subject, made in page.proofs.items() if subject[0] == tenant]
                    if sum(made >= since for made in proofs) >= required:
                        del page.quarantined_tenants[tenant]
        found = sorted((entry for entry, them in suspects.items() if them), key=lambda entry: len(entry[1]))
        for scope, path in found:
            self.shared[scope][path].quarantined.update(dict.fromkeys(suspects[scope, path], self.epoch))
        for scope, path in found:
            if path in self.shared[scope]:
                self.judge(scope, path, {subject[0] for subject in suspects[scope, path]}, soft)

    def suspects(self, page: Shared) -> set[SubjectKey]:
        config, found = self.config, set()
        enough = config.promotion_subjects * (config.profile.repromotion_factor if page.generation else 1)
        for party, use in page.parties.items():
            users = len(use.users)
            if use.hits < config.profile.hit_min or users >= enough or users > config.profile.diversity_min * use.hits:
                continue
            was_low = (
                use.previous_hits >= config.profile.hit_min
                and use.previous_users < enough
                and use.previous_users <= config.profile.diversity_min * use.previous_hits
            )
            jumped = (
                use.previous_users <= 1
                and use.hits >= config.profile.jump_factor * max(use.previous_hits, 1)
                and sum(subject[: len(party)] == party for subject in page.creators) <= config.profile.few_creators
            )
            if was_low or jumped:
                found |= use.users
        return found

    def judge(self, scope: Scope, path: Path, tenants: set[str], soft: set[Entry]) -> None:
        page, oldest = self.shared[scope][path], self.epoch - self.config.profile.quarantine_epochs
        for tenant in tenants:
            recent = [since for subject, since in page.quarantined.items() if subject[0] == tenant and since >= oldest]
            if len(recent) < self.config.profile.demotion_quarantines:
                continue
            if scope:
                self.demote(scope, path, soft)
            elif self.choice(tenant) is not Sharing.NONE:
                page.quarantined_tenants[tenant] = self.epoch
        if not scope:
            whole = sum(since >= oldest for since in page.quarantined_tenants.values())
            if whole >= self.config.profile.demotion_tenants:
                self.demote(scope, path, soft)

    def demote(self, scope: Scope, top: Path, soft: set[Entry], *, is_suspect: bool = True) -> None:
        pages = self.shared[scope]
        below = sorted((path for path in pages if path[: len(top)] == top), key=len)
        if is_suspect:
            self.demoted[scope, top] = pages[top].generation + 1
        gone = {path: pages.pop(path) for path in below}
        holders = self.holders(gone) if not scope else {path: set() for path in below}
        for path, page in gone.items():
            if (scope, path) not in soft:
                self.inherit(scope, path, page, holders[path], top, generation=page.generation + is_suspect)
        self.drop_unreached(top)
        for held in self.held:
            path = tuple(held.ids[: held.length])
            if path[: len(top)] == top and self.scope_at(held.view, path) is None:
                held.is_closed = True
                held.length = len(top) - self.page_size
        for path, page in gone.items():
            for tenant in page.quarantined_tenants:
                if path in self.of_tenant(tenant):
                    self.demote((tenant,), path, soft)

    def inherit(self, scope: Scope, path: Path, page: Shared, tenants: set[str], top: Path, generation: int) -> None:
        """Give a demoted page to `tenants`, and to creators of others, where they have what stands before it."""
        above = path[: -self.page_size]
        for tenant in tenants:
            if path == top or above in self.of_tenant(tenant):
                self.of_tenant(tenant)[path] = self.given_back(page, tenant)
        for (tenant, name), (made, salts) in page.creators.items():
            for view in [] if tenant in tenants else [(tenant, name, salt) for salt in salts]:
                if path == top or self.scope_at(view, above) is not None:
                    evidence = None if self.choice(tenant) is Sharing.NONE else made
                    self.private.setdefault(view, {})[path] = Private(evidence, generation if scope else 0)

    def holders(self, gone: dict[Path, Shared]) -> dict[Path, set[str]]:
        found: dict[Path, set[str]] = {}
        for path in reversed(gone):
            names = set(gone[path].tenants)
            for scope, pages in self.shared.items():
                names.update(scope[:1] if any(other[: -self.page_size] == path for other in pages) else ())
            for other in found:
                names |= found[other] if other[: -self.page_size] == path else set()
            found[path] = {name for name in names if self.choice(name) is not Sharing.NONE}
        return found

    def given_back(self, page: Shared, tenant: str) -> Shared:
        creators = {subject: made for subject, made in page.creators.items() if subject[0] == tenant}
        quarantined = {subject: since for subject, since in page.quarantined.items() if subject[0] == tenant}
        use = page.parties.get((tenant,)) if page.epoch == self.epoch else None
        parties: dict[Scope, Use] = {} if use is None else {(tenant,): use}
        return Shared(creators, page.tenants.get(tenant, 0), self.epoch, parties, quarantined)

    def drop_unreached(self, top: Path) -> None:
        for scope, path in sorted(self.entries(), key=lambda entry: len(entry[1])):
            above = path[: -self.page_size]
            is_below = len(path) > len(top) and path[: len(top)] == top
            if is_below and not any(above in self.level(other) for other in ((), scope[:1], scope)):
                self.drop({(scope, path)})

    def level(self, scope: Scope) -> dict[Path, Shared] | dict[Path, Private]:
        return self.private.get(scope, {}) if len(scope) == 3 else self.shared.get(scope, {})

    def promote_one(self) -> bool:
        """Share one page that has the evidence and whose parent is shared as widely."""
        paths = {path for _, path in self.entries()}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            above = path[: -self.page_size]
            is_top = not above or above in self.public
            if path in self.public:
                continue
            for tenant in sorted({view[0] for view in self.private}):
                mine = self.of_tenant(tenant)
                owners = [one[path] for view, one in self.private.items() if view[0] == tenant and path in one]
                if path in mine or self.choice(tenant) is Sharing.NONE or not (is_top or above in mine):
                    continue
                generations = [owner.generation for owner in owners]
                generations += [mine[above].generation] if above in mine else []
                weight = len(self.evidence(path, tenant))
                if owners and self.try_share((tenant,), path, weight, max(generations)):
                    return True
            sharing = [
                pages[path]
                for scope, pages in self.shared.items()
                if scope and path in pages and self.choice(scope[0]) is Sharing.GLOBAL
            ]
            if self.config.share_across_tenants and is_top and len(sharing) >= 2:
                generation = self.public[above].generation if above else 0
                weight = sum(len(page.creators) for page in sharing)
                if self.try_share((), path, weight, generation, len(sharing)):
                    return True
        return False

    def try_share(self, scope: Scope, path: Path, weight: int, generation: int, tenants: int | None = None) -> bool:
        generation = max(generation, self.demoted.get((scope, path), 0))
        factor = self.config.profile.repromotion_factor if generation else 1
        if weight < self.config.promotion_subjects * factor or (tenants is not None and tenants < 2 * factor):
            return False
        self.share(scope, path, generation)
        return True

    def evidence(self, path: Path, tenant: str | None = None) -> dict[SubjectKey, int]:
        oldest = self.epoch - self.config.promotion_epochs
        found: dict[SubjectKey, int] = {}
        for view, mine in self.private.items():
            entry = mine.get(path) if tenant in (None, view[0]) else None
            if entry and entry.evidence is not None and not entry.no_promote and entry.evidence >= oldest:
                found[view[:2]] = max(entry.evidence, found.get(view[:2], 0))
        return found

    def share(self, scope: Scope, path: Path, generation: int) -> None:
        """Make one shared page of all that `scope` covers."""
        page = Shared({}, generation, self.epoch)
        evidence = self.evidence(path)
        for tenant in [other[0] for other in self.shared if other and not scope and path in self.shared[other]]:
            part = self.of_tenant(tenant).pop(path)
            page.creators.update(part.creators)
            page.quarantined.update(part.quarantined)
            page.tenants[tenant] = part.generation
            if part.epoch == self.epoch:
                page.parties.update(part.parties)
        for view, mine in self.private.items():
            if view[: len(scope)] == scope and path in mine:
                del mine[path]
                page.add_creator(view, evidence.get(view[:2], self.epoch))
        self.shared[scope][path] = page

    # --- comparison ---

    def standing(self) -> dict[Entry, tuple[object, ...]]:
        found: dict[Entry, tuple[object, ...]] = {}
        for view, mine in self.private.items():
            found.update(
                ((view, path), (one.evidence, one.no_promote, one.generation, one.sessions))
                for path, one in mine.items()
            )
        for scope, pages in self.shared.items():
            for path, page in pages.items():
                hits = page.hits if page.epoch == self.epoch else 0
                hidden = set(page.quarantined_tenants)
                creators = {subject: (made, set(salts)) for subject, (made, salts) in page.creators.items()}
                quarantined = len(page.quarantined)
                facts = (creators, hits, page.generation, page.pinned, quarantined, hidden, set(page.tenants))
                found[scope, path] = facts
        return found
