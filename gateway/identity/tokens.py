"""JSON Web Tokens of an identity provider as credentials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jwt

from common.errors import InvalidRequestError, UnauthenticatedError
from common.names import check_name
from gateway.identity.caller import Caller, person

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEEWAY_S = 30
WRONG_TOKEN = "The token is not valid: {reason}."


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Requirements for a token, and the claims that name tenant, user and administrators."""

    issuer: str
    audience: str
    algorithms: Sequence[str]
    default_tenant: str
    tenant_claim: str | None
    user_claim: str
    admin_scope: str | None


class SigningKeys(Protocol):
    """The identity provider's public keys."""

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """Return the key with the id `key_id`; without an id, the key if there is exactly one.

        Raises:
            UnavailableError: the keys cannot be fetched.
        """


class SignedTokens:
    """Implements `gateway.identity.identity.Tokens`."""

    def __init__(self, rules: TokenRules, keys: SigningKeys) -> None:
        self._rules = rules
        self._keys = keys

    async def caller(self, token: str) -> Caller:
        """Return the caller that `token` identifies, after checking signature, issuer, audience and times."""
        rules = self._rules
        try:
            header = jwt.get_unverified_header(token)
            key = await self._keys.find(header.get("kid"))
            if key is None:
                raise UnauthenticatedError(WRONG_TOKEN.format(reason="it is signed with an unknown key"))
            claims = jwt.decode(
                token,
                # The key determines the algorithm, so that a token cannot choose a different one.
                key,
                algorithms=list(rules.algorithms),
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", rules.user_claim]},
            )
        except jwt.InvalidTokenError as error:
            raise UnauthenticatedError(WRONG_TOKEN.format(reason=_reason(error))) from error
        return self._to_caller(claims)

    def _to_caller(self, claims: Mapping[str, Any]) -> Caller:  # Any: JSON
        rules = self._rules
        tenant = rules.default_tenant if rules.tenant_claim is None else _name(claims, rules.tenant_claim)
        scope = claims.get("scope")
        scopes = scope.split() if isinstance(scope, str) else scope if isinstance(scope, list) else []
        is_admin = rules.admin_scope is not None and rules.admin_scope in scopes
        return Caller(tenant, person(_name(claims, rules.user_claim)), is_admin=is_admin)


def _name(claims: Mapping[str, Any], claim: str) -> str:  # Any: JSON
    value = claims.get(claim)
    if not isinstance(value, str) or not value:
        raise UnauthenticatedError(WRONG_TOKEN.format(reason=f"its claim {claim} is no text"))
    try:
        return check_name(claim, value)
    except InvalidRequestError as error:
        raise UnauthenticatedError(WRONG_TOKEN.format(reason=f"its claim {claim} cannot be a name")) from error


def _reason(error: jwt.InvalidTokenError) -> str:
    """Return the reason in our words: the library's messages may quote parts of the token."""
    match error:
        case jwt.ExpiredSignatureError():
            return "it has expired"
        case jwt.InvalidAudienceError():
            return "it is meant for another audience"
        case jwt.InvalidIssuerError():
            return "its issuer is not trusted"
        case jwt.MissingRequiredClaimError():
            return f"its claim {error.claim} is missing"
        case jwt.InvalidAlgorithmError():
            return "its algorithm is not accepted"
        case _:
            return "signature or form is wrong"
