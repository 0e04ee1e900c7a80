"""`docker compose up` with two gateways that share a Valkey server, and API keys."""

from __future__ import annotations

import contextlib
import io
import secrets
import sys
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.cli import main
from deploy.supervisor.layout import free_port
from tests.deploy.compose.engine import BUILD_S, UP_S, Project

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "smollm2-135m-instruct"
STORY = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 16}
REQUESTS_PER_MINUTE = 20
pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + UP_S)]


class TwoGateways:
    """The deployment, and a client of each gateway. Both clients send the same API key."""

    def __init__(self, directory: Path) -> None:
        # Compose publishes replicas at a range of ports; minutes pass before the containers listen.
        first = free_port("127.0.0.1", 2)
        self.ports = first, first + 1
        names = ("keys/keys.toml", "admin.txt", "state.txt", "limits/limits.toml")
        keys, admin_token, state_secret, limits = (directory / name for name in names)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["keys", "create", "--file", str(keys), "--tenant", "acme"]) == 0
        for file in (admin_token, state_secret):
            file.write_text(secrets.token_hex(32))
        limits.parent.mkdir()
        limits.write_text(f"[tenants.acme]\nrequests_per_minute = {REQUESTS_PER_MINUTE}\n")
        for folder in (directory, keys.parent, limits.parent):
            folder.chmod(0o755)
        for file in (keys, admin_token, state_secret, limits):
            file.chmod(0o644)
        environment = {
            "PANDO_KEYS": str(keys.parent),
            "PANDO_ADMIN_TOKEN": str(admin_token),
            "PANDO_STATE_SECRET": str(state_secret),
            "PANDO_LIMITS_DIRECTORY": str(limits.parent),
            "PANDO_PORTS": f"{self.ports[0]}-{self.ports[1]}",
        }
        self.project = Project("secrets.yaml", "limits.yaml", "gateways.yaml", environment=environment)
        authorization = {"authorization": f"Bearer {out.getvalue().strip()}"}
        self.clients = [
            httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=authorization, timeout=120, trust_env=False)
            for port in self.ports
        ]


@pytest.fixture(scope="module")
def two_gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    deployed = TwoGateways(tmp_path_factory.mktemp("secrets"))
    project = deployed.project
    if not project.has_engine():
        pytest.skip("no Docker engine with Compose answers; `make containers` brings one")
    try:
        project.compose("build", timeout_s=BUILD_S)
        project.compose("up", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
        yield deployed
    finally:
        sys.stderr.write(project.compose("logs", "--tail", "30"))
        project.compose("down", "--volumes", "--timeout", "20")


def test_each_gateway_continues_the_response_that_the_other_has_stored(two_gateways: TwoGateways) -> None:
    first, second = two_gateways.clients
    stored = first.post("/v1/responses", json=STORY)
    assert stored.status_code == httpx.codes.OK, stored.text
    name = stored.json()["id"]
    for _ in range(5):  # written to the shared state soon after the answer
        if (found := second.get(f"/v1/responses/{name}")).status_code == httpx.codes.OK:
            break
        time.sleep(1)
    assert found.json()["output"] == stored.json()["output"]
    continued = second.post("/v1/responses", json={**STORY, "input": "Go on.", "previous_response_id": name})
    assert continued.status_code == httpx.codes.OK, continued.text


def test_a_limit_applies_to_both_gateways_together(two_gateways: TwoGateways) -> None:
    answers = [
        client.get("/v1/responses/resp_missing") for _ in range(REQUESTS_PER_MINUTE) for client in two_gateways.clients
    ]
    passed = [answer for answer in answers if answer.status_code == httpx.codes.NOT_FOUND]
    limited = [answer for answer in answers if answer.status_code == httpx.codes.TOO_MANY_REQUESTS]
    assert len(passed) + len(limited) == len(answers)
    # A share of the limit flows back while the requests are made.
    assert len(passed) <= REQUESTS_PER_MINUTE
