"""Each command of the page of recipes, executed in its order: with grpcurl where it is, else with `buf curl`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from common.settings import (
    DetokenizerSettings,
    GatewaySettings,
    ModelSettings,
    ProfileSettings,
    SchedulerSettings,
    Settings,
    WorkerSettings,
)
from deploy.supervisor.layout import free_port
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.served import Served

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "RECIPES.md"
BUF = Path(sys.executable).with_name("buf")
# They answer until they are told to stop.
STREAMS = ("Subscribe", "WatchCacheEvents")
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """One command of the page, and words that its answer has."""

    command: str
    words: tuple[str, ...]

    @property
    def is_stream(self) -> bool:
        return self.command.endswith(STREAMS)


def recipes() -> list[Recipe]:
    found: list[Recipe] = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("# "):
                found[-1] = Recipe(found[-1].command, tuple(line[2:].split()))
            else:
                found.append(Recipe(line, ()))
    return found


def as_buf(command: str) -> list[str]:
    """Return the `buf curl` form of a grpcurl command, or the command itself if it is buf's already."""
    words = shlex.split(command)
    if words[0] == "buf":
        return [str(BUF), *words[1:]]
    arguments = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    positional: list[str] = []
    data = "{}"
    rest = iter(words[1:])
    for word in rest:
        match word:
            case "-plaintext" | "-unix":
                pass
            case "-d":
                data = next(rest)
            case "-H":
                arguments += ["--header", next(rest)]
            case _:
                assert not word.startswith("-"), f"the test does not know {word}"
                positional.append(word)
    address, method = positional
    arguments += ["--unix-socket", address]
    if method == "list":
        return [*arguments, "--list-services", "http://localhost"]
    return [*arguments, "--data", data, f"http://localhost/{method}"]


def as_installed(command: str) -> list[str]:
    grpcurl = shutil.which("grpcurl")
    words = shlex.split(command)
    return [grpcurl, *words[1:]] if grpcurl and words[0] == "grpcurl" else as_buf(command)


@pytest.fixture(scope="module")
def pipeline(run_root: Path) -> Iterator[Served]:
    settings = Settings(
        model=ModelSettings(load_format="fake"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        detokenizer=DetokenizerSettings(metrics_port=free_port("127.0.0.1")),
        scheduler=SchedulerSettings.model_validate({"admin_token": "open-sesame-please"}),
        worker=WorkerSettings(profile=ProfileSettings(directory=run_root / "profiles")),
    )
    yield from serve(settings, run_root)


def test_every_command_answers_as_the_page_says(pipeline: Served, tmp_path: Path) -> None:
    watched: list[Watched] = []
    try:
        for number, recipe in enumerate(recipes()):
            if recipe.is_stream:
                watched.append(Watched(recipe, pipeline, tmp_path / str(number)))
                watched[-1].wait_until_begun()
            else:
                run(recipe, pipeline)
        for stream in watched:
            stream.wait_for_words()
    finally:
        for stream in watched:
            stream.end()


def run(recipe: Recipe, pipeline: Served) -> None:
    done = subprocess.run(
        as_installed(recipe.command),
        cwd=pipeline.deployment.run_directory,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{recipe.command}\n{done.stderr}"
    missing = [word for word in recipe.words if word not in done.stdout]
    assert not missing, f"{recipe.command}\nlacks {missing}:\n{done.stdout}"


class Watched:
    """A stream in a terminal of its own."""

    def __init__(self, recipe: Recipe, pipeline: Served, output: Path) -> None:
        self._recipe, self._output = recipe, output
        self._metrics_port = pipeline.deployment.layout.find("detokenizer").settings.detokenizer.metrics_port
        with output.open("wb") as sink:
            self._process = subprocess.Popen(
                as_installed(recipe.command),
                cwd=pipeline.deployment.run_directory,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def wait_until_begun(self) -> None:
        wait_until(self._has_begun, TIMEOUT_S, what=self._said)

    def wait_for_words(self) -> None:
        wait_until(lambda: all(word in self._output.read_text() for word in self._recipe.words), what=self._said)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _has_begun(self) -> bool:
        """The cache's stream begins with a snapshot; the detokenizer counts its subscribers, and the gateway is one."""
        if not self._recipe.command.endswith("Subscribe"):
            return "SNAPSHOT_END" in self._output.read_text()
        text = httpx.get(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=60, trust_env=False).text
        return "pando_detokenizer_subscribers 2.0" in text

    def _said(self) -> str:
        return f"{self._recipe.command}\nsays only:\n{self._output.read_text()}"


def test_there_are_recipes_for_every_service() -> None:
    text = PAGE.read_text()
    for service in ("Tokenizer", "Scheduler", "Worker", "Detokenizer", "Operations"):
        assert f"pando.v1.{service}/" in text
