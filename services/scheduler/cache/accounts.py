"""Accounts of views, tenants and the public, the holders of quotas, and their recent activity."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

from common.limits import Limits
from common.types import Sharing, Subject
from services.scheduler.cache.node import Account, Holder
from services.scheduler.cache.sharing.choices import SharingChoices
from services.scheduler.cache.types import PUBLIC_SCOPE, VIEW_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.limits import SubjectLimits
    from services.scheduler.cache.config import CacheConfig
    from services.scheduler.cache.types import Scope


class Accounts:
    """Owns the accounts of all views that hold nodes, snapshots or locks, and of their tenants; tracks recent activity.

    A subject holds a quota as long as it has an account, a tenant until it has been idle for some epochs.
    """

    def __init__(self, config: CacheConfig, choices: SharingChoices | None = None) -> None:
        """Start with the public alone, under the shares of `config`; `choices` supplies tenants' sharing choices."""
        self._config = config
        self._limits = Limits()
        self._numbers = count()
        everyone = Holder(PUBLIC_SCOPE, next(self._numbers), is_common=True)
        public = Holder(PUBLIC_SCOPE, next(self._numbers), is_common=True, parent=everyone)
        self.public = Account(PUBLIC_SCOPE, None, public)
        # Active tenants without a share of their own.
        self.active_tenants = 0
        # `version` rises with each change of the active tenants or of limits, `limits_version` with those of limits
        # only.
        self.version = 0
        self.limits_version = 0
        self._tenant_holders: dict[str, Holder] = {}
        self._holders: dict[Scope, Holder] = {}
        self._choices = choices or SharingChoices()
        self._views: dict[Scope, Account] = {}
        self._tenants: dict[str, Account] = {}
        self._activation_listeners: list[Callable[[Holder], None]] = []
        # By the epoch of their last activity, oldest first.
        self._active: OrderedDict[Account | Holder, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of views."""
        return len(self._views)

    def view(self, scope: Scope) -> Account:
        """Return the account of a view, or of the public for (), without registering a new one."""
        if not scope:
            return self.public
        return self._views.get(scope) or Account(scope, self._tenants.get(scope[0]) or Account(scope[:1]))

    def open(self, scope: Scope, epoch: int) -> Account:
        """Return the account of a view that starts a request now."""
        account = self.owner(scope)
        account.locks += 1
        # Its subject and its tenant are touched whenever it is.
        if not (account.is_public or (account.is_active and account.last_epoch == epoch)):
            for each in (account, account.holder, account.holder.tenant):
                self._touch(each, epoch)
        return account

    def owner(self, scope: Scope) -> Account:
        """Return the account that owns nodes of `scope`; register it if it is new."""
        if not scope:
            return self.public
        if len(scope) < VIEW_PARTS:
            return self._tenant(scope[0])
        account = self._views.get(scope)
        if account is None:
            tenant = self._tenant(scope[0])
            tenant.views += 1
            account = self._views[scope] = Account(scope, tenant, self._holder(scope[:2]))
        return account

    def close(self, account: Account) -> None:
        """End a request of the view."""
        account.locks -= 1
        self.forget_if_empty(account)

    def forget_if_empty(self, account: Account) -> None:
        """Drop an account without any references, so that invented names use no memory."""
        if account.locks or account.nodes or account.snapshots or account.views or account.is_public:
            return
        if account.is_shared:
            if self._tenants.pop(account.scope[0], None) is not None:
                self._leave(account.holder)
            return
        if self._views.pop(account.scope, None) is None:
            return
        self._end_activity(account)
        self._leave(account.holder)
        account.tenant.views -= 1
        self.forget_if_empty(account.tenant)

    def on_activation(self, listener: Callable[[Holder], None]) -> None:
        """Call `listener` with each subject and tenant that becomes active, from now on."""
        self._activation_listeners.append(listener)

    def pop_idle(self, epoch: int) -> list[Holder]:
        """Return the subjects and tenants whose activity ended before `epoch`, each once."""
        idle = []
        while self._active:
            each = next(iter(self._active))
            if epoch - each.last_epoch <= self._config.active_epochs:
                break
            self._end_activity(each)
            if isinstance(each, Holder):
                idle.append(each)
                if each.parent is None:
                    self._forget_tenant(each)
        return idle

    def adopt(self, limits: Limits) -> None:
        """Apply other quotas and floors from now on."""
        self._limits = limits
        for holder in (*self._tenant_holders.values(), *self._holders.values()):
            self._count_tenant(holder, -1)
            self._set_shares(holder)
            self._count_tenant(holder, 1)
        self.version += 1
        self.limits_version += 1

    def sharing_of(self, tenant: str) -> Sharing:
        """Return a tenant's sharing choice, whether it has an account or not."""
        account = self._tenants.get(tenant)
        return (account.sharing if account else None) or self._choices.of(tenant)

    def refresh_sharing(self) -> list[Account]:
        """Read all tenants' choices; return the tenants whose choice has changed."""
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
            account = self._tenants[name] = Account((name,), None, self._holder((name,)))
            account.sharing = self._choices.of(name)
        return account

    def _holder(self, scope: Scope) -> Holder:
        """Return the holder for another account of the subject, or of the tenant."""
        holder = self._holders.get(scope)
        if holder is None:
            tenant = self._tenant_holders.get(scope[0])
            if tenant is None:
                tenant = self._tenant_holders[scope[0]] = Holder(scope[:1], next(self._numbers))
                self._set_shares(tenant)
            tenant.members += 1
            is_common = len(scope) == 1
            holder = self._holders[scope] = Holder(scope, next(self._numbers), is_common=is_common, parent=tenant)
            self._set_shares(holder)
        holder.members += 1
        return holder

    def _leave(self, holder: Holder) -> None:
        """Remove an account from its holder, which is dropped with the last one."""
        holder.members -= 1
        if not holder.members:
            del self._holders[holder.scope]
            self._end_activity(holder)
            holder.tenant.members -= 1
            self._forget_tenant(holder.tenant)

    def _forget_tenant(self, tenant: Holder) -> None:
        if not (tenant.members or tenant.is_active):
            del self._tenant_holders[tenant.scope[0]]

    def _set_shares(self, holder: Holder) -> None:
        if holder.parent is not None and holder.is_common:
            return
        config = self._config
        if holder.parent is None:
            limits: SubjectLimits = self._limits.of(holder.scope[0])
            share, floor = None, config.tenant_floor_share
        else:
            limits = self._limits.of_subject(Subject(*holder.scope))
            share, floor = config.quota_share, config.floor_share
        holder.share = share if limits.cache_share is None else limits.cache_share
        holder.floor = floor if limits.cache_floor is None else limits.cache_floor
        if holder.share is not None:
            holder.floor = min(holder.floor, holder.share)

    def _touch(self, each: Account | Holder, epoch: int) -> None:
        if each.is_active and each.last_epoch == epoch:
            return
        each.last_epoch = epoch
        if each.is_active:
            self._active.move_to_end(each)
            return
        each.is_active = True
        self._active[each] = None
        if isinstance(each, Holder):
            self._count_tenant(each, 1)
            for listener in self._activation_listeners:
                listener(each)

    def _end_activity(self, each: Account | Holder) -> None:
        if each.is_active:
            if isinstance(each, Holder):
                self._count_tenant(each, -1)
            each.is_active = False
            del self._active[each]

    def _count_tenant(self, holder: Holder, sign: int) -> None:
        """Add an active tenant to, or remove it from, the inputs of the tenants' quotas."""
        if holder.parent is None and holder.is_active:
            self.active_tenants += sign * (holder.share is None)
            self.version += 1
