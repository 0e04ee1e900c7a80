"""The whole pipeline over TCP with mutual TLS and a token, each service with a certificate of its own."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from common.rpc.roles import CALLERS
from common.rpc.security import TOKEN_KEY, read_security
from deploy.supervisor.layout import free_port
from deploy.supervisor.process import child_environment
from tests.e2e.processes import Processes
from tests.fakes.certificates import Authority, Identity
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
SERVICES = ("worker", "detokenizer", "scheduler", "tokenizer", "gateway")
NAME = "localhost"
TOKEN = "a-secret-of-all-services"


class TlsPipeline:
    """The five services as processes, each with a certificate of its own."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.stranger = Authority(directory / "other", "somebody")
        self.ports = {name: free_port(HOST) for name in SERVICES}
        self.probe_ports = {name: free_port(HOST) for name in SERVICES}
        # As on Kubernetes, where groups are found by DNS: the scheduler's certificate names it, and no address.
        self.identities = {
            name: self.authority.issue(name, hosts=[NAME] if name == "scheduler" else [], roles=[name])
            for name in SERVICES
        }
        self.operator = self.authority.issue("operator", roles=["operator"])
        self.callers = self.identities | {"operator": self.operator, "guest": self.authority.issue("guest")}
        self.directory = directory
        self.metrics_port = free_port(HOST)
        self._processes = Processes(directory)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.ports['gateway']}"

    def start(self) -> None:
        for name in SERVICES:
            self._start(name)
        wait_until(self.is_ready, timeout_s=120, what=self._processes.logs)

    def is_ready(self) -> bool:
        try:
            return self.https().get(f"{self.url}/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def https(self, shown: Identity | None = None) -> httpx.Client:
        """Return a client of the gateway that shows a certificate; its own, if none is given."""
        return self.https_without(shown or self.identities["gateway"])

    def https_without(self, shown: Identity | None = None) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.authority.path))
        if shown is not None:
            context.load_cert_chain(shown.certificate, shown.key)
        return httpx.Client(verify=context, trust_env=False, timeout=30)

    def address(self, name: str) -> str:
        return f"{NAME if name == 'scheduler' else HOST}:{self.ports[name]}"

    def stop(self) -> None:
        self._processes.stop()

    def _start(self, name: str) -> None:
        identity = self.identities[name]
        settings = {
            "model.load_format": "fake",
            "rpc.certificate": identity.certificate,
            "rpc.key": identity.key,
            "rpc.authority": identity.authority,
            "rpc.token": TOKEN,
            "rpc.probe_port": self.probe_ports[name],
            "gateway.host": HOST,
            "gateway.port": self.ports["gateway"],
            "gateway.tls.certificate": self.identities["gateway"].certificate,
            "gateway.tls.key": self.identities["gateway"].key,
            "gateway.tls.client_authority": identity.authority,
            "gateway.tokenizer": self.address("tokenizer"),
            "gateway.detokenizer": self.address("detokenizer"),
            "tokenizer.address": self.address("tokenizer"),
            "tokenizer.schedulers": f'["dns:{self.address("scheduler")}"]',
            "gateway.schedulers": f'["dns:{self.address("scheduler")}"]',
            "scheduler.address": self.address("scheduler"),
            "scheduler.workers": f'["{self.address("worker")}"]',
            "scheduler.detokenizer": self.address("detokenizer"),
            "worker.address": self.address("worker"),
            "worker.metrics_port": self.metrics_port,
            "detokenizer.address": self.address("detokenizer"),
        }
        self._processes.start(name, name if name == "gateway" else f"services.{name}", settings)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[TlsPipeline]:
    directory = Path(tempfile.mkdtemp(prefix="pando-tls-"))
    pipeline = TlsPipeline(directory)
    try:
        pipeline.start()
        yield pipeline
    finally:
        pipeline.stop()
        shutil.rmtree(directory, ignore_errors=True)


def test_a_completion_goes_through_the_encrypted_pipeline(pipeline: TlsPipeline) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 5}
    with pipeline.https() as http:
        answer = http.post(f"{pipeline.url}/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_the_gateway_finds_the_scheduler_by_dns_and_knows_it_by_its_name(pipeline: TlsPipeline) -> None:
    with pipeline.https() as http:
        flushed = http.post(f"{pipeline.url}/flush_cache")
        info = http.get(f"{pipeline.url}/get_server_info").json()
    assert (flushed.status_code, info["internal_states"][0]["worker_group"]) == (httpx.codes.OK, "READY")
    by_address = f"{HOST}:{pipeline.ports['scheduler']}"
    assert check(by_address, credentials(pipeline.identities["gateway"])) is grpc.StatusCode.UNAVAILABLE


def test_the_gateway_speaks_no_plaintext(pipeline: TlsPipeline) -> None:
    with pytest.raises(httpx.HTTPError), httpx.Client(trust_env=False, timeout=60) as http:
        http.get(pipeline.url.replace("https", "http") + "/health")


@pytest.mark.parametrize("who", ["stranger", "expired", "nobody"])
def test_the_gateway_refuses_clients_without_a_valid_certificate(pipeline: TlsPipeline, who: str) -> None:
    shown = {
        "stranger": pipeline.stranger.issue("guest", believes=pipeline.authority.path),
        "expired": pipeline.authority.issue("late", expired=True),
        "nobody": None,
    }[who]
    with pipeline.https_without(shown) as http, pytest.raises(httpx.TransportError):
        http.get(f"{pipeline.url}/health")


@pytest.mark.parametrize("service", SERVICES)
def test_ports_for_probes_answer_nothing_but_health(pipeline: TlsPipeline, service: str) -> None:
    address = f"{HOST}:{pipeline.probe_ports[service]}"
    if service == "gateway":
        with httpx.Client(trust_env=False, timeout=60, base_url=f"http://{address}") as http:
            assert http.get("/ready").status_code == httpx.codes.OK
            assert http.get("/v1/models").status_code == httpx.codes.NOT_FOUND
            assert http.post("/flush_cache").status_code == httpx.codes.NOT_FOUND
        return
    assert check(address, None) is None
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(f"/pando.v1.{service.capitalize()}/GetState")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "gateway"])
@pytest.mark.parametrize("who", ["stranger", "expired", "nobody", "plaintext"])
def test_each_port_refuses_callers_without_a_valid_certificate(pipeline: TlsPipeline, service: str, who: str) -> None:
    assert check(pipeline.address(service), credentials(pipeline.identities["gateway"])) is None
    match who:
        case "stranger":
            identity = pipeline.stranger.issue("guest", believes=pipeline.authority.path)
            refused = check(pipeline.address(service), credentials(identity))
        case "expired":
            refused = check(pipeline.address(service), credentials(pipeline.authority.issue("late", expired=True)))
        case "nobody":
            bare = grpc.ssl_channel_credentials(pipeline.authority.path.read_bytes())
            refused = check(pipeline.address(service), bare)
        case _:
            refused = check(pipeline.address(service), None)
    assert refused is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "gateway"])
def test_a_certificate_without_the_token_is_not_enough(pipeline: TlsPipeline, service: str) -> None:
    method = "/pando.v1.Operations/SetLogLevel"
    with grpc.secure_channel(pipeline.address(service), credentials(pipeline.operator)) as channel:
        assert code_of(channel, method) is grpc.StatusCode.UNAUTHENTICATED
        # With the token, the empty request is read and found wanting.
        assert code_of(channel, method, TOKEN) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "gateway"])
def test_each_method_is_refused_to_callers_of_every_other_role(pipeline: TlsPipeline, service: str) -> None:
    callers = CALLERS[f"pando.v1.{service.capitalize()}"]
    for role, identity in pipeline.callers.items():
        wrong = [method for method in callers if role not in callers[method]]
        assert wrong
        with grpc.secure_channel(pipeline.address(service), credentials(identity)) as channel:
            refused = {method: code_of(channel, method, TOKEN) for method in wrong}
        assert refused == dict.fromkeys(wrong, grpc.StatusCode.PERMISSION_DENIED), role


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "gateway"])
def test_every_method_that_a_service_offers_is_in_the_table(pipeline: TlsPipeline, service: str) -> None:
    own = read_security(pipeline.operator.settings(token=TOKEN))
    with grpc.secure_channel(pipeline.address(service), own.channel_credentials(own.load())) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = database.get_services()
        pool = DescriptorPool(database)
        methods = {f"/{name}/{method.name}" for name in names for method in pool.FindServiceByName(name).methods}
    health = {method for method in methods if method.startswith("/grpc.health.v1.")}
    assert health
    assert methods - health == CALLERS[f"pando.v1.{service.capitalize()}"].keys()


def test_a_refused_call_is_logged_and_counted_by_the_refusing_service(pipeline: TlsPipeline) -> None:
    with grpc.secure_channel(pipeline.address("worker"), credentials(pipeline.identities["gateway"])) as channel:
        assert code_of(channel, "/pando.v1.Worker/Execute", TOKEN) is grpc.StatusCode.PERMISSION_DENIED

    def is_logged() -> bool:
        lines = (pipeline.directory / "worker.log").read_text().splitlines()
        words = ("rpc.refused", "Execute", "spiffe://pando.internal/pando/gateway")
        return any(all(word in line for word in words) for line in lines)

    wait_until(is_logged)
    metrics = httpx.get(f"http://{HOST}:{pipeline.metrics_port}/metrics", timeout=60, trust_env=False).text
    assert 'pando_rpc_refused_total{method="/pando.v1.Worker/Execute",role="gateway"}' in metrics


def test_a_command_with_a_service_s_certificate_may_not_call_operator_methods(pipeline: TlsPipeline) -> None:
    own = pipeline.identities["detokenizer"]
    variables = {f"PANDO_RPC__{name.upper()}": str(getattr(own, name)) for name in ("certificate", "key", "authority")}
    state = pando("state", "--scheduler", pipeline.address("scheduler"), **variables, PANDO_RPC__TOKEN=TOKEN)
    assert state.returncode == 1
    assert "the role detokenizer may not call /pando.v1.Scheduler/GetState" in state.stderr


def test_operators_chat_and_inspect_the_scheduler_with_their_own_certificates(pipeline: TlsPipeline) -> None:
    own = pipeline.operator
    shown = ["--authority", own.authority, "--certificate", own.certificate, "--key", own.key]
    chat = pando("chat", "--url", pipeline.url, "--max-tokens", "5", "--prompt", "Hello", *shown)
    assert (chat.returncode, "5 tokens" in chat.stderr) == (0, True), chat.stderr
    assert pando("chat", "--url", pipeline.url, "--prompt", "Hello", *shown[:2]).returncode == 1
    variables = {f"PANDO_RPC__{name.upper()}": str(getattr(own, name)) for name in ("certificate", "key", "authority")}
    state = pando("state", "--scheduler", pipeline.address("scheduler"), **variables, PANDO_RPC__TOKEN=TOKEN)
    assert (state.returncode, "READY" in state.stdout) == (0, True), state.stderr
    without_token = pando("state", "--scheduler", pipeline.address("scheduler"), **variables)
    assert without_token.returncode == 1


def test_renewed_certificates_of_all_services_are_used_without_a_restart(pipeline: TlsPipeline) -> None:
    for name, identity in pipeline.identities.items():
        renewed = pipeline.authority.issue(f"{name}-renewed", hosts=[NAME] if name == "scheduler" else [], roles=[name])
        for old, new in ((identity.key, renewed.key), (identity.certificate, renewed.certificate)):
            shutil.copy(new, old)
    # A call that the gateway makes over a new connection, and one through streams that stay open.
    with pipeline.https() as http:
        assert http.post(f"{pipeline.url}/flush_cache").status_code == httpx.codes.OK
    test_a_completion_goes_through_the_encrypted_pipeline(pipeline)


def code_of(channel: grpc.Channel, method: str, token: str | None = None) -> grpc.StatusCode | None:
    """Call `method` with an empty message; return the status of a refusal."""
    call: Any = channel.unary_stream(method)
    answers = call(b"", timeout=30, metadata=[(TOKEN_KEY, token)] if token else [])
    try:
        next(iter(answers), None)
    except grpc.RpcError:
        code: grpc.StatusCode = answers.code()
        return code
    finally:
        answers.cancel()
    return None


def pando(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *map(str, arguments)]
    environment = child_environment(os.environ) | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        identity.authority.read_bytes(), identity.key.read_bytes(), identity.certificate.read_bytes()
    )


def check(address: str, encrypted: grpc.ChannelCredentials | None) -> grpc.StatusCode | None:
    """Ask for health, which needs no token; return the status of a refusal."""
    channel = grpc.secure_channel(address, encrypted) if encrypted else grpc.insecure_channel(address)
    with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=30)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None
