"""JSON Web Tokens of an identity provider as credentials, and the public keys that verify them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import httpx
import jwt

from common.errors import ConfigurationError, InvalidRequestError, UnauthenticatedError, UnavailableError
from common.logs import get_logger
from common.names import check_name
from common.reloading import Reloading
from gateway.identity.caller import Caller, person
from gateway.identity.peers import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LEEWAY_S = 30
WRONG_TOKEN = "The token is not valid: {reason}."
KeySet: TypeAlias = "Mapping[str | None, jwt.PyJWK]"
MAX_KEY_SET_BYTES = 1024 * 1024
FETCH_TIMEOUT_S = 5.0
# A token with an unknown key id triggers a refresh, at most this often, since clients can make up ids.
LEAST_INTERVAL_S = 10.0
# Asymmetric ones only: a party that can verify a token must not be able to create one.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# Seconds for which keys from a URL are cached.
LIFETIME_S = 300.0


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Requirements for a token, and the claims that name tenant, user and administrators."""

    issuer: str
    audience: str
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
    """Implements `gateway.identity.identity.TokenVerifier`."""

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
                algorithms=ALGORITHMS,
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


def open_signing_keys(
    source: str, lifetime_s: float = LIFETIME_S, transport: httpx.AsyncBaseTransport | None = None
) -> SigningKeys:
    """Return the keys at `source`, a file or a URL.

    Raises:
        ConfigurationError: the file cannot be read, or the URL is neither https nor on this machine.
    """
    if "://" not in source:
        return FileKeys(Path(source))
    url = httpx.URL(source)
    if url.scheme != "https" and not (url.scheme == "http" and (url.host == "localhost" or is_loopback(url.host))):
        raise ConfigurationError("gateway.jwt.keys: keys that come over a network need https")
    return RemoteKeys(httpx.AsyncClient(transport=transport, timeout=FETCH_TIMEOUT_S), url, lifetime_s)


class FileKeys:
    """Implements `SigningKeys` with a file that is reloaded when it changes."""

    def __init__(self, path: Path) -> None:
        self._keys = Reloading(path, _load)

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        return choose(self._keys.value, key_id)


class RemoteKeys:
    """Implements `SigningKeys` with a URL; old keys stay in use while it is unreachable."""

    def __init__(
        self, client: httpx.AsyncClient, url: httpx.URL, lifetime_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Fetch `url` when a key is first needed, and again after `lifetime_s`."""
        self._client = client
        self._url = url
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._keys: KeySet | None = None
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._log = get_logger("signing_keys")

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        if self._is_due(self._lifetime_s):
            await self._ask(self._lifetime_s)
        found = choose(self._keys, key_id) if self._keys is not None else None
        if found is None and self._is_due(LEAST_INTERVAL_S):
            await self._ask(LEAST_INTERVAL_S)
        if self._keys is None:
            raise UnavailableError("the keys that sign tokens cannot be had", retry_after_ms=1000)
        return choose(self._keys, key_id)

    def _is_due(self, interval_s: float) -> bool:
        return self._clock() - self._asked_at >= interval_s

    async def _ask(self, interval_s: float) -> None:
        async with self._asking:
            if not self._is_due(interval_s):
                return
            self._asked_at = self._clock()
            try:
                async with self._client.stream("GET", self._url) as response:
                    response.raise_for_status()
                    content = b""
                    async for chunk in response.aiter_bytes():
                        content += chunk
                        if len(content) > MAX_KEY_SET_BYTES:
                            raise ConfigurationError("the key set is too large")
                self._keys = parse_key_set(content)
            except (httpx.HTTPError, ConfigurationError) as error:
                self._log.error("signing_keys.not_refreshed", url=str(self._url), reason=str(error))


def parse_key_set(content: bytes) -> KeySet:
    """Return the keys of a set by id, without those of unknown kinds or for encryption.

    Raises:
        ConfigurationError: `content` is not a key set.
    """
    try:
        entries = json.loads(content)["keys"]
        keys = [_parse(entry) for entry in entries]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"no JSON Web Key Set: {error}") from error
    return {key.key_id: key for key in keys if key is not None}


def choose(keys: KeySet, key_id: str | None) -> jwt.PyJWK | None:
    """Return the key with the id `key_id`; without an id, the key if there is exactly one."""
    if key_id is None and len(keys) == 1:
        return next(iter(keys.values()))
    return keys.get(key_id)


def _load(path: Path) -> KeySet:
    try:
        return parse_key_set(path.read_bytes())
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"gateway.jwt.keys {path}: {error}") from error


def _parse(entry: object) -> jwt.PyJWK | None:
    # A symmetric key does not belong in a published set.
    if not isinstance(entry, dict) or entry.get("kty") == "oct" or entry.get("use", "sig") != "sig":
        return None
    try:
        return jwt.PyJWK.from_dict(entry)
    except (jwt.PyJWTError, NotImplementedError):
        return None
