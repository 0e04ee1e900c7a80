"""A cache so naive that it is plainly right: one entry per page and path, scanned from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

Scope = tuple[str, ...]
# Scope and all tokens from the first one to the page's last.
Path = tuple[Scope, tuple[int, ...]]


@dataclass(slots=True)
class Entry:
    page: int
    locks: int = 0
    released_at: int = 0


@dataclass(slots=True)
class NaiveCache:
    page_size: int
    shared: bool
    entries: dict[Path, Entry] = field(default_factory=dict)
    clock: int = 0

    def paths(self, user: str, ids: list[int], limit: int) -> list[Path]:
        scope: Scope = () if self.shared else ("tenant", user)
        return [(scope, tuple(ids[:end])) for end in range(self.page_size, limit + 1, self.page_size)]

    def matched(self, user: str, ids: list[int]) -> list[Path]:
        found = []
        for path in self.paths(user, ids, len(ids) - 1):
            if path not in self.entries:
                break
            found.append(path)
        return found

    def lock(self, paths: list[Path]) -> None:
        for path in paths:
            self.entries[path].locks += 1

    def insert(self, user: str, ids: list[int], pages: list[int], locked: list[Path]) -> list[Path]:
        paths = self.paths(user, ids, len(ids))
        for path, page in zip(paths, pages, strict=False):
            self.entries.setdefault(path, Entry(page))
        self.lock(paths[len(locked) :])
        return paths if len(paths) > len(locked) else locked

    def release(self, paths: list[Path]) -> None:
        self.clock += 1
        for path in paths:
            self.entries[path].locks -= 1
            self.entries[path].released_at = self.clock

    def evict(self, pages: int) -> int:
        evicted = 0
        while evicted < pages:
            parents = {(scope, tokens[: -self.page_size]) for scope, tokens in self.entries}
            leaves = [path for path, entry in self.entries.items() if entry.locks == 0 and path not in parents]
            if not leaves:
                break
            del self.entries[min(leaves, key=lambda path: self.entries[path].released_at)]
            evicted += 1
        return evicted

    def pages(self, paths: list[Path]) -> list[int]:
        return [self.entries[path].page for path in paths]
