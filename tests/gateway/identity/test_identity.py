"""Whose request it is. Several tests are named after what went wrong in other gateways."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from common.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from common.types import CacheMode, Subject, View
from gateway.identity.caller import Caller, identify, key, owns, person
from gateway.identity.identity import Identity, Keyless
from gateway.identity.keys import ApiKey, KeyRing, hash_of
from gateway.identity.peers import TrustedProxy, parse_networks
from tests.gateway.support import gateway_saying

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.identity.identity import Anonymous

NO_PROXY = TrustedProxy((), "x-pando-tenant", "x-pando-user")
PROXY = TrustedProxy(parse_networks(["10.0.0.0/8", "fd00::/8"]), "x-pando-tenant", "x-pando-user")
SECRET = "pando-k1-0123456789abcdef"
KEY = ApiKey("k1", hash_of(SECRET), "acme")
APPLICATION = Caller("acme", "key/k1")
BACK_END = Caller("acme", "key/k3", vouches=True)
ANN = Caller("acme", "user/ann")
ANYONE = Keyless("home")
STRANGER = "1.2.3.4"


def identity_of(*keys: ApiKey, proxy: TrustedProxy = NO_PROXY) -> Identity:
    return Identity(KeyRing(keys), proxy, ANYONE)


def bearer(secret: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_key_names_tenant_user_and_rights() -> None:
    key = dataclasses.replace(KEY, user="ann", vouches_for_users=True, admin=True, cache=CacheMode.NONE)
    caller = await identity_of(key).caller(Headers(bearer()), STRANGER)
    assert caller == Caller("acme", "user/ann", vouches=True, is_admin=True, cache=CacheMode.NONE)


async def test_key_may_come_as_anthropics_clients_send_it() -> None:
    assert (await identity_of(KEY).caller(Headers({"x-api-key": SECRET}), STRANGER)) == APPLICATION


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
async def test_callers_without_a_known_key_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(UnauthenticatedError):
        await identity_of(KEY).caller(Headers(headers), STRANGER)


@pytest.mark.parametrize(
    ("anonymous", "here", "elsewhere"),
    [
        ("auto", Caller("home", "local", is_admin=True), Caller("home", "anonymous")),
        ("local", Caller("home", "local", is_admin=True), Caller("home", "local")),
        ("isolated", Caller("home", "anonymous", is_admin=True), Caller("home", "anonymous")),
        ("vouched", Caller("home", "local", vouches=True, is_admin=True), Caller("home", "anonymous", vouches=True)),
    ],
)
async def test_without_keys_the_setting_decides_the_subject_of_requests(
    anonymous: Anonymous, here: Caller, elsewhere: Caller
) -> None:
    identity = Identity(None, NO_PROXY, Keyless("home", anonymous))
    headers = Headers({**bearer("anything"), "host": "localhost"})
    assert await identity.caller(headers, "::1") == here
    assert await identity.caller(headers, STRANGER) == elsewhere


@pytest.mark.parametrize("peer", ["::1", STRANGER])
async def test_requests_without_credential_can_be_refused(peer: str) -> None:
    with pytest.raises(UnauthenticatedError):
        await Identity(None, NO_PROXY, Keyless("home", "refuse")).caller(Headers({"host": "localhost"}), peer)


@pytest.mark.parametrize("peer", ["11.0.0.1", "::1", None, "", "unix", "10.0.0.1.evil"])
async def test_header_trusted_from_any_peer(peer: str | None) -> None:
    named = {"x-pando-tenant": "victim", "x-pando-user": "victim", "x-forwarded-for": "10.0.0.1"}
    headers = Headers({**named, "host": "localhost"})
    assert await Identity(None, PROXY, ANYONE).caller(headers, peer) == Caller("home", "anonymous")
    with pytest.raises(UnauthenticatedError):
        await identity_of(KEY, proxy=PROXY).caller(headers, peer)


async def test_any_key_may_set_the_customer_header() -> None:
    headers = Headers({**bearer(), "x-pando-tenant": "victim", "x-pando-user": "victim"})
    assert await identity_of(KEY, proxy=PROXY).caller(headers, STRANGER) == APPLICATION


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1"])
async def test_trusted_proxy_names_tenant_and_user(peer: str) -> None:
    headers = Headers({"x-pando-tenant": "acme", "x-pando-user": "ada"})
    caller = await identity_of(KEY, proxy=PROXY).caller(headers, peer)
    assert identify(caller).view == View(Subject("acme", "user/ada"))
    # The body was written by the proxy's client: it names nobody, and narrows.
    assert identify(caller, [("user", "mallory")]).view == View(Subject("acme", "user/ada"), "user=mallory")


async def test_trusted_proxy_that_names_a_tenant_only_vouches_for_no_user_of_the_body() -> None:
    caller = await identity_of(KEY, proxy=PROXY).caller(Headers({"x-pando-tenant": "acme"}), "10.1.2.3")
    subjects = {identify(caller, [("user", name)]).subject for name in ("", "ann", "bob")}
    assert subjects == {Subject("acme", "proxy")}


async def test_a_trusted_proxy_without_a_tenant_needs_a_key_and_its_users_get_no_key_rights() -> None:
    key = dataclasses.replace(KEY, admin=True, vouches_for_users=True)
    identity = identity_of(key, proxy=PROXY)
    with pytest.raises(UnauthenticatedError):
        await identity.caller(Headers({"x-pando-user": "ada"}), "10.0.0.1")
    caller = await identity.caller(Headers({"x-pando-user": "ada", **bearer()}), "10.0.0.1")
    assert caller == Caller("acme", "user/ada")


async def test_a_header_smuggled_past_the_proxy_is_refused() -> None:
    headers = Headers(raw=[(b"x-pando-user", b"victim"), (b"x-pando-user", b"ada")])
    with pytest.raises(InvalidRequestError):
        await Identity(None, PROXY, ANYONE).caller(headers, "10.0.0.1")


def test_the_first_non_empty_user_field_counts() -> None:
    named = [("user_id", ""), ("user", "b"), ("safety_identifier", "c")]
    assert identify(BACK_END, named).view == View(Subject("acme", "user/b"))


@pytest.mark.parametrize("caller", [APPLICATION, ANN, Caller("home", "local")])
def test_unnamed_requests_are_their_credential_s(caller: Caller) -> None:
    views = {identify(caller, [("user", None)]).view for _ in range(3)}
    assert views == {View(Subject(caller.tenant, caller.subject))}


def test_anonymous_requests_are_one_subject_that_shares_and_proves_nothing() -> None:
    caller = Caller("home", "anonymous")
    requests = [identify(caller, [("user", "ann")], salt="same") for _ in range(100)]
    # In a tenant of their own, so that they find no text that the default tenant shares.
    assert {request.subject for request in requests} == {Subject("anonymous", "anonymous")}
    assert len({request.view for request in requests}) == 100
    assert requests[0].cache_mode(CacheMode.DEFAULT) is CacheMode.PRIVATE
    assert requests[0].cache_mode(CacheMode.NONE) is CacheMode.NONE


def test_a_credential_that_vouches_names_its_users() -> None:
    assert identify(BACK_END, [("user", "bob")]).view == View(Subject("acme", "user/bob"))
    assert identify(BACK_END).view == View(Subject("acme", "key/k3"))
    # The same person as a personal key's.
    assert identify(BACK_END, [("user", "ann")]).view == identify(ANN).view


@pytest.mark.parametrize("caller", [APPLICATION, ANN, Caller("home", "local"), Caller("acme", "proxy")])
def test_names_and_salts_narrow_the_view_and_make_no_subject(caller: Caller) -> None:
    requests = [
        identify(caller),
        identify(caller, [("user", "one")]),
        identify(caller, [("user", "two")]),
        identify(caller, salt="one"),
        identify(caller, [("user", "one")], salt="one"),
    ]
    assert len({request.view for request in requests}) == 5
    assert {request.subject for request in requests} == {Subject(caller.tenant, caller.subject)}


NAMES = st.text(st.sampled_from("ab/%2F=&\u00e9"), min_size=1, max_size=8)
CALLERS = st.one_of(
    st.builds(Caller, st.just("t"), NAMES.map(person)),
    st.builds(Caller, st.just("t"), NAMES.map(key)),
    st.builds(Caller, st.just("t"), NAMES.map(key), vouches=st.just(True)),
    st.just(Caller("t", "local")),
    st.just(Caller("t", "proxy")),
)


@given(CALLERS, CALLERS, st.none() | NAMES, st.none() | NAMES, st.none() | NAMES, st.none() | NAMES)
def test_views_are_equal_only_for_the_same_subject_and_the_same_narrowing(
    first: Caller, second: Caller, a: str | None, b: str | None, salt_a: str | None, salt_b: str | None
) -> None:
    def meaning(caller: Caller, name: str | None, salt: str | None) -> tuple[object, ...]:
        if caller.vouches and name:
            return ("user", name, None, salt)
        kind, _, own = caller.subject.partition("/")
        return (kind, own, name, salt)

    mine, theirs = identify(first, [("user", a)], salt_a).view, identify(second, [("user", b)], salt_b).view
    assert (mine == theirs) == (meaning(first, a, salt_a) == meaning(second, b, salt_b))


@pytest.mark.parametrize("name", ["/k1", "key/k1", "../key/k1", "local", "anonymous", "session:x", "proxy"])
def test_no_user_s_name_is_a_key_or_another_kind_of_subject(name: str) -> None:
    assert identify(BACK_END, [("user", name)]).subject == Subject("acme", f"user/{name}")
    others = {"key/k1", "key/k3", "local", "anonymous", "proxy"}
    assert identify(BACK_END, [("user", name)]).subject.name not in others


def test_long_names_still_fit_and_differ() -> None:
    for caller in (APPLICATION, BACK_END):
        first, second = (identify(caller, [("user", name * 256)], salt="x" * 256).view for name in "ab")
        assert first != second
        assert max(len(first.subject.name), len(first.salt)) <= 256


def test_same_user_of_two_tenants_is_two_subjects() -> None:
    named = [("user", "x")]
    rival = dataclasses.replace(BACK_END, tenant="rival")
    assert identify(BACK_END, named).subject != identify(rival, named).subject


def test_requests_are_owned_by_their_subject_and_by_its_voucher() -> None:
    assert owns(ANN, identify(ANN, [("user", "x")], salt="y").view)
    assert owns(BACK_END, identify(BACK_END, [("user", "ann")]).view)
    assert not owns(APPLICATION, identify(ANN).view)
    assert not owns(dataclasses.replace(BACK_END, tenant="rival"), identify(ANN).view)
    assert not owns(BACK_END, identify(APPLICATION).view)


def test_anonymous_requests_are_owned_by_no_caller() -> None:
    caller = Caller("home", "anonymous")
    assert not owns(caller, identify(caller).view)
    assert not owns(dataclasses.replace(caller, vouches=True), identify(caller).view)


def test_remote_vouched_names_are_subjects_and_unnamed_requests_stay_anonymous() -> None:
    caller = Caller("home", "anonymous", vouches=True)
    named = [identify(caller, [("user", "ann")]) for _ in range(2)]
    assert {request.view for request in named} == {View(Subject("home", "user/ann"))}
    assert named[0].cache_mode(None) is CacheMode.DEFAULT
    assert identify(caller).view.tenant == "anonymous"


async def test_no_credential_names_the_tenant_of_anonymous_requests() -> None:
    key = dataclasses.replace(KEY, tenant="anonymous")
    with pytest.raises(UnauthenticatedError, match="reserved"):
        await identity_of(key).caller(Headers(bearer()), STRANGER)


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
    assert identify(Caller("t", "key/k", cache=key), []).cache_mode(wanted) is got


@pytest.mark.parametrize("name", ["a\x00", "a\x1f", "a\x7f", "a\x85", "a\u2028b", "\ud800", "é" * 129])
def test_names_that_could_harm_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        identify(APPLICATION, [("user", name)])


@pytest.mark.parametrize("name", ["a", "ada@example.com", "用户", "a b", "é" * 120, "👩‍🔬"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert identify(BACK_END, [("user", name)]).view.subject.name == f"user/{name}"


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
    assert gateway.pipeline.submitted[0].view == View(Subject("acme", "key/k1"), "user=ada")
    for path in ("/v1/models", "/v1/models/tiny"):
        assert (await gateway.get(path)).status_code == 401
    for path in ("/tokenize", "/detokenize"):
        assert (await gateway.post(path, {})).status_code == 401
    for path in ("/health", "/ready"):
        assert (await gateway.get(path)).status_code == 200


async def test_proxy_headers_count_by_the_direct_peer_over_http() -> None:
    gateway = gateway_saying("x", trusted_proxies=("10.0.0.0/8",))
    headers = {"x-pando-tenant": "acme", "x-pando-user": "ada", "x-forwarded-for": "10.0.0.1"}
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    gateway.peer = "10.0.0.1"
    await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers)
    stranger, trusted = (request.view for request in gateway.pipeline.submitted)
    assert stranger.tenant == "anonymous"
    assert trusted == View(Subject("acme", "user/ada"))


@pytest.mark.parametrize(
    ("caller", "wanted", "got"),
    [
        (Caller("t", "key/k"), None, 0),
        (Caller("t", "key/k"), -3, -3),
        (Caller("t", "key/k"), 1, None),
        (Caller("t", "key/k", max_priority=5), 5, 5),
        (Caller("t", "key/k", max_priority=5), 6, None),
        (Caller("t", "key/batch", max_priority=-10), None, -10),
        (Caller("t", "key/batch", max_priority=-10), 0, None),
        (Caller("t", "key/k", is_admin=True), 1_000, 1_000),
    ],
)
def test_a_credential_bounds_the_priorities_of_its_requests(
    caller: Caller, wanted: int | None, got: int | None
) -> None:
    requester = identify(caller, [])
    if got is None:
        with pytest.raises(PermissionDeniedError, match=f"not for {wanted}") as refused:
            requester.priority(wanted, 0)
        assert refused.value.param == "priority"
    else:
        assert requester.priority(wanted, 0) == got
