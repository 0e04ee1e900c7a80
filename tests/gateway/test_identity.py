from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from starlette.datastructures import Headers

from common.errors import ConfigurationError, InvalidRequestError, UnauthenticatedError
from common.types import CacheMode, Principal
from gateway.identity import ApiKey, Caller, Identity, TrustedProxy, load_keys, parse_networks, principal_of
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

NO_PROXY = TrustedProxy((), "x-pando-tenant", "x-pando-user")
PROXY = TrustedProxy(parse_networks(["10.0.0.0/8", "fd00::/8"]), "x-pando-tenant", "x-pando-user")
SECRET = "sk-pando-0123456789abcdef"
KEY = ApiKey("k1", hashlib.sha256(SECRET.encode()).hexdigest(), "acme")


def write_keys(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_key_names_the_tenant() -> None:
    caller = Identity([KEY], NO_PROXY, "default").caller(Headers({"authorization": f"Bearer {SECRET}"}), "1.2.3.4")
    assert caller == Caller("acme", None, "k1")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic YTpi"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {SECRET[:-1]}"},
        {"authorization": f"Bearer {KEY.sha256}"},
    ],
)
def test_without_a_known_key_nobody_comes_in(headers: dict[str, str]) -> None:
    with pytest.raises(UnauthenticatedError):
        Identity([KEY], NO_PROXY, "default").caller(Headers(headers), "1.2.3.4")


def test_without_keys_everybody_belongs_to_the_default_tenant() -> None:
    identity = Identity(None, NO_PROXY, "home")
    assert identity.caller(Headers({"authorization": "Bearer anything"}), "1.2.3.4") == Caller("home")


@pytest.mark.parametrize("peer", ["11.0.0.1", "::1", None, "", "unix", "10.0.0.1.evil"])
def test_identity_headers_of_strangers_are_ignored(peer: str | None) -> None:
    headers = Headers({"x-pando-tenant": "victim", "x-pando-user": "victim", "x-forwarded-for": "10.0.0.1"})
    assert Identity(None, PROXY, "default").caller(headers, peer) == Caller("default")
    with pytest.raises(UnauthenticatedError):
        Identity([KEY], PROXY, "default").caller(headers, peer)


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1"])
def test_trusted_proxy_names_tenant_and_user(peer: str) -> None:
    headers = Headers({"x-pando-tenant": "acme", "x-pando-user": "ada"})
    caller = Identity([KEY], PROXY, "default").caller(headers, peer)
    assert principal_of(caller, [("user", "mallory")]) == Principal("acme", "ada")


def test_trusted_proxy_that_names_no_tenant_needs_a_key() -> None:
    identity = Identity([KEY], PROXY, "default")
    with pytest.raises(UnauthenticatedError):
        identity.caller(Headers({"x-pando-user": "ada"}), "10.0.0.1")
    caller = identity.caller(Headers({"x-pando-user": "ada", "authorization": f"Bearer {SECRET}"}), "10.0.0.1")
    assert caller == Caller("acme", "ada", "k1")


def test_a_header_smuggled_past_the_proxy_is_refused() -> None:
    headers = Headers(raw=[(b"x-pando-user", b"victim"), (b"x-pando-user", b"ada")])
    with pytest.raises(InvalidRequestError):
        Identity(None, PROXY, "default").caller(headers, "10.0.0.1")


def test_fields_count_in_their_order_and_empty_ones_not_at_all() -> None:
    caller = Caller("t")
    named = [("user_id", ""), ("user", "b"), ("safety_identifier", "c")]
    assert principal_of(caller, named) == Principal("t", "b")


def test_nobody_named_is_nobody_else() -> None:
    caller = Caller("t")
    principals = {principal_of(caller, [("user", None)]) for _ in range(100)}
    assert len(principals) == 100
    assert {principal.tenant for principal in principals} == {"t"}


def test_same_user_of_two_tenants_is_two_principals() -> None:
    assert principal_of(Caller("a"), [("user", "x")]) != principal_of(Caller("b"), [("user", "x")])


@pytest.mark.parametrize("name", ["a\x00", "a\x1f", "a\x7f", "a\x85", "a\u2028b", "\ud800", "é" * 129])
def test_names_that_could_harm_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        principal_of(Caller("t"), [("user", name)])


@pytest.mark.parametrize("name", ["a", "ada@example.com", "用户", "a b", "é" * 128, "👩‍🔬"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert principal_of(Caller("t"), [("user", name)]).user == name


def test_keys_file_is_read(tmp_path: Path) -> None:
    text = f'[[keys]]\nid = "k1"\nsha256 = "{KEY.sha256}"\ntenant = "acme"\n'
    assert load_keys(write_keys(tmp_path / "keys.toml", text)) == [KEY]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 3",
        "[[keys]]\n",
        "not toml",
        '[[keys]]\nid = "a"\nsha256 = "x"\ntenant = "t"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = ""\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t\\n"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\nrole = "x"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\ncache = "off"\n',
        f'other = 1\n[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\n',
        f'[[keys]]\nid = "a"\nsha256 = "{KEY.sha256}"\ntenant = "t"\n' * 2,
    ],
)
def test_malformed_keys_file_stops_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"keys\.toml"):
        load_keys(write_keys(tmp_path / "keys.toml", text))


def test_missing_keys_file_and_bad_network_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        load_keys(tmp_path / "none.toml")
    with pytest.raises(ConfigurationError):
        parse_networks(["10.0.0.1/8"])


async def test_requests_with_and_without_key_over_http(tmp_path: Path) -> None:
    text = f'[[keys]]\nid = "k1"\nsha256 = "{KEY.sha256}"\ntenant = "acme"\n'
    keys_file = write_keys(tmp_path / "keys.toml", text)
    gateway = gateway_saying("x", keys_file=keys_file)
    body = {"model": "tiny", "prompt": "x", "user": "ada"}
    refused = await gateway.post("/v1/completions", body)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    accepted = await gateway.post("/v1/completions", body, {"authorization": f"Bearer {SECRET}"})
    assert accepted.status_code == 200
    assert gateway.ring.submitted[0].principal == Principal("acme", "ada")
    for path in ("/v1/models", "/v1/models/tiny"):
        assert (await gateway.get(path)).status_code == 401
    for path in ("/tokenize", "/detokenize"):
        assert (await gateway.post(path, {})).status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert (await gateway.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("key", "asked", "sent"),
    [
        ("none", None, CacheMode.NONE),
        ("none", "default", CacheMode.NONE),
        ("private", "default", CacheMode.PRIVATE),
        ("private", "none", CacheMode.NONE),
        ("default", "private", CacheMode.PRIVATE),
    ],
)
async def test_opt_out_of_a_key_holds_whatever_its_requests_ask_for(
    tmp_path: Path, key: str, asked: str | None, sent: CacheMode
) -> None:
    text = f'[[keys]]\nid = "k1"\nsha256 = "{KEY.sha256}"\ntenant = "acme"\ncache = "{key}"\n'
    gateway = gateway_saying("x", keys_file=write_keys(tmp_path / "keys.toml", text))
    body = {"model": "tiny", "prompt": "x", **({"cache_mode": asked} if asked else {})}
    accepted = await gateway.post("/v1/completions", body, {"authorization": f"Bearer {SECRET}"})
    assert accepted.status_code == 200
    assert gateway.ring.submitted[0].cache_mode is sent


async def test_proxy_headers_count_by_the_direct_peer_over_http() -> None:
    gateway = gateway_saying("x", trusted_proxies=("10.0.0.0/8",))
    headers = {"x-pando-tenant": "acme", "x-pando-user": "ada", "x-forwarded-for": "10.0.0.1"}
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    gateway.peer = "10.0.0.1"
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    stranger, trusted = (request.principal for request in gateway.ring.submitted)
    assert stranger.tenant == "default"
    assert trusted == Principal("acme", "ada")
