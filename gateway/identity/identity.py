"""Decides the caller of a request from its credential and connection; no other input of a client counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, assert_never

from common.errors import UnauthenticatedError
from gateway.identity.caller import ANONYMOUS, ANONYMOUS_TENANT, LOCAL, PROXY, Caller, key, person
from gateway.identity.peers import Locality

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from gateway.identity.keys import ApiKey
    from gateway.identity.peers import TrustedProxy

# The treatment of requests without any credential; `IdentitySettings.anonymous` explains the values.
Anonymous: TypeAlias = Literal["auto", "local", "isolated", "vouched", "refuse"]

NO_KEY = "You didn't provide an API key. Send it in the Authorization header: Authorization: Bearer YOUR_KEY."
WRONG_KEY = "Incorrect API key provided."
# Longer credentials are refused without being hashed.
MAX_CREDENTIAL_CHARACTERS = 16_384


class KeySource(Protocol):
    """A source of API keys."""

    def find(self, secret: str) -> ApiKey | None:
        """Return the key whose secret is `secret`, None if there is none."""


class TokenVerifier(Protocol):
    """Verifies signed tokens."""

    async def caller(self, token: str) -> Caller:
        """Return the caller that `token` identifies.

        Raises:
            UnauthenticatedError: the token is not valid.
            UnavailableError: the signing keys cannot be fetched.
        """


@dataclass(frozen=True, slots=True)
class Keyless:
    """The callers of requests without a credential, when neither keys nor tokens are configured."""

    tenant: str
    anonymous: Anonymous = "auto"
    allowed_hosts: frozenset[str] = frozenset()

    def caller(self, *, is_local: bool, is_admin: bool) -> Caller:
        """Return the caller of a request without credential; `is_local` and `is_admin` come from `Locality`.

        Raises:
            UnauthenticatedError: such requests are refused.
        """
        match self.anonymous:
            case "auto":
                return Caller(self.tenant, LOCAL if is_local else ANONYMOUS, is_admin=is_admin)
            case "local":
                return Caller(self.tenant, LOCAL, is_admin=is_admin)
            case "isolated":
                return Caller(self.tenant, ANONYMOUS, is_admin=is_admin)
            case "vouched":
                return Caller(self.tenant, LOCAL if is_local else ANONYMOUS, vouches=True, is_admin=is_admin)
            case "refuse":
                raise UnauthenticatedError(NO_KEY)
            case _:
                assert_never(self.anonymous)


class Identity:
    """Decides the caller of each request."""

    def __init__(
        self, keys: KeySource | None, proxy: TrustedProxy, keyless: Keyless, tokens: TokenVerifier | None = None
    ) -> None:
        """Accept `keys` and `tokens`; without both, requests need no credential and `keyless` decides their caller."""
        self._keys = keys
        self._tokens = tokens
        self._proxy = proxy
        self._keyless = keyless
        self._locality = Locality(proxy, keyless.allowed_hosts)

    async def caller(self, headers: Headers, peer: str | None, http_version: str = "1.1") -> Caller:
        """Return the caller; `peer` is the address of the direct TCP peer.

        Raises:
            UnauthenticatedError: a credential is needed, and it is missing or wrong.
            PermissionDeniedError: no credential is needed, and the request's host is not a name of this server.
            InvalidRequestError: the proxy's headers are malformed.
        """
        caller = await self._caller(headers, peer, http_version)
        if caller.tenant == ANONYMOUS_TENANT:
            raise UnauthenticatedError(f"The tenant {ANONYMOUS_TENANT!r} is reserved; the operator has to rename it.")
        return caller

    async def _caller(self, headers: Headers, peer: str | None, http_version: str) -> Caller:
        tenant, user = self._proxy.names(headers, peer)
        if tenant is not None:
            # The request's body comes from the proxy's client, so the proxy does not vouch for users named there.
            return Caller(tenant, PROXY if user is None else person(user))
        if self._keys is None and self._tokens is None:
            if user is not None:
                return Caller(self._keyless.tenant, person(user))
            self._locality.check_host(peer, headers, all_are_local=self._keyless.anonymous == "local")
            return self._keyless.caller(
                is_local=self._locality.is_local_person(peer, headers, http_version),
                is_admin=self._locality.may_administrate(peer, headers, http_version),
            )
        caller = await self._by_credential(_credential(headers))
        if user is None:
            return caller
        # The credential is the proxy's; its user gets neither administration rights nor the right to vouch.
        return replace(caller, subject=person(user), vouches=False, is_admin=False)

    async def _by_credential(self, credential: str) -> Caller:
        if self._tokens is not None and credential.count(".") == 2:
            return await self._tokens.caller(credential)
        found = self._keys.find(credential) if self._keys is not None else None
        if found is None:
            raise UnauthenticatedError(WRONG_KEY)
        subject = key(found.id) if found.user is None else person(found.user)
        return Caller(
            found.tenant,
            subject,
            found.vouches_for_users,
            found.admin,
            found.cache,
            found.max_priority,
            found.adapters,
            credential=key(found.id),
        )


def _credential(headers: Headers) -> str:
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    # Anthropic's clients send their key in this header.
    credential = value.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    if not credential:
        raise UnauthenticatedError(NO_KEY)
    if len(credential) > MAX_CREDENTIAL_CHARACTERS:
        raise UnauthenticatedError(WRONG_KEY)
    return credential
