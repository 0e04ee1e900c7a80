"""A model by its name on a hub: downloaded, continued after a kill, and served by all services."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from common.rpc.options import CHANNEL_OPTIONS
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from deploy.supervisor.layout import free_port
from protos.gen.pando.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.e2e.conftest import serve
from tests.e2e.processes import Processes
from tests.e2e.test_command import Up
from tests.fakes.hub import COMMIT, serve_hub
from tests.fakes.hub_client import HubClient
from tests.fakes.hub_repository import SHAPE, save_repository
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.hub import FakeHub

NAME = "acme/tiny-llama"
PIECE_BYTES = 10 << 20
# Of the last stage, besides its layers.
ENDS = ("model.norm.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def published() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        folder = save_repository(Path(place))
        assert len(list(folder.glob("model-*.safetensors"))) == 2
        yield folder


@pytest.fixture
def hub(published: Path) -> Iterator[FakeHub]:
    with serve_hub() as served:
        served.add(NAME, published)
        yield served


@pytest.fixture
def client(hub: FakeHub, tmp_path: Path) -> HubClient:
    return HubClient(hub.url, tmp_path / "home")


def ask(url: str, model: str) -> str:
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
def test_pando_up_downloads_continues_and_serves(
    hub: FakeHub, client: HubClient, published: Path, run_root: Path
) -> None:
    shards = [path.name for path in published.glob("model-*.safetensors")]
    environ = client.environment(XDG_RUNTIME_DIR=str(run_root))
    arguments = ("--port", str(free_port("127.0.0.1")), "--model", NAME, "--log.format", "json")
    hub.bytes_per_s = 2 * PIECE_BYTES
    interrupted = Up(*arguments, environ=environ)
    blobs = client.cached(NAME) / "blobs"
    wait_until(lambda: sum(path.stat().st_size for path in blobs.glob("*.incomplete")) >= PIECE_BYTES, 120)
    assert interrupted.end(signal.SIGKILL) == -signal.SIGKILL
    # Of the shards; other files are named by a shorter digest.
    kept = sum(path.stat().st_size for path in blobs.iterdir() if len(path.stem) == 64)
    hub.bytes_per_s = 0
    hub.sent.clear()
    hub.requests.clear()
    up = Up(*arguments, environ=environ)
    try:
        up.wait_for('"deployment.ready"')
        events = [json.loads(line) for line in up.lines if line.startswith("{")]
        (ready,) = [event for event in events if event["event"] == "deployment.ready"]
        assert ready["model"] == NAME
        progress = [event for event in events if event["event"] == "model.download"]
        assert [event["service"] for event in progress] == ["pando"] * len(progress)
        assert progress[-1]["done"] == progress[-1]["total"] > kept
        # Services find everything in the cache, without asking the hub.
        assert set(hub.requests.values()) == {1}
        assert sum(hub.sent.values()) + kept == sum((published / name).stat().st_size for name in shards)
        assert ask(ready["url"], NAME)
    finally:
        assert up.end() == 0
    assert any("pytorch_model.bin" in name for name in hub.repositories[NAME].files)
    assert not any("pytorch_model.bin" in path for path in hub.paths)


@pytest.mark.extended
def test_ranks_and_tokenizer_that_download_at_once_fetch_each_file_once(
    hub: FakeHub, client: HubClient, published: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in client.environment().items():
        monkeypatch.setenv(name, value)
    settings = Settings(
        model=ModelSettings(reference=f"{NAME}@{COMMIT}"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=4),
        worker=WorkerSettings(threads=1),
    )
    for running in serve(settings, run_root, ranks=2):
        assert running.model == NAME
        assert ask(running.url, NAME)
    shards = [path.name for path in published.glob("model-*.safetensors")]
    assert dict(hub.requests) == dict.fromkeys(shards, 1)
    assert dict(hub.sent) == {name: (published / name).stat().st_size for name in shards}


@pytest.fixture(scope="module")
def divided() -> Iterator[Path]:
    """The model in a file for each layer or so."""
    with tempfile.TemporaryDirectory() as place:
        folder = save_repository(Path(place), max_shard_size="4MB")
        assert len(list(folder.glob("model-*.safetensors"))) >= SHAPE["num_hidden_layers"]
        yield folder


def files_of_stages(folder: Path) -> list[set[str]]:
    """Return the files of two stages of equal numbers of layers."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    half = SHAPE["num_hidden_layers"] // 2
    first, last = {weight_map["model.embed_tokens.weight"]}, {weight_map[name] for name in ENDS}
    for name, file in weight_map.items():
        if (layer := re.match(r"model\.layers\.(\d+)\.", name)) is not None:
            (first if int(layer[1]) < half else last).add(file)
    return [first, last]


@pytest.mark.extended
def test_stages_with_a_cache_in_common_fetch_each_file_once(
    hub: FakeHub, client: HubClient, divided: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, divided)
    for name, value in client.environment().items():
        monkeypatch.setenv(name, value)
    settings = Settings(
        model=ModelSettings(reference=f"{NAME}@{COMMIT}"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(max_rows=4, pipeline_parallel=2),
        worker=WorkerSettings(threads=1),
    )
    for running in serve(settings, run_root):
        assert ask(running.url, NAME)
    assert dict(hub.requests) == dict.fromkeys(set.union(*files_of_stages(divided)), 1)


@pytest.mark.extended
def test_stages_on_hosts_of_their_own_fetch_their_parts(
    hub: FakeHub, client: HubClient, divided: Path, run_root: Path
) -> None:
    hub.add(NAME, divided)
    directory = Path(tempfile.mkdtemp(dir=run_root))
    address = {name: f"unix:{directory}/{name}.sock" for name in ("worker-0", "worker-1", "scheduler", "detokenizer")}
    # As hosts do, each has a cache of its own.
    caches = {name: HubClient(hub.url, directory / f"cache of {name}") for name in address}
    workers = [address["worker-0"], address["worker-1"]]
    settings: dict[str, dict[str, object]] = {
        "scheduler": {
            "workers": json.dumps(workers), "pipeline_parallel": 2, "max_rows": 4,
            "rendezvous": f"127.0.0.1:{free_port('127.0.0.1')}", "detokenizer": address["detokenizer"],
        },
        "worker": {"threads": 1, "device": "cpu"},
        "detokenizer": {},
    }  # fmt: skip
    processes = Processes(directory)
    try:
        for name in address:
            module = name.partition("-")[0]
            given = {f"{module}.{key}": value for key, value in settings[module].items()}
            given |= {f"{module}.address": address[name], "model.reference": f"{NAME}@{COMMIT}"}
            processes.start(name, f"services.{module}", given, **caches[name].environment())
        wait_until(lambda: is_ready(address["scheduler"]), 300, what=processes.logs)
    finally:
        processes.stop()
    expected = files_of_stages(divided)
    assert all(len(files) < len(set.union(*expected)) for files in expected)
    for worker, files in zip(("worker-0", "worker-1"), expected, strict=True):
        snapshot = caches[worker].cached(NAME) / "snapshots" / COMMIT
        assert {path.name for path in snapshot.glob("*.safetensors")} == files
    assert dict(hub.requests) == {file: sum(file in files for files in expected) for file in set.union(*expected)}


def is_ready(scheduler: str) -> bool:
    with grpc.insecure_channel(scheduler, options=CHANNEL_OPTIONS) as channel:
        try:
            state = scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=10)
        except grpc.RpcError:
            return False
        return bool(state.worker_group == "READY")


def test_a_model_that_cannot_be_downloaded_is_one_sentence(client: HubClient, run_root: Path) -> None:
    up = Up("--model", "acme/nothing", environ=client.environment(XDG_RUNTIME_DIR=str(run_root)))
    assert up.process.wait(120) == 2
    wait_until(lambda: up.lines)
    (line,) = up.lines
    assert line.startswith("pando up: model acme/nothing: neither a local path nor a public model at")
