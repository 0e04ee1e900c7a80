"""Authorization of callers by the roles that their certificates name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from common.errors import PermissionDeniedError
from common.logs import get_logger
from common.metrics import RPC_REFUSED
from common.rpc.roles import CALLERS, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import grpc

    # Any: the types of requests and responses depend on the method.
    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
    CheckCaller = Callable[[str, Context], None]

NO_ROLE = "none"


def accept_every_caller(method: str, context: Context) -> None:
    """Accept the call: a plaintext connection does not identify its caller."""


class CallerGuard:
    """Accepts calls from certificates with a role that `CALLERS` lists for the method."""

    def __init__(self, server: str, names: Mapping[Role, Iterable[str]]) -> None:
        """Guard the server whose main service is `server`; `names` are the certificate names of each role.

        A name with "://" is a URI, and any other is a DNS name.
        """
        self._callers = CALLERS.get(server, {})
        self._uris: dict[str, set[Role]] = {}
        self._hosts: dict[str, set[Role]] = {}
        for role, of_role in names.items():
            for name in of_role:
                if "://" in name:
                    self._uris.setdefault(name, set()).add(role)
                else:
                    self._hosts.setdefault(name.lower(), set()).add(role)

    def check(self, method: str, context: Context) -> None:
        """Return if the call is allowed.

        Raises:
            PermissionDeniedError: no role of the caller's certificate may call `method`.
        """
        # URIs and DNS names are compared separately, so that a DNS name that looks like a role's URI does not match.
        identity = context.auth_context()
        uris = [name.decode(errors="replace") for name in identity.get("peer_uri", ())]
        hosts = [name.decode(errors="replace") for name in identity.get("peer_dns", ())]
        roles: set[Role] = set()
        for uri in uris:
            roles |= self._uris.get(uri, set())
        for host in hosts:
            roles |= self._hosts.get(host.lower(), set())
        allowed = self._callers.get(method, frozenset())
        if roles & allowed:
            return
        shown = "+".join(sorted(roles)) or NO_ROLE
        RPC_REFUSED.labels(method, shown).inc()
        get_logger("rpc").warning("rpc.refused", method=method, role=shown, names=[*uris, *hosts], peer=context.peer())
        caller = f"the role {shown}" if roles else f"a certificate without a role ({', '.join(uris + hosts)})"
        raise PermissionDeniedError(f"{caller} may not call {method}; allowed: {', '.join(sorted(allowed)) or NO_ROLE}")
