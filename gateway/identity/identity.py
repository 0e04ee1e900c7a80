"""Decides whose request this is, from credential and connection. Nothing that a client writes elsewhere counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from common.errors import UnauthenticatedError
from gateway.identity.caller import Caller
from gateway.identity.proxies import is_loopback

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from gateway.identity.keys import ApiKey
    from gateway.identity.proxies import TrustedProxy

NO_KEY = "You didn't provide an API key. Send it in the Authorization header: Authorization: Bearer YOUR_KEY."
WRONG_KEY = "Incorrect API key provided."
# Longer credentials are not even hashed.
MAX_CREDENTIAL_CHARACTERS = 16_384


class Keys(Protocol):
    """Where API keys are known."""

    def find(self, secret: str) -> ApiKey | None:
        """Return the key that `secret` is, if it is one."""


class Tokens(Protocol):
    """Who can tell whose a signed token is."""

    async def caller(self, token: str) -> Caller:
        """Return whose `token` is.

        Raises:
            UnauthenticatedError: it is not valid.
            UnavailableError: the keys that sign tokens cannot be had.
        """


class Identity:
    """Decides the caller of each request. With neither keys nor tokens, everybody is of `default_tenant`."""

    def __init__(
        self, keys: Keys | None, proxy: TrustedProxy, default_tenant: str, tokens: Tokens | None = None
    ) -> None:
        """Accept `keys` and `tokens`; None means that this kind of credential is not known here."""
        self._keys = keys
        self._tokens = tokens
        self._proxy = proxy
        self._default_tenant = default_tenant

    async def caller(self, headers: Headers, peer: str | None) -> Caller:
        """Return whose connection this is; `peer` is the address of the direct TCP peer.

        Raises:
            UnauthenticatedError: a credential is asked for, and there is none or a wrong one.
            InvalidRequestError: the proxy's headers are malformed.
        """
        tenant, user = self._proxy.names(headers, peer)
        if tenant is not None:
            return Caller(tenant, user, may_act_for=user is None)
        if self._keys is None and self._tokens is None:
            return Caller(self._default_tenant, user, may_act_for=user is None, is_admin=is_loopback(peer))
        caller = await self._by_credential(_credential(headers))
        if user is None:
            return caller
        # The credential is the proxy's; what its user may do is no more than what users may.
        return replace(caller, user=user, may_act_for=False, is_admin=False)

    async def _by_credential(self, credential: str) -> Caller:
        if self._tokens is not None and credential.count(".") == 2:
            return await self._tokens.caller(credential)
        key = self._keys.find(credential) if self._keys is not None else None
        if key is None:
            raise UnauthenticatedError(WRONG_KEY)
        return Caller(key.tenant, key.user, key.id, key.act_for_users, key.admin, key.cache, key.max_priority)


def _credential(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    # Anthropic's clients send their key by this name.
    credential = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    if not credential:
        raise UnauthenticatedError(NO_KEY)
    if len(credential) > MAX_CREDENTIAL_CHARACTERS:
        raise UnauthenticatedError(WRONG_KEY)
    return credential
