"""What each view, each tenant and the public have in the cache."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from common.types import Sharing, Subject, View
from services.scheduler.cache.sharing import SharingChoices

if TYPE_CHECKING:
    from services.scheduler.cache.node import Node

# Where a node is visible: () everywhere, (tenant,) in a tenant's views, (tenant, subject, salt) in one view.
Scope = tuple[str, ...]
# (tenant, name) of a subject.
SubjectKey = tuple[str, ...]
PUBLIC_SCOPE: Scope = ()
_VIEW_PARTS = 3


def scope_of(view: View) -> Scope:
    """Return the scope of a view's own nodes."""
    return view.subject.tenant, view.subject.name, view.salt


def view_of(scope: Scope) -> View:
    """Return the view whose own nodes have this scope."""
    tenant, subject, salt = scope
    return View(Subject(tenant, subject), salt)


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """An owner of nodes: a view, a tenant or the public. There is one object per scope; owners compare by identity.

    `tenant` is the account of a view's tenant; a tenant's and the public's is itself. `sharing` is a tenant's choice as
    of the last epoch boundary, and `views` counts its views' accounts. `live_pages` are those of its LIVE nodes,
    counted as if nobody else held them: what others hold must not show in a quota. `tops` are its nodes below nodes
    of other owners; the public has none. `heap`, `candidates`, `rank` and `standing` are the eviction queue's.
    """

    scope: Scope
    of_tenant: InitVar[Account | None] = None
    tenant: Account = field(init=False)
    subject: SubjectKey = field(init=False)
    sharing: Sharing | None = None
    views: int = 0
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

    def __post_init__(self, of_tenant: Account | None) -> None:
        """Derive what follows from the scope."""
        self.tenant = self if of_tenant is None else of_tenant
        self.subject = self.scope[:2]

    @property
    def is_public(self) -> bool:
        """Whether every view sees its nodes."""
        return not self.scope

    @property
    def is_shared(self) -> bool:
        """Whether it is a tenant or the public, whose nodes more than one view sees."""
        return len(self.scope) < _VIEW_PARTS

    @property
    def fingerprint(self) -> int:
        """64 bits that stand for the subject in counters, or for the tenant; equal in every process and run."""
        if self._fingerprint is None:
            text = "".join(f"{len(part)}:{part}" for part in self.subject).encode("utf-8", "surrogatepass")
            self._fingerprint = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        return self._fingerprint

    @property
    def party(self) -> Scope:
        """Whose use of PUBLIC nodes is judged together with this view's: its tenant's, or its subject's alone.

        Where a tenant shares nothing, its subjects must not have an effect on each other.
        """
        return self.subject if self.tenant.sharing is Sharing.NONE else self.scope[:1]


class Accounts:
    """Owns the accounts of all views that hold a node or a lease, and of their tenants; knows who was active lately."""

    def __init__(self, active_epochs: int, choices: SharingChoices | None = None) -> None:
        """Start with the public alone; `choices` says how far tenants share."""
        self.public = Account(PUBLIC_SCOPE)
        self._active_epochs = active_epochs
        self._choices = choices or SharingChoices()
        self._views: dict[Scope, Account] = {}
        self._tenants: dict[str, Account] = {}
        # By last activity, oldest first.
        self._active: OrderedDict[Account, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many views there are."""
        return len(self._views)

    def view(self, scope: Scope) -> Account:
        """Return the account of a view, or of the public for (), without taking note of it."""
        if not scope:
            return self.public
        return self._views.get(scope) or Account(scope, self._tenants.get(scope[0]) or Account(scope[:1]))

    def open(self, scope: Scope, epoch: int) -> Account:
        """Return the account of a view that starts a request now."""
        account = self.owner(scope)
        account.leases += 1
        self._touch(account, epoch)
        return account

    def owner(self, scope: Scope) -> Account:
        """Return the account that nodes of `scope` are to be hung under."""
        if not scope:
            return self.public
        if len(scope) < _VIEW_PARTS:
            return self._tenant(scope[0])
        account = self._views.get(scope)
        if account is None:
            tenant = self._tenant(scope[0])
            tenant.views += 1
            account = self._views[scope] = Account(scope, tenant)
        return account

    def close(self, account: Account) -> None:
        """End a request of the view."""
        account.leases -= 1
        self.forget_if_empty(account)

    def forget_if_empty(self, account: Account) -> None:
        """Drop an account that nothing refers to, so that invented names leave nothing behind."""
        if account.leases or account.nodes or account.views or account.is_public:
            return
        if account.is_shared:
            self._tenants.pop(account.scope[0], None)
            return
        del self._views[account.scope]
        self._active.pop(account, None)
        account.is_active = False
        account.tenant.views -= 1
        self.forget_if_empty(account.tenant)

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

    def sharing_of(self, tenant: str) -> Sharing:
        """Return how far a tenant shares, whether it has an account or not."""
        account = self._tenants.get(tenant)
        return (account.sharing if account else None) or self._choices.of(tenant)

    def refresh_sharing(self) -> list[Account]:
        """Ask for all tenants' choices; return the tenants whose choice has changed."""
        changed = []
        for account in self._tenants.values():
            before, account.sharing = account.sharing, self._choices.of(account.scope[0])
            if account.sharing is not before:
                changed.append(account)
        return changed

    def of_subject(self, subject: Subject) -> list[Account]:
        """Return the accounts of all views of a subject."""
        key = (subject.tenant, subject.name)
        return [account for account in self._views.values() if account.subject == key]

    def all(self) -> list[Account]:
        """Return the views' accounts, in order of their first request."""
        return list(self._views.values())

    def tenants(self) -> list[Account]:
        """Return the tenants' accounts, in order of their first request."""
        return list(self._tenants.values())

    def _tenant(self, name: str) -> Account:
        account = self._tenants.get(name)
        if account is None:
            account = self._tenants[name] = Account((name,))
            account.sharing = self._choices.of(name)
        return account

    def _touch(self, account: Account, epoch: int) -> None:
        if account.is_public:
            return
        account.last_epoch = epoch
        if account.is_active:
            self._active.move_to_end(account)
        else:
            account.is_active = True
            self._active[account] = None
