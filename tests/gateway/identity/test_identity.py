"""Whose request it is. Several tests are named after what went wrong in other gateways."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from common.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from common.types import CacheMode, Principal
from gateway.identity.caller import Caller, Subject, identify, owns
from gateway.identity.identity import Identity
from gateway.identity.keys import ApiKey, KeyRing, hash_of
from gateway.identity.proxies import TrustedProxy, parse_networks
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

NO_PROXY = TrustedProxy((), "x-pando-tenant", "x-pando-user")
PROXY = TrustedProxy(parse_networks(["10.0.0.0/8", "fd00::/8"]), "x-pando-tenant", "x-pando-user")
SECRET = "pando-k1-0123456789abcdef"
KEY = ApiKey("k1", hash_of(SECRET), "acme")
APPLICATION = Caller("acme", key_id="k1")
STRANGER = "1.2.3.4"


def identity_of(*keys: ApiKey, proxy: TrustedProxy = NO_PROXY) -> Identity:
    return Identity(KeyRing(keys), proxy, "default")


def bearer(secret: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_key_names_tenant_user_and_rights() -> None:
    key = dataclasses.replace(KEY, user="ann", act_for_users=True, admin=True, cache=CacheMode.NONE)
    caller = await identity_of(key).caller(Headers(bearer()), STRANGER)
    assert caller == Caller("acme", "ann", "k1", may_act_for=True, is_admin=True, cache=CacheMode.NONE)


async def test_key_may_come_as_anthropics_clients_send_it() -> None:
    assert (await identity_of(KEY).caller(Headers({"x-api-key": SECRET}), STRANGER)).key_id == "k1"


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
        {"authorization": "Bearer a.b.c"},
        {"authorization": f"Bearer {'x' * 100_000}"},
        {"x-api-key": "wrong"},
    ],
)
async def test_without_a_known_key_nobody_comes_in(headers: dict[str, str]) -> None:
    with pytest.raises(UnauthenticatedError):
        await identity_of(KEY).caller(Headers(headers), STRANGER)


async def test_without_keys_everybody_belongs_to_the_default_tenant_and_only_this_machine_administrates() -> None:
    identity = Identity(None, NO_PROXY, "home")
    headers = Headers(bearer("anything"))
    assert await identity.caller(headers, STRANGER) == Caller("home", may_act_for=True)
    assert await identity.caller(headers, "::1") == Caller("home", may_act_for=True, is_admin=True)


@pytest.mark.parametrize("peer", ["11.0.0.1", "::1", None, "", "unix", "10.0.0.1.evil"])
async def test_header_trusted_from_any_peer(peer: str | None) -> None:
    headers = Headers({"x-pando-tenant": "victim", "x-pando-user": "victim", "x-forwarded-for": "10.0.0.1"})
    caller = await Identity(None, PROXY, "default").caller(headers, peer)
    assert (caller.tenant, caller.user) == ("default", None)
    with pytest.raises(UnauthenticatedError):
        await identity_of(KEY, proxy=PROXY).caller(headers, peer)


async def test_any_key_may_set_the_customer_header() -> None:
    headers = Headers({**bearer(), "x-pando-tenant": "victim", "x-pando-user": "victim"})
    assert await identity_of(KEY, proxy=PROXY).caller(headers, STRANGER) == APPLICATION


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1"])
async def test_trusted_proxy_names_tenant_and_user(peer: str) -> None:
    headers = Headers({"x-pando-tenant": "acme", "x-pando-user": "ada"})
    caller = await identity_of(KEY, proxy=PROXY).caller(headers, peer)
    assert identify(caller, []).principal == Principal("acme", "ada")
    assert identify(caller, [("user", "mallory")]).principal == Principal("acme", "ada/mallory")


async def test_trusted_proxy_that_names_no_tenant_needs_a_key_and_lends_its_users_no_rights() -> None:
    key = dataclasses.replace(KEY, admin=True, act_for_users=True)
    identity = identity_of(key, proxy=PROXY)
    with pytest.raises(UnauthenticatedError):
        await identity.caller(Headers({"x-pando-user": "ada"}), "10.0.0.1")
    caller = await identity.caller(Headers({"x-pando-user": "ada", **bearer()}), "10.0.0.1")
    assert caller == Caller("acme", "ada", "k1")


async def test_a_header_smuggled_past_the_proxy_is_refused() -> None:
    headers = Headers(raw=[(b"x-pando-user", b"victim"), (b"x-pando-user", b"ada")])
    with pytest.raises(InvalidRequestError):
        await Identity(None, PROXY, "default").caller(headers, "10.0.0.1")


def test_fields_count_in_their_order_and_empty_ones_not_at_all() -> None:
    named = [("user_id", ""), ("user", "b"), ("safety_identifier", "c")]
    assert identify(Caller("t", may_act_for=True), named).principal == Principal("t", "b")


def test_nobody_named_is_nobody_else() -> None:
    principals = {identify(APPLICATION, [("user", None)]).principal for _ in range(100)}
    assert len(principals) == 100
    assert {principal.tenant for principal in principals} == {"acme"}


def test_a_personal_key_stands_for_its_person_though_nobody_is_named() -> None:
    assert identify(Caller("acme", "ann", "k2"), []).principal == Principal("acme", "ann")


def test_who_may_act_for_users_names_them_as_they_are() -> None:
    caller = Caller("acme", "ann", "k2", may_act_for=True)
    assert identify(caller, [("user", "bob")]).principal == Principal("acme", "bob")
    assert identify(caller, []).principal == Principal("acme", "ann")


NAMES = st.text(st.sampled_from("ab/%2F\u00e9"), min_size=1, max_size=8)
CALLERS = st.one_of(
    st.builds(Caller, st.just("t"), NAMES),
    st.builds(Caller, st.just("t"), st.none(), NAMES),
)


@given(CALLERS, CALLERS, NAMES, NAMES)
def test_no_name_reaches_anybody_elses_principal(first: Caller, second: Caller, a: str, b: str) -> None:
    mine, theirs = identify(first, [("user", a)]).principal, identify(second, [("user", b)]).principal
    assert (mine == theirs) == ((first, a) == (second, b))
    assert mine != identify(second, []).principal


def test_long_names_still_fit_and_differ() -> None:
    caller = Caller("t", "/" * 256)
    first, second = (identify(caller, [("user", name * 256)]).principal for name in "ab")
    assert first != second
    assert len(first.user) <= 256


def test_same_user_of_two_tenants_is_two_principals() -> None:
    named = [("user", "x")]
    assert identify(Caller("a", key_id="k"), named).principal != identify(Caller("b", key_id="k"), named).principal


def test_names_do_not_multiply_the_limits_of_who_may_not_act_for_others() -> None:
    subjects = {identify(APPLICATION, [("user", str(number))]).subject for number in range(10)}
    assert subjects == {Subject("acme", "/k1")}
    acting = Caller("acme", key_id="k1", may_act_for=True)
    assert identify(acting, [("user", "ann")]).subject == Subject("acme", "ann")
    assert identify(acting, []).subject == identify(acting, []).subject


@pytest.mark.parametrize(
    ("key", "wanted", "got"),
    [
        (CacheMode.NONE, CacheMode.DEFAULT, CacheMode.NONE),
        (CacheMode.PRIVATE, None, CacheMode.PRIVATE),
        (CacheMode.PRIVATE, CacheMode.NONE, CacheMode.NONE),
        (CacheMode.DEFAULT, CacheMode.PRIVATE, CacheMode.PRIVATE),
    ],
)
def test_the_stricter_cache_mode_counts(key: CacheMode, wanted: CacheMode | None, got: CacheMode) -> None:
    assert identify(Caller("t", key_id="k", cache=key), []).cache_mode(wanted) is got


@pytest.mark.parametrize("name", ["a\x00", "a\x1f", "a\x7f", "a\x85", "a\u2028b", "\ud800", "é" * 129])
def test_names_that_could_harm_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        identify(APPLICATION, [("user", name)])


@pytest.mark.parametrize("name", ["a", "ada@example.com", "用户", "a b", "é" * 120, "👩‍🔬"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert identify(APPLICATION, [("user", name)]).principal.user == f"/k1/{name}"


async def test_requests_with_and_without_key_over_http(tmp_path: Path) -> None:
    text = f'[[keys]]\nid = "k1"\nsha256 = "{KEY.sha256}"\ntenant = "acme"\n'
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(text, encoding="utf-8")
    gateway = gateway_saying("x", keys_file=keys_file)
    body = {"model": "tiny", "prompt": "x", "user": "ada"}
    refused = await gateway.post("/v1/completions", body)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    accepted = await gateway.post("/v1/completions", body, {"authorization": f"Bearer {SECRET}"})
    assert accepted.status_code == 200
    assert gateway.ring.submitted[0].principal == Principal("acme", "/k1/ada")
    for path in ("/v1/models", "/v1/models/tiny"):
        assert (await gateway.get(path)).status_code == 401
    for path in ("/tokenize", "/detokenize"):
        assert (await gateway.post(path, {})).status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert (await gateway.get(path)).status_code == 200


async def test_proxy_headers_count_by_the_direct_peer_over_http() -> None:
    gateway = gateway_saying("x", trusted_proxies=("10.0.0.0/8",))
    headers = {"x-pando-tenant": "acme", "x-pando-user": "ada", "x-forwarded-for": "10.0.0.1"}
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    gateway.peer = "10.0.0.1"
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    stranger, trusted = (request.principal for request in gateway.ring.submitted)
    assert stranger.tenant == "default"
    assert trusted == Principal("acme", "ada")


@pytest.mark.parametrize(
    ("caller", "wanted", "got"),
    [
        (Caller("t", key_id="k"), None, 0),
        (Caller("t", key_id="k"), -3, -3),
        (Caller("t", key_id="k"), 1, None),
        (Caller("t", key_id="k", max_priority=5), 5, 5),
        (Caller("t", key_id="k", max_priority=5), 6, None),
        (Caller("t", key_id="batch", max_priority=-10), None, -10),
        (Caller("t", key_id="batch", max_priority=-10), 0, None),
        (Caller("t", key_id="k", is_admin=True), 1_000, 1_000),
    ],
)
def test_a_credential_bounds_the_priorities_of_its_requests(
    caller: Caller, wanted: int | None, got: int | None
) -> None:
    asker = identify(caller, [])
    if got is None:
        with pytest.raises(PermissionDeniedError, match=f"not for {wanted}") as refused:
            asker.priority(wanted, 0)
        assert refused.value.param == "priority"
    else:
        assert asker.priority(wanted, 0) == got


def test_a_conversation_of_nobody_is_a_user_of_its_own() -> None:
    caller = Caller("acme", key_id="k")
    first, second = identify(caller, [], "one"), identify(caller, [], "two")
    assert first.principal == identify(caller, [], "one").principal
    assert first.principal != second.principal
    assert first.subject == second.subject == identify(caller, []).subject
    assert owns(caller, first.principal)
    # Whoever is named, or whom the credential stands for, has the session.
    assert identify(caller, [("user", "ann")], "one").principal == identify(caller, [("user", "ann")]).principal
    assert identify(Caller("acme", "ann", "k2"), [], "one").principal == Principal("acme", "ann")
    acting = Caller("acme", key_id="k3", may_act_for=True)
    assert identify(acting, [], "one").principal == Principal("acme", "session:one")
    assert identify(acting, [], "one").subject == identify(acting, []).subject
