"""The whole ring over TCP with mutual TLS and a token; whoever has neither is refused at each port."""

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
from grpc_health.v1 import health_pb2, health_pb2_grpc

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


class TlsRing:
    """The five services as processes, each with a certificate of its own."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.stranger = Authority(directory / "other", "somebody")
        self.ports = {name: free_port(HOST) for name in SERVICES}
        self.probe_ports = {name: free_port(HOST) for name in SERVICES}
        # As on Kubernetes, where groups are found by DNS: the scheduler's certificate names it, and no address.
        self.identities = {
            name: self.authority.issue(name, hosts=[NAME] if name == "scheduler" else []) for name in SERVICES
        }
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
            "gateway.certificate": self.identities["gateway"].certificate,
            "gateway.key": self.identities["gateway"].key,
            "gateway.client_authority": identity.authority,
            "gateway.tokenizer": self.address("tokenizer"),
            "gateway.detokenizer": self.address("detokenizer"),
            "tokenizer.address": self.address("tokenizer"),
            "tokenizer.schedulers": f'["dns:{self.address("scheduler")}"]',
            "gateway.schedulers": f'["dns:{self.address("scheduler")}"]',
            "scheduler.address": self.address("scheduler"),
            "scheduler.workers": f'["{self.address("worker")}"]',
            "scheduler.detokenizer": self.address("detokenizer"),
            "worker.address": self.address("worker"),
            "detokenizer.address": self.address("detokenizer"),
        }
        self._processes.start(name, name if name == "gateway" else f"services.{name}", settings)


@pytest.fixture(scope="module")
def ring() -> Iterator[TlsRing]:
    directory = Path(tempfile.mkdtemp(prefix="pando-tls-"))
    ring = TlsRing(directory)
    try:
        ring.start()
        yield ring
    finally:
        ring.stop()
        shutil.rmtree(directory, ignore_errors=True)


def test_a_completion_goes_through_the_encrypted_ring(ring: TlsRing) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 5}
    with ring.https() as http:
        answer = http.post(f"{ring.url}/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_the_gateway_finds_the_scheduler_by_dns_and_knows_it_by_its_name(ring: TlsRing) -> None:
    with ring.https() as http:
        flushed = http.post(f"{ring.url}/flush_cache")
        info = http.get(f"{ring.url}/get_server_info").json()
    assert (flushed.status_code, info["internal_states"][0]["worker_group"]) == (httpx.codes.OK, "READY")
    by_address = f"{HOST}:{ring.ports['scheduler']}"
    assert check(by_address, credentials(ring.identities["gateway"])) is grpc.StatusCode.UNAVAILABLE


def test_the_gateway_speaks_no_plaintext(ring: TlsRing) -> None:
    with pytest.raises(httpx.HTTPError), httpx.Client(trust_env=False) as http:
        http.get(ring.url.replace("https", "http") + "/health")


@pytest.mark.parametrize("who", ["stranger", "expired", "nobody"])
def test_others_are_refused_by_the_gateway(ring: TlsRing, who: str) -> None:
    shown = {
        "stranger": ring.stranger.issue("guest", believes=ring.authority.path),
        "expired": ring.authority.issue("late", expired=True),
        "nobody": None,
    }[who]
    with ring.https_without(shown) as http, pytest.raises(httpx.TransportError):
        http.get(f"{ring.url}/health")


@pytest.mark.parametrize("service", SERVICES)
def test_ports_for_probes_answer_nothing_but_health(ring: TlsRing, service: str) -> None:
    address = f"{HOST}:{ring.probe_ports[service]}"
    if service == "gateway":
        with httpx.Client(trust_env=False, base_url=f"http://{address}") as http:
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
def test_others_are_refused_at_each_port(ring: TlsRing, service: str, who: str) -> None:
    assert check(ring.address(service), credentials(ring.identities["gateway"])) is None
    match who:
        case "stranger":
            identity = ring.stranger.issue("guest", believes=ring.authority.path)
            refused = check(ring.address(service), credentials(identity))
        case "expired":
            refused = check(ring.address(service), credentials(ring.authority.issue("late", expired=True)))
        case "nobody":
            bare = grpc.ssl_channel_credentials(ring.authority.path.read_bytes())
            refused = check(ring.address(service), bare)
        case _:
            refused = check(ring.address(service), None)
    assert refused is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("service", [name for name in SERVICES if name != "gateway"])
def test_a_certificate_without_the_token_is_not_enough(ring: TlsRing, service: str) -> None:
    method = {"worker": "GetState", "scheduler": "GetState", "tokenizer": "GetModel", "detokenizer": "Subscribe"}
    with grpc.secure_channel(ring.address(service), credentials(ring.identities["gateway"])) as channel:
        call: Any = channel.unary_stream(f"/pando.v1.{service.capitalize()}/{method[service]}")
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(call(b"", timeout=30)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_people_chat_and_look_into_the_scheduler_with_certificates_of_their_own(ring: TlsRing) -> None:
    own = ring.authority.issue("operator")
    shown = ["--authority", own.authority, "--certificate", own.certificate, "--key", own.key]
    chat = pando("chat", "--url", ring.url, "--max-tokens", "5", "--prompt", "Hello", *shown)
    assert (chat.returncode, "5 tokens" in chat.stderr) == (0, True), chat.stderr
    assert pando("chat", "--url", ring.url, "--prompt", "Hello", *shown[:2]).returncode == 1
    variables = {f"PANDO_RPC__{name.upper()}": str(getattr(own, name)) for name in ("certificate", "key", "authority")}
    state = pando("state", "--scheduler", ring.address("scheduler"), **variables, PANDO_RPC__TOKEN=TOKEN)
    assert (state.returncode, "READY" in state.stdout) == (0, True), state.stderr
    without_token = pando("state", "--scheduler", ring.address("scheduler"), **variables)
    assert without_token.returncode == 1


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
