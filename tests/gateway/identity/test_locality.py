"""Who is a person at this machine, and who only looks like one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.datastructures import Headers

from common.errors import PermissionDeniedError
from common.settings import GatewaySettings
from gateway.identity.caller import ANONYMOUS, LOCAL, Caller
from gateway.identity.identity import Identity, Keyless
from gateway.identity.peers import FORWARDING_HEADERS, FORWARDING_PREFIXES, Locality, TrustedProxy, parse_networks

NO_PROXY = TrustedProxy((), "X-Pando-Tenant", "X-Pando-User")
LOCAL_PROXY = TrustedProxy(parse_networks(["127.0.0.0/8", "::1/128"]), "x-pando-tenant", "x-pando-user")
PLAIN = Locality(NO_PROXY)
NAMED = Locality(NO_PROXY, frozenset({"llm.example"}))
LOOPBACK_HOSTS = ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.8.9.1", "[::1]", "[::1]:8000"]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1:8000:evil",
    "localhost evil.example",
    "[::1",
    "::1",
    "[::1]evil",
    "",
]


def sent_to(host: str, **headers: str) -> Headers:
    return Headers({"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}})


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
def test_a_direct_connection_over_loopback_is_a_local_person(peer: str, host: str) -> None:
    assert PLAIN.is_local_person(peer, sent_to(host))
    assert PLAIN.may_administrate(peer, sent_to(host))
    PLAIN.check_host(peer, sent_to(host))


@pytest.mark.parametrize("peer", ["10.0.0.7", "192.168.1.2", "::ffff:10.0.0.7", "fe80::1", "unix", "", None])
def test_a_remote_connection_is_not_local_whatever_its_host_header(peer: str | None) -> None:
    assert not PLAIN.is_local_person(peer, sent_to("localhost"))
    PLAIN.check_host(peer, sent_to("pando-gateway.llm.svc"))


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_rebound_host_name_is_not_local_and_refused(host: str) -> None:
    assert not PLAIN.is_local_person("127.0.0.1", sent_to(host))
    with pytest.raises(PermissionDeniedError, match=r"gateway\.allowed_hosts"):
        PLAIN.check_host("127.0.0.1", sent_to(host))


@pytest.mark.parametrize("values", [[], ["localhost", "evil.example"], ["localhost", "localhost"]])
def test_there_is_exactly_one_host(values: list[str]) -> None:
    headers = Headers(raw=[(b"host", value.encode()) for value in values])
    assert not PLAIN.is_local_person("127.0.0.1", headers)
    with pytest.raises(PermissionDeniedError):
        PLAIN.check_host("127.0.0.1", headers)


def test_an_address_cannot_be_rebound_so_it_is_answered_but_only_a_loopback_one_is_local() -> None:
    for host in ("192.168.1.2:8000", "[fd00::1]:8000", "0.0.0.0:8000"):
        PLAIN.check_host("127.0.0.1", sent_to(host))
        assert not PLAIN.is_local_person("127.0.0.1", sent_to(host))


def test_an_allowed_host_name_is_accepted_and_does_not_make_the_caller_local() -> None:
    NAMED.check_host("127.0.0.1", sent_to("LLM.example:443"))
    assert not NAMED.is_local_person("127.0.0.1", sent_to("llm.example"))
    with pytest.raises(PermissionDeniedError):
        NAMED.check_host("127.0.0.1", sent_to("www.llm.example"))


@pytest.mark.parametrize("name", [*sorted(FORWARDING_HEADERS), *(f"{prefix}any" for prefix in FORWARDING_PREFIXES)])
def test_a_forwarding_header_makes_the_connection_a_proxy_s(name: str) -> None:
    assert not PLAIN.is_local_person("127.0.0.1", Headers({"host": "localhost", name.upper(): ""}))


@pytest.mark.parametrize("name", ["x-pando-tenant", "x-pando-user"])
def test_identity_headers_make_the_connection_a_proxy_s(name: str) -> None:
    assert not PLAIN.is_local_person("127.0.0.1", Headers({"host": "localhost", name: "ann"}))


def test_the_http_version_of_nginx_makes_the_connection_a_proxy_s() -> None:
    assert not PLAIN.is_local_person("127.0.0.1", sent_to("127.0.0.1:8000"), "1.0")


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_trusted_local_proxy_is_not_a_local_person_even_without_headers(peer: str) -> None:
    locality = Locality(LOCAL_PROXY)
    assert not locality.is_local_person(peer, sent_to("localhost"))
    locality.check_host(peer, sent_to("llm.example"))


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:8000"}, True),
        ({"origin": "http://localhost:3000"}, False),
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_a_page_of_another_origin_does_not_administrate(headers: dict[str, str], may: bool) -> None:
    assert PLAIN.may_administrate("127.0.0.1", Headers({"host": "localhost:8000", **headers})) is may


PIECES = ["localhost", "127.0.0.1", "[::1]", "[", "]", ":", ":80", ".", "@", "evil.example", " ", ",", "/", "#", "\xa0"]
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:80+)?")


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join))
def test_no_composition_of_loopback_and_foreign_names_is_local(host: str) -> None:
    headers = Headers(raw=[(b"host", host.encode("latin-1"))])
    assert PLAIN.is_local_person("127.0.0.1", headers) == bool(LOCAL_HOST.fullmatch(host))


@pytest.mark.parametrize("headers", [{"x-forwarded-for": "203.0.113.9"}, {"via": "1.1 proxy"}, {"x-pando-user": "ann"}])
async def test_users_of_a_proxy_on_this_machine_are_not_administrators(headers: dict[str, str]) -> None:
    for proxy in (NO_PROXY, LOCAL_PROXY):
        caller = await Identity(None, proxy, Keyless("home")).caller(sent_to("localhost", **headers), "127.0.0.1")
        assert not caller.is_admin
        assert caller.subject != LOCAL


async def test_a_rebound_name_is_refused_by_identity() -> None:
    with pytest.raises(PermissionDeniedError):
        await Identity(None, NO_PROXY, Keyless("home")).caller(sent_to("evil.example"), "127.0.0.1")
    allowed = Identity(None, NO_PROXY, Keyless("home", allowed_hosts=frozenset({"llm.example"})))
    assert await allowed.caller(sent_to("llm.example"), "127.0.0.1") == Caller("home", ANONYMOUS)


@pytest.mark.parametrize("peer", ["127.0.0.1", "172.18.0.1"])
async def test_with_a_single_local_subject_a_rebound_name_is_refused_from_every_peer(peer: str) -> None:
    # In Compose, the browser of the machine comes through a bridge.
    one = Identity(None, NO_PROXY, Keyless("home", "local", frozenset({"gateway"})))
    with pytest.raises(PermissionDeniedError):
        await one.caller(sent_to("evil.example:8000"), peer)
    for host in ("127.0.0.1:8000", "localhost:8000", "gateway:8000", "192.168.1.2"):
        assert (await one.caller(sent_to(host), peer)).subject == LOCAL
    assert not (await one.caller(sent_to("localhost"), "172.18.0.1")).is_admin


async def test_a_local_person_keeps_the_same_subject_through_a_page_that_may_not_administer() -> None:
    headers = sent_to("localhost:8000", origin="https://chat.example")
    assert await Identity(None, NO_PROXY, Keyless("home")).caller(headers, "127.0.0.1") == Caller("home", LOCAL)


def test_allowed_hosts_are_names() -> None:
    assert GatewaySettings(allowed_hosts=("LLM.Example", "pando-gateway")).allowed_hosts == (
        "llm.example",
        "pando-gateway",
    )
    for wrong in ("http://llm.example", "llm.example:8000", "*", "*.example", "", "a b"):
        with pytest.raises(ValidationError):
            GatewaySettings(allowed_hosts=(wrong,))
