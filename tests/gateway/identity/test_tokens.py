"""Signed tokens, and what forgers try."""

from __future__ import annotations

import base64
import json
import time
from typing import TYPE_CHECKING, Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.datastructures import Headers

from common.audit.log import NoAudit
from common.errors import ConfigurationError, UnauthenticatedError, UnavailableError
from common.settings import GatewaySettings, JwtSettings
from gateway.assembly import build_identity
from gateway.identity.caller import Caller
from gateway.identity.tokens import FileKeys, RemoteKeys, SignedTokens, TokenRules, open_signing_keys

if TYPE_CHECKING:
    from pathlib import Path

SIGNER = rsa.generate_private_key(65537, 2048)
OTHER = rsa.generate_private_key(65537, 2048)
RULES = TokenRules("https://id", "pando", "home", "org", "sub", "pando:admin")


def public_jwk(key: rsa.RSAPrivateKey, key_id: str) -> dict[str, Any]:
    return {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": key_id, "alg": "RS256"}


def token(key: Any = SIGNER, algorithm: str = "RS256", key_id: str | None = "one", **changed: Any) -> str:
    claims = {"iss": "https://id", "aud": "pando", "sub": "ann", "org": "acme", "exp": time.time() + 60, **changed}
    present = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(present, key, algorithm, headers={"kid": key_id} if key_id else None)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [public_jwk(SIGNER, "one"), {"kty": "strange"}]}))
    return path


@pytest.fixture
def tokens(key_file: Path) -> SignedTokens:
    return SignedTokens(RULES, FileKeys(key_file))


async def test_a_good_token_names_tenant_user_and_rights(tokens: SignedTokens) -> None:
    assert await tokens.caller(token()) == Caller("acme", "user/ann")
    assert (await tokens.caller(token(scope="openid pando:admin"))).is_admin
    assert not (await tokens.caller(token(scope="pando:administrator"))).is_admin
    assert await tokens.caller(token(key_id=None)) == Caller("acme", "user/ann")


PUBLIC_PEM = SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def unsigned() -> str:
    _header, claims, _ = token().split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"one"}').decode().rstrip("=")
    return f"{none}.{claims}."


def signed_with_the_public_key() -> str:
    """HMAC with what everybody knows: accepted by verifiers that let the token choose the algorithm."""
    import hashlib
    import hmac

    header = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT","kid":"one"}').rstrip(b"=")
    body = header + b"." + token().split(".")[1].encode()
    return (body + b"." + base64.urlsafe_b64encode(hmac.digest(PUBLIC_PEM, body, hashlib.sha256)).rstrip(b"=")).decode()


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda: token(OTHER), "signature"),
        (lambda: token(OTHER, key_id="two"), "unknown key"),
        (unsigned, "algorithm"),
        (signed_with_the_public_key, "algorithm"),
        (lambda: token(ec.generate_private_key(ec.SECP256R1()), "ES256"), "algorithm"),
        (lambda: token(exp=time.time() - 3600), "expired"),
        (lambda: token(exp=None), "exp is missing"),
        (lambda: token(nbf=time.time() + 3600), "wrong"),
        (lambda: token(aud="other"), "audience"),
        (lambda: token(aud=None), "aud is missing"),
        (lambda: token(iss="https://evil"), "issuer"),
        (lambda: token(sub=None), "sub is missing"),
        (lambda: token(org=None), "org is no text"),
        (lambda: token(org=["acme"]), "org is no text"),
        (lambda: token(org="a\x00b"), "cannot be a name"),
        (lambda: token(sub="x" * 300), "cannot be a name"),
        (lambda: token()[:-8] + "AAAAAAAA", "signature"),
        (lambda: "a.b.c", "form"),
        (lambda: "..", "form"),
    ],
)
async def test_forged_tokens_are_refused_with_a_reason(tokens: SignedTokens, forged: Any, reason: str) -> None:
    with pytest.raises(UnauthenticatedError, match=reason):
        await tokens.caller(forged())


class Provider:
    """An identity provider's URL."""

    def __init__(self) -> None:
        self.keys = [public_jwk(SIGNER, "one")]
        self.asked = 0
        self.is_away = False
        self.now = 0.0

    def answer(self, _request: httpx.Request) -> httpx.Response:
        self.asked += 1
        return httpx.Response(503) if self.is_away else httpx.Response(200, json={"keys": self.keys})

    def remote(self) -> RemoteKeys:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return RemoteKeys(client, httpx.URL("https://id/jwks"), 300.0, lambda: self.now)


async def test_keys_of_a_url_are_cached_and_rotation_is_noticed() -> None:
    provider = Provider()
    tokens = SignedTokens(RULES, provider.remote())
    for _ in range(5):
        await tokens.caller(token())
    assert provider.asked == 1
    provider.keys = [public_jwk(OTHER, "two")]
    provider.now = 11.0
    assert (await tokens.caller(token(OTHER, key_id="two"))).subject == "user/ann"
    assert provider.asked == 2


async def test_unknown_key_names_do_not_cause_a_request_each_time() -> None:
    provider = Provider()
    keys = provider.remote()
    for number in range(100):
        provider.now = number / 10
        assert await keys.find(f"made-up-{number}") is None
    assert provider.asked == 1


async def test_old_keys_stay_in_use_while_the_provider_is_unreachable() -> None:
    provider = Provider()
    keys = provider.remote()
    assert await keys.find("one")
    provider.is_away = True
    provider.now = 1000.0
    assert await keys.find("one")
    assert provider.asked == 2


async def test_an_unreachable_provider_makes_the_check_unavailable_and_does_not_refuse_the_credential() -> None:
    provider = Provider()
    provider.is_away = True
    with pytest.raises(UnavailableError):
        await provider.remote().find("one")


def test_keys_from_the_network_need_https(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="https"):
        open_signing_keys("http://id.example/jwks", 300.0)
    assert isinstance(open_signing_keys("http://127.0.0.1:1/jwks", 300.0), RemoteKeys)
    with pytest.raises(ConfigurationError):
        open_signing_keys(str(tmp_path / "none.json"), 300.0)


async def test_tokens_and_keys_by_the_gateways_settings(key_file: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"jwt\.issuer"):
        build_identity(GatewaySettings(jwt=JwtSettings(keys=str(key_file))), NoAudit())
    identity = build_identity(
        GatewaySettings(jwt=JwtSettings(keys=str(key_file), issuer="https://id", audience="pando")), NoAudit()
    )
    caller = await identity.caller(Headers({"authorization": f"Bearer {token()}"}), "127.0.0.1")
    assert caller == Caller("default", "user/ann")
    with pytest.raises(UnauthenticatedError):
        await identity.caller(Headers({}), "127.0.0.1")
