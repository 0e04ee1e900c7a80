"""The loads of images against a server that runs already: every part has figures, under the server's label."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from deploy.evaluation.bench.deployments import LaunchedDeployment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

EXPERIMENT = (
    sys.executable, "-m", "deploy.evaluation.experiments.images", "deploy/evaluation/shapes/qwen2.5-vl-tiny",
)  # fmt: skip
LOAD = (
    "--size", "112x112", "--images", "4", "--concurrency", "2", "--samples", "1", "--streams", "2", "--seconds", "1",
    "--rate", "2", "--repeats", "1",
)  # fmt: skip


def test_running_servers_are_measured_in_turns(tmp_path: Path) -> None:
    model, results = tmp_path / "model", tmp_path / "results.json"
    subprocess.run([*EXPERIMENT, "--write-model", str(model)], check=True)
    settings = (
        f"model.reference={model}", "model.served_name=qwen2.5-vl-tiny", "model.images=on", "model.load_format=dummy",
    )  # fmt: skip
    with LaunchedDeployment(None, (), settings) as server:
        # The same server twice stands for two.
        urls = ("--url", f"one={server.url}", "--url", f"two={server.url}")
        subprocess.run([*EXPERIMENT, *LOAD, *urls, "--json", str(results)], check=True)
        refused = subprocess.run(
            [*EXPERIMENT, *urls, "--set", "scheduler.max_rows=2"], check=False, capture_output=True, text=True
        )
    assert refused.returncode == 2
    assert "leave out --url" in refused.stderr
    found: dict[str, dict[str, float]] = {"one": {}, "two": {}}
    for entry in json.loads(results.read_text()):
        found[entry["label"]][entry["metric"]] = entry["value"]
    assert found["one"].keys() == found["two"].keys()
    for of_server in found.values():
        titles = ("1 image, new", "1 image, again", "4 images, new", "turns 2 to 10 of a chat")
        for title in titles:
            assert of_server[f"TTFT, {title}"] > 0
        assert of_server["throughput, 2 at once"] > 0
        for beside in ("alone", "beside 2 texts/s", "beside 2 images/s"):
            assert of_server[f"ITL p99, 2 streams {beside}"] > 0
        # Sixteen tokens of an image, and the text around them.
        assert of_server["prompt, 4 images, new"] > of_server["prompt, 1 image, new"] > 16
        assert of_server["cached, 1 image, again"] > 16
