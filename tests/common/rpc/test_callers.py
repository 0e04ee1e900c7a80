"""Which roles may call which methods over mutual TLS, on real servers with certificates made on the spot."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from pydantic import ValidationError
from structlog.testing import capture_logs

import protos.gen.pando.v1
from common.metrics import RPC_REFUSED
from common.rpc.channel import is_serving, open_channel
from common.rpc.interceptors import QUIET_PREFIX
from common.rpc.roles import CALLERS, Role
from common.rpc.security import Security, read_security
from common.rpc.server import RpcServer
from common.rpc.stream import RefusalLog, StreamLink, StreamSource, wait_until_accepted
from common.settings import RpcSettings, parse_settings
from common.settings.sources import SettingsParser
from protos.gen.pando.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from tests.fakes.certificates import Authority, Identity
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from google.protobuf.descriptor import MethodDescriptor

# The servers of these tests answer every call that is allowed with ABORTED.
DENIED, REACHED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED
GATEWAY_ONLY = "/pando.v1.Detokenizer/Subscribe"
# Services that servers offer beside their own; Operations and reflection are in the library.
BESIDE = {"pando.v1.Tokenizer": ["Sessions"], "pando.v1.Scheduler": ["Sessions"]}
# These two answer for themselves.
ANSWERED = ("/pando.v1.Operations/SetLogLevel", f"/{reflection.SERVICE_NAME}/ServerReflectionInfo")


# Any: the stubs of protobuf and of grpc's own messages have different descriptors.
def files() -> Iterator[Any]:
    package = protos.gen.pando.v1
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("_pb2"):
            yield importlib.import_module(f"{package.__name__}.{module.name}").DESCRIPTOR
    yield from (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


def methods() -> dict[str, MethodDescriptor]:
    return {
        f"/{service.full_name}/{method.name}": method
        for file in files()
        for service in file.services_by_name.values()
        for method in service.methods
    }


METHODS = methods()
CASES = [(server, method) for server, callers in CALLERS.items() for method in callers]


async def reach(_servicer: object, _request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(REACHED, "reached")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def people(authority: Authority) -> dict[str, Identity]:
    """A certificate for each role, one of no role, and one of another trust domain."""
    people = {str(role): authority.issue(role, roles=[role]) for role in Role}
    people["guest"] = authority.issue("guest")
    people["foreign"] = authority.issue("foreign", uris=[f"spiffe://elsewhere/pando/{role}" for role in Role])
    return people


@asynccontextmanager
async def serving(service: str, security: Security, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Run a server whose methods all answer REACHED, except those of `ANSWERED`."""
    server = RpcServer(service, address, security)
    for name in (service.rpartition(".")[2], *BESIDE.get(service, [])):
        module = importlib.import_module(f"protos.gen.pando.v1.{name.lower()}_pb2_grpc")
        prefix = f"/pando.v1.{name}/"
        reached = {method.removeprefix(prefix): reach for method in METHODS if method.startswith(prefix)}
        servicer = type(name, (getattr(module, f"{name}Servicer"),), reached)
        server.add(getattr(module, f"add_{name}Servicer_to_server"), servicer())
    await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}" if server.port > 1 else server.address
    finally:
        await server.stop(0)


async def outcome(channel: grpc.aio.Channel, method: str) -> tuple[grpc.StatusCode, str]:
    """Call `method`; return the status and what it says. A stream that the server accepts is OK."""
    descriptor = METHODS[method]
    kind = (
        f"{'stream' if descriptor.client_streaming else 'unary'}_{'stream' if descriptor.server_streaming else 'unary'}"
    )
    ask = getattr(channel, kind)(method)
    # Nothing is written to a stream: a write to one that has ended hides its status.
    call = ask(timeout=30) if descriptor.client_streaming else ask(b"", timeout=30)
    try:
        await (wait_until_accepted(call) if descriptor.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    call.cancel()
    return grpc.StatusCode.OK, ""


async def called_by(identity: Identity, address: str, method: str) -> tuple[grpc.StatusCode, str]:
    async with open_channel(address, read_security(identity.settings())) as channel:
        return await outcome(channel, method)


def test_the_table_lists_every_method_of_every_service_and_no_other() -> None:
    assert len(METHODS) >= 25
    listed = {method for callers in CALLERS.values() for method in callers}
    assert {method for method in METHODS if not method.startswith(QUIET_PREFIX)} == listed
    assert all(callers for by_method in CALLERS.values() for callers in by_method.values())


def test_each_server_lists_all_methods_of_the_services_that_it_offers() -> None:
    for server, callers in CALLERS.items():
        offered = {method.rpartition("/")[0] for method in callers}
        wanted = {method for method in METHODS if method.rpartition("/")[0] in offered}
        assert wanted == callers.keys()
        assert {f"/{server}", "/pando.v1.Operations", f"/{reflection.SERVICE_NAME}"} <= offered


@pytest.mark.parametrize(("server", "method"), CASES)
async def test_a_method_is_open_to_its_roles_and_to_no_other_certificate(
    people: dict[str, Identity], server: str, method: str
) -> None:
    accepted, refused = set(), set()
    async with serving(server, read_security(people["worker"].settings())) as address:
        for name, identity in people.items():
            code, details = await called_by(identity, address, method)
            if code is DENIED:
                refused.add(name)
                assert method in details
                assert (f"role {name}" in details) or (name in ("guest", "foreign") and "without a role" in details)
            else:
                accepted.add(name)
                assert code is REACHED or method in ANSWERED, (code, details)
    assert accepted == {str(role) for role in CALLERS[server][method]}
    assert refused == people.keys() - accepted


@pytest.mark.parametrize("server", CALLERS)
async def test_health_is_open_to_every_certificate(people: dict[str, Identity], server: str) -> None:
    async with serving(server, read_security(people["worker"].settings())) as address:
        for name in ("guest", "foreign", "operator"):
            async with open_channel(address, read_security(people[name].settings())) as channel:
                assert await is_serving(channel, server, timeout_s=30)
                stub: Any = health_pb2_grpc.HealthStub(channel)
                watch = stub.Watch(health_pb2.HealthCheckRequest(service=server), timeout=30)
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
                watch.cancel()


async def test_a_method_that_the_table_does_not_list_is_refused_to_every_role(
    people: dict[str, Identity], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = dict(CALLERS["pando.v1.Detokenizer"])
    del listed[GATEWAY_ONLY]
    monkeypatch.setitem(CALLERS, "pando.v1.Detokenizer", listed)
    async with serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address:
        for name, identity in people.items():
            assert (await called_by(identity, address, GATEWAY_ONLY))[0] is DENIED, name


async def test_a_refusal_is_logged_and_counted(people: dict[str, Identity]) -> None:
    counts = [RPC_REFUSED.labels(GATEWAY_ONLY, role) for role in ("worker", "none")]
    before = [count._value.get() for count in counts]
    async with serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address:
        with capture_logs() as logs:
            for name in ("worker", "guest", "guest", "gateway"):
                await called_by(people[name], address, GATEWAY_ONLY)
    assert [count._value.get() - start for count, start in zip(counts, before, strict=True)] == [1, 2]
    events = [(log["method"], log["role"]) for log in logs if log["event"] == "rpc.refused"]
    assert events == [(GATEWAY_ONLY, "worker"), (GATEWAY_ONLY, "none"), (GATEWAY_ONLY, "none")]


async def test_a_certificate_may_have_several_roles(authority: Authority, people: dict[str, Identity]) -> None:
    both = authority.issue("both", roles=["worker", "gateway"])
    async with serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address:
        assert (await called_by(both, address, GATEWAY_ONLY))[0] is REACHED
        code, details = await called_by(both, address, "/pando.v1.Detokenizer/Push")
    assert (code, "the role gateway+worker may not call" in details) == (DENIED, True)


async def test_names_of_a_role_can_be_given_and_take_the_place_of_its_uri(
    authority: Authority, people: dict[str, Identity]
) -> None:
    names = {"gateway": ["Edge.example.com", "spiffe://mesh/ns/llm/sa/edge"], "scheduler": ["edge.example.com"]}
    server = read_security(people["detokenizer"].settings(peer_names=names))
    by_host = authority.issue("by-host", hosts=["edge.example.com"])
    by_uri = authority.issue("by-uri", uris=["spiffe://mesh/ns/llm/sa/edge"])
    near = authority.issue("near", hosts=["a.edge.example.com"], uris=["spiffe://mesh/ns/llm/sa/edge2"])
    async with serving("pando.v1.Detokenizer", server) as address:
        push = "/pando.v1.Detokenizer/Push"
        assert (await called_by(by_host, address, GATEWAY_ONLY))[0] is REACHED
        assert (await called_by(by_host, address, push))[0] is REACHED
        assert (await called_by(by_uri, address, GATEWAY_ONLY))[0] is REACHED
        assert (await called_by(by_uri, address, push))[0] is DENIED
        assert (await called_by(near, address, GATEWAY_ONLY))[0] is DENIED
        assert (await called_by(people["gateway"], address, GATEWAY_ONLY))[0] is DENIED
        assert (await called_by(people["operator"], address, ANSWERED[1]))[0] is grpc.StatusCode.OK


async def test_the_trust_domain_can_be_another(people: dict[str, Identity]) -> None:
    server = read_security(people["detokenizer"].settings(trust_domain="elsewhere"))
    async with serving("pando.v1.Detokenizer", server) as address:
        assert (await called_by(people["foreign"], address, GATEWAY_ONLY))[0] is REACHED
        assert (await called_by(people["gateway"], address, GATEWAY_ONLY))[0] is DENIED


async def test_a_dns_name_that_reads_like_a_role_grants_no_role(
    authority: Authority, people: dict[str, Identity]
) -> None:
    posing = authority.issue("posing", hosts=["spiffe://pando.internal/pando/gateway", "gateway"])
    async with serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address:
        assert (await called_by(posing, address, GATEWAY_ONLY))[0] is DENIED


async def test_a_renewed_certificate_with_another_role_counts_from_the_next_call_on(
    authority: Authority, people: dict[str, Identity]
) -> None:
    own = authority.issue("renewed", roles=["worker"])
    async with (
        serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address,
        open_channel(address, read_security(own.settings())) as channel,
    ):
        assert (await outcome(channel, GATEWAY_ONLY))[0] is DENIED
        shutil.copy(people["gateway"].key, own.key)
        shutil.copy(people["gateway"].certificate, own.certificate)
        assert (await outcome(channel, GATEWAY_ONLY))[0] is REACHED


@pytest.mark.parametrize("is_unix", [True, False])
async def test_plaintext_has_no_names_so_the_table_does_not_apply(tmp_path: Path, is_unix: bool) -> None:
    security = Security(plaintext=True)
    address = f"unix:{tmp_path}/server.sock" if is_unix else "127.0.0.1:0"
    async with (
        serving("pando.v1.Worker", security, address) as address,
        open_channel(address, security) as channel,
    ):
        for method in CALLERS["pando.v1.Worker"]:
            assert (await outcome(channel, method))[0] is not DENIED


async def test_a_link_that_is_refused_never_connects_and_logs_the_reason_once(people: dict[str, Identity]) -> None:
    connections: list[None] = []
    async with (
        serving("pando.v1.Detokenizer", read_security(people["detokenizer"].settings())) as address,
        open_channel(address, read_security(people["worker"].settings())) as channel,
    ):
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)
        link = StreamLink(
            "detokenizer",
            StreamSource(lambda: stub.Push(), detokenizer_pb2.PushRequest),
            print,
            on_connected=lambda: connections.append(None),
        )
        with capture_logs() as logs:
            running = asyncio.create_task(link.run())
            await until(lambda: sum(log["event"] == "rpc.refused" for log in logs) >= 3)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    [event] = [log for log in logs if log["event"] == "link.refused"]
    assert (event["link"], "the role worker may not call" in event["reason"]) == ("detokenizer", True)
    assert not connections


def test_a_refusal_is_logged_once_per_connection_and_other_failures_are_not() -> None:
    def failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why")

    refusals = RefusalLog("scheduler")
    with capture_logs() as logs:
        for code in (DENIED, DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
            refusals.note(failed(code))
        refusals.clear()
        refusals.note(failed(grpc.StatusCode.UNAUTHENTICATED))
    reasons = [log["reason"] for log in logs]
    assert reasons == ["PERMISSION_DENIED: why", "UNAUTHENTICATED: why", "UNAUTHENTICATED: why"]


@pytest.mark.parametrize(
    "settings",
    [
        {"peer_names": {"janitor": ["a.example"]}},
        {"peer_names": {"gateway": []}},
        {"peer_names": {"gateway": ["*.example"]}},
        {"peer_names": {"gateway": [""]}},
        {"trust_domain": "spiffe://pando"},
    ],
)
def test_invalid_peer_names_and_trust_domains_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RpcSettings.model_validate(settings)


def test_names_are_read_from_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANDO_RPC__TRUST_DOMAIN", "llm")
    flags = ["--rpc.peer_names", '{"operator": ["ops.example"]}']
    settings, _ = parse_settings(SettingsParser(prog="x"), flags)
    names = settings.rpc.names_of_roles()
    assert (names[Role.OPERATOR], names[Role.GATEWAY]) == (("ops.example",), ("spiffe://llm/pando/gateway",))
    assert names.keys() == set(Role)
