"""`docker compose up` with a gated model's name: one service downloads it, and all others find it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI

from tests.deploy.compose.engine import BUILD_S, UP_S, Project
from tests.fakes.hub import TOKEN, FakeHub, serve_hub
from tests.fakes.hub_repository import save_repository

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "acme/tiny-llama"
# Where containers reach this machine.
GATEWAY = "172.31.250.1"
STORAGE = "storage.test"
NETWORK = f"""
services:
  model:
    extra_hosts: ["{STORAGE}:{GATEWAY}"]
networks:
  edge:
    ipam: {{config: [{{subnet: 172.31.250.0/24, gateway: {GATEWAY}}}]}}
"""
pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + UP_S)]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with tempfile.TemporaryDirectory() as place, serve_hub(GATEWAY, STORAGE) as served:
        served.add(NAME, save_repository(Path(place)), gated=True)
        yield served


@pytest.fixture
def project(hub: FakeHub, tmp_path: Path) -> Iterator[Project]:
    network = tmp_path / "network.yaml"
    network.write_text(NETWORK)
    environment = {"PANDO_MODEL": NAME, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    project = Project(str(network), environment=environment)
    if not project.has_engine():
        pytest.skip("no Docker engine with Compose answers; `make containers` brings one")
    try:
        project.compose("build", timeout_s=BUILD_S)
        yield project
    finally:
        sys.stderr.write(project.compose("logs", "--tail", "30"))
        project.compose("down", "--volumes", "--timeout", "20")


def test_a_gated_model_is_downloaded_once_for_all_services_and_served(hub: FakeHub, project: Project) -> None:
    project.compose("up", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
    client = OpenAI(base_url=f"{project.url}/v1", api_key="none", max_retries=0, timeout=120)
    answer = client.completions.create(model=NAME, prompt="Hello", max_tokens=4, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert {name: count for name, count in hub.requests.items() if name.endswith(".safetensors")} == {
        f"model-{shard:05}-of-00002.safetensors": 1 for shard in (1, 2)
    }
    assert not any("pytorch_model.bin" in path for path in hub.paths)
    project.compose("down", "--timeout", "20")
    hub.status = 503
    # The volume holds the model, so that a restart needs no hub.
    project.compose("up", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
    assert client.completions.create(model=NAME, prompt="Hello", max_tokens=1).choices
