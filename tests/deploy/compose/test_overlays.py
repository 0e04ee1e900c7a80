"""Keys, the admin token and mutual TLS in containers: `docker compose up` with both overlays, for real."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from tests.deploy.compose.engine import SERVICES, Project
from tests.fakes.certificates import Authority
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD_S, UP_S = 2400.0, 600
MODEL = "smollm2-135m-instruct"
ADMIN_TOKEN = "open-sesame-please"
pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + UP_S)]

# Runs in a container of the pipeline: what the scheduler says to somebody with these files, and to somebody without.
CALL = """
import grpc, sys
from pathlib import Path
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
files = Path("/run/certificates")
known = grpc.ssl_channel_credentials(*((files / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")))
bare = grpc.ssl_channel_credentials((files / "ca.crt").read_bytes())
channels = (
    grpc.secure_channel("scheduler:50052", known),
    grpc.secure_channel("scheduler:50052", bare),
    grpc.insecure_channel("scheduler:50052"),
)
for channel in channels:
    try:
        state = scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
        print(state.worker_group)
    except grpc.RpcError as error:
        print(error.code().name)
"""


class Secured:
    """A deployment with two keys, an admin token and certificates, whose files it writes."""

    def __init__(self, directory: Path) -> None:
        self.keys_file = directory / "keys" / "keys.toml"
        self.key, self.admin_key = self.create_key(), self.create_key("--admin")
        (directory / "admin.txt").write_text(ADMIN_TOKEN)
        authority = Authority(directory / "authority")
        for service in SERVICES:
            identity = authority.issue(service, hosts=[service], roles=[service])
            own = directory / "tls" / service
            own.mkdir(parents=True)
            files = {"tls.crt": identity.certificate, "tls.key": identity.key, "ca.crt": identity.authority}
            for name, path in files.items():
                (own / name).write_bytes(path.read_bytes())
        for path in (directory, *directory.rglob("*")):  # the user in the containers is nobody here
            path.chmod(0o755 if path.is_dir() else 0o644)
        environment = {
            "PANDO_KEYS": str(self.keys_file.parent),
            "PANDO_ADMIN_TOKEN": str(directory / "admin.txt"),
            "PANDO_CERTIFICATES": str(directory / "tls"),
        }
        self.project = Project("secrets.yaml", "tls.yaml", environment=environment)

    def create_key(self, *flags: str) -> str:
        """Make a key by the command that the overlay's comment names."""
        return self.manage_keys("create", "--tenant", "acme", *flags)

    def manage_keys(self, action: str, *flags: str) -> str:
        command = [sys.executable, "-m", "deploy.cli", "keys", action, "--file", str(self.keys_file), *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.project.url}/v1", api_key=key, max_retries=0, timeout=120)

    def flush(self, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.project.url}/flush_cache", headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    # Not pytest's own, which nobody else may enter.
    with tempfile.TemporaryDirectory(prefix="pando-overlays-", dir="/var/tmp") as directory:
        secured = Secured(Path(directory))
        project = secured.project
        if not project.has_engine():
            pytest.skip("no Docker engine with Compose answers; `make containers` brings one")
        try:
            project.compose("build", timeout_s=BUILD_S)
            project.compose("up", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
            yield secured
        finally:
            sys.stderr.write(project.compose("logs", "--tail", "15"))
            project.compose("down", "--volumes", "--timeout", "20")


def test_a_chat_needs_a_key(secured: Secured) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name three primary colors."}],
        "max_tokens": 8,
    }
    assert secured.client(secured.key).chat.completions.create(**body).usage
    with pytest.raises(AuthenticationError):
        secured.client("pando-guessed").chat.completions.create(**body)


def test_keys_are_created_and_revoked_while_the_gateway_runs(secured: Secured) -> None:
    key = secured.create_key()
    wait_until(lambda: secured.flush(key).status_code == httpx.codes.FORBIDDEN, what=lambda: "a new key")
    secured.manage_keys("revoke", key.split("-")[1])
    wait_until(lambda: secured.flush(key).status_code == httpx.codes.UNAUTHORIZED, what=lambda: "its end")


def test_only_the_administrators_key_flushes_the_cache(secured: Secured) -> None:
    assert secured.flush(secured.key).status_code == httpx.codes.FORBIDDEN
    # The scheduler asks the gateway for the admin token, too.
    assert "Cache flushed" in secured.flush(secured.admin_key).raise_for_status().text


def test_the_scheduler_answers_only_certificates_of_roles_that_may_ask_it(secured: Secured) -> None:
    assert secured.project.inside("detokenizer", CALL).splitlines() == ["PERMISSION_DENIED", *["UNAVAILABLE"] * 2]
    assert secured.project.inside("tokenizer", CALL).splitlines() == ["READY", "UNAVAILABLE", "UNAVAILABLE"]


def test_secrets_are_files_and_nowhere_in_the_containers_environment(secured: Secured) -> None:
    project = secured.project
    for service in ("gateway", "scheduler"):
        environment = project.inspect(project.container(service), "{{json .Config.Env}}")
        assert ADMIN_TOKEN not in environment
        assert project.inside(service, "print(open('/run/secrets/admin_token').read())") == ADMIN_TOKEN


def test_down_leaves_nothing(secured: Secured) -> None:
    secured.project.compose("down", "--volumes", "--timeout", "20")
    assert secured.project.leftovers() == {"containers": [], "volumes": [], "networks": []}
