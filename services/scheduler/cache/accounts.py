"""What each principal has in the cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from common.types import Subject, View

if TYPE_CHECKING:
    from services.scheduler.cache.node import Node

# What a node is visible in: a view as (tenant, subject, salt), or () for everyone.
Scope = tuple[str, ...]
PUBLIC_SCOPE: Scope = ()


def scope_of(view: View) -> Scope:
    """Return the scope of a view's own nodes."""
    return view.subject.tenant, view.subject.name, view.salt


def view_of(scope: Scope) -> View:
    """Return the view whose own nodes have this scope."""
    tenant, subject, salt = scope
    return View(Subject(tenant, subject), salt)


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """One principal, or the public, as an owner of nodes; there is one object per scope, so owners compare by identity.

    `live_pages` are those of its LIVE nodes, counted as if nobody else held them: what others hold must not show in
    one's quota. `tops` are its PRIVATE nodes below the root or PUBLIC ones. `heap`, `candidates`, `rank` and
    `standing` are the eviction queue's.
    """

    scope: Scope
    live_pages: int = 0
    nodes: int = 0
    leases: int = 0
    last_epoch: int = 0
    is_active: bool = False
    tops: dict[Node, None] = field(default_factory=dict)
    heap: list[tuple[tuple[int, ...], int, Node]] = field(default_factory=list)
    candidates: int = 0
    rank: int = 0
    standing: int = 0
    has_sessions: bool = False
    _fingerprint: int | None = None

    @property
    def is_public(self) -> bool:
        """Whether this stands for everybody."""
        return not self.scope

    @property
    def fingerprint(self) -> int:
        """64 bits that stand for the principal in counters; equal in every process and run."""
        if self._fingerprint is None:
            text = "".join(f"{len(part)}:{part}" for part in self.scope).encode("utf-8", "surrogatepass")
            self._fingerprint = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        return self._fingerprint


class Accounts:
    """Owns the accounts of all principals that hold a node or a lease, and knows who was active lately."""

    def __init__(self, active_epochs: int) -> None:
        """Start with the public alone."""
        self.public = Account(PUBLIC_SCOPE)
        self._active_epochs = active_epochs
        self._by_scope: dict[Scope, Account] = {PUBLIC_SCOPE: self.public}
        # By last activity, oldest first.
        self._active: OrderedDict[Account, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many principals there are."""
        return len(self._by_scope) - 1

    def view(self, scope: Scope) -> Account:
        """Return whose view `scope` has, without taking note of it."""
        return self._by_scope.get(scope) or Account(scope)

    def open(self, scope: Scope, epoch: int) -> Account:
        """Return the account of a principal that starts a request now."""
        account = self._by_scope.get(scope)
        if account is None:
            account = self._by_scope[scope] = Account(scope)
        account.leases += 1
        self._touch(account, epoch)
        return account

    def owner(self, scope: Scope) -> Account:
        """Return the account that nodes of `scope` are to be hung under."""
        account = self._by_scope.get(scope)
        if account is None:
            account = self._by_scope[scope] = Account(scope)
        return account

    def close(self, account: Account) -> None:
        """End a request of the principal."""
        account.leases -= 1
        self.forget_if_empty(account)

    def forget_if_empty(self, account: Account) -> None:
        """Drop an account that nothing refers to, so that invented principals leave nothing behind."""
        if not (account.leases or account.nodes or account.is_public):
            del self._by_scope[account.scope]
            self._active.pop(account, None)
            account.is_active = False

    def pop_idle(self, epoch: int) -> list[Account]:
        """Return the accounts whose activity ended before `epoch`, once each."""
        idle = []
        while self._active:
            account = next(iter(self._active))
            if epoch - account.last_epoch <= self._active_epochs:
                break
            del self._active[account]
            account.is_active = False
            idle.append(account)
        return idle

    def of_subject(self, subject: Subject) -> list[Account]:
        """Return the accounts of all views of a subject."""
        prefix = (subject.tenant, subject.name)
        return [account for account in self._by_scope.values() if account.scope[:2] == prefix]

    def all(self) -> list[Account]:
        """Return the principals' accounts, in order of their first request."""
        return [account for account in self._by_scope.values() if not account.is_public]

    def _touch(self, account: Account, epoch: int) -> None:
        if account.is_public:
            return
        account.last_epoch = epoch
        if account.is_active:
            self._active.move_to_end(account)
        else:
            account.is_active = True
            self._active[account] = None
