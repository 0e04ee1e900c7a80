"""`docker compose up` for real; `.ci/containers` brings an engine and runs this."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from tests.deploy.compose.engine import BUILD_S, SERVICES, UP_S, Project
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

RECOVERY_S = 120.0
MODEL = "smollm2-135m-instruct"
pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + UP_S)]
everyone = pytest.mark.parametrize("service", SERVICES)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    project = Project()
    if not project.has_engine():
        pytest.skip("no Docker engine with Compose answers; `make containers` brings one")
    try:
        started = time.monotonic()
        project.compose("build", timeout_s=BUILD_S)
        built = time.monotonic()
        project.compose("up", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
        sizes = {name: f"{size / 1e6:.0f} MB" for name, size in project.images().items()}
        sys.stderr.write(f"\nbuilt in {built - started:.0f} s, up in {time.monotonic() - built:.0f} s; {sizes}\n")
        yield project
    finally:
        sys.stderr.write(project.compose("logs", "--tail", "30"))
        project.compose("down", "--volumes", "--timeout", "20")


def client(project: Project) -> OpenAI:
    return OpenAI(base_url=f"{project.url}/v1", api_key="none", max_retries=0, timeout=120)


def story(project: Project, tokens: int = 160) -> str:
    """Return a long greedy continuation, taken as a stream."""
    stream = client(project).completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=tokens, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_a_chat_through_the_gateway(project: Project) -> None:
    answer = client(project).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name three primary colors."}],
        temperature=0,
        max_tokens=40,
    )
    text = answer.choices[0].message.content or ""
    assert "red" in text.lower()
    assert "blue" in text.lower()


@everyone
def test_containers_run_unprivileged_without_build_tools_on_a_read_only_file_system(
    project: Project, service: str
) -> None:
    program = (
        "import os, json, shutil\n"
        "try:\n  open('/opt/pando/x', 'w'); writes = True\n"
        "except OSError:\n  writes = False\n"
        "print(json.dumps([os.getuid(), writes, [t for t in ('gcc', 'g++', 'cc', 'make', 'pip') if shutil.which(t)]]))"
    )
    assert json.loads(project.inside(service, program)) == [10001, False, []]


def test_the_volume_of_models_can_be_written_by_the_container_that_downloads(project: Project) -> None:
    assert project.inside("worker", "import os; print(os.stat('/models').st_uid)").strip() == "10001"


@everyone
def test_only_the_gateway_publishes_ports(project: Project, service: str) -> None:
    published = json.loads(project.inspect(project.container(service), "{{json .NetworkSettings.Ports}}"))
    bound = [binding["HostIp"] for bindings in published.values() for binding in bindings or []]
    assert bound == (["127.0.0.1"] if service == "gateway" else [])


def test_the_worker_runs_operators_compiled_for_its_processor(project: Project) -> None:
    program = (
        "from services.worker.engine.kernels.cpu.prebuilt import find_prebuilt, processor_flags\n"
        "print(find_prebuilt() or ('avx2' not in processor_flags() and 'too old'))"
    )
    assert project.inside("worker", program) not in ("None", "False")
    assert "could not be compiled" not in project.compose("logs", "worker")


@everyone
def test_a_killed_container_comes_back_and_chats_go_on(project: Project, service: str) -> None:
    undisturbed = story(project)
    told: list[str] = []
    failed: list[BaseException] = []

    def tell() -> None:
        try:
            told.append(story(project))
        except Exception as error:  # noqa: BLE001  (judged below)
            failed.append(error)

    telling = threading.Thread(target=tell)
    telling.start()
    time.sleep(0.5)  # so that tokens flow
    project.kill(service)
    seconds = wait_until(project.is_ready, timeout_s=RECOVERY_S, what=lambda: project.compose("logs", "--tail", "50"))
    telling.join(RECOVERY_S)
    assert not telling.is_alive()
    sys.stderr.write(f"\n{service}: ready again {seconds:.1f} s after its restart\n")
    if service == "gateway":  # its connections go with it, unless the answer was complete before
        assert failed or told == [undisturbed]
    else:
        assert (told, failed) == ([undisturbed], [])
    assert story(project) == undisturbed


def test_a_caller_inside_the_container_may_flush_the_cache(project: Project) -> None:
    program = (
        "import httpx\n"
        "print(httpx.post('http://127.0.0.1:8000/flush_cache').text, httpx.get('http://127.0.0.1:8000/get_server_info').text)"
    )
    answer = project.inside("gateway", program)
    assert "Cache flushed" in answer
    assert "worker_group" in answer


def test_prometheus_and_grafana_come_with_their_profile(project: Project) -> None:
    assert project.configuration()["services"].keys() == {*SERVICES, "model"}
    observed = project.configuration("observability")["services"]
    assert observed.keys() == {*SERVICES, "model", "prometheus", "grafana"}


def test_overlays_for_gpus_give_each_rank_a_worker_with_its_device() -> None:
    overlaid = Project("gpu.yaml", "gpu-2.yaml")
    if not overlaid.has_engine():
        pytest.skip("no Docker engine with Compose answers; `make containers` brings one")
    services: dict[str, Any] = overlaid.configuration()["services"]
    workers = {name: service for name, service in services.items() if name.startswith("worker")}
    assert workers.keys() == {"worker", "worker-1"}
    for service in workers.values():
        assert service["image"].startswith("pando-worker-cuda:")
        [devices] = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices["driver"] == "nvidia"
        assert service["environment"]["PANDO_WORKER__DEVICE"] == "cuda"
    assert workers["worker-1"]["environment"]["PANDO_WORKER__DEVICE_INDEX"] == "1"
    assert workers["worker-1"]["ipc"] == "service:worker"
    assert "worker-1" in services["scheduler"]["depends_on"]


def test_down_leaves_nothing(project: Project) -> None:
    project.compose("down", "--volumes", "--timeout", "20")
    assert project.leftovers() == {"containers": [], "volumes": [], "networks": []}
