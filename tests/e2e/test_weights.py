"""Weights replaced under load, with the real services: nothing is lost, and answers are those of a fresh deployment."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from pydantic import SecretStr

from common.gguf_header import read_header
from common.models import resolve_model
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings, WorkerSettings
from common.settings.scheduler import HostTierSettings, StorageSettings
from common.settings.worker import WorkerStorageSettings
from deploy.cli import main
from tests.e2e.conftest import require_model, serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time there was", "def add(a, b):")
TOKENS = 12
# More than are generated while weights are read.
MANY_TOKENS = 300
GATEWAY = GatewaySettings(port=0, anonymous="vouched")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with another final norm, and so with other answers."""
    require_model()
    path = resolve_model(ModelSettings().reference).path
    content = bytearray(path.read_bytes())
    entry = read_header(path).tensors["output_norm.weight"]
    norm = np.frombuffer(content, np.float32, entry.shape[0], entry.offset)
    norm *= np.random.default_rng(0).uniform(0.2, 3.0, len(norm)).astype(np.float32)
    target = tmp_path_factory.mktemp("newer") / path.name
    target.write_bytes(content)
    return target


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def expected(newer: Path, run_root: Path, ranks: int) -> list[str]:
    """The answers of a fresh deployment of as many ranks, which add in the same order, with these weights."""
    server = serve(Settings(model=ModelSettings(reference=str(newer)), gateway=GATEWAY), run_root, ranks)
    served = next(server)
    answers = [served.complete(prompt, TOKENS) for prompt in PROMPTS]
    assert next(server, None) is None
    return answers


@pytest.fixture
def served_anew(run_root: Path, ranks: int) -> Iterator[Served]:
    require_model()
    yield from serve(Settings(gateway=GATEWAY), run_root, ranks=ranks)


def complete(served: Served, prompt: str, max_tokens: int = TOKENS) -> dict[str, Any]:
    body = {"model": served.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def update(served: Served, path: Path | str, **fields: str) -> httpx.Response:
    with served.http() as http:
        return http.post("/update_weights_from_disk", json={"model_path": str(path), **fields})


@pytest.mark.parametrize("mode", ["drain", "recompute"])
def test_weights_are_replaced_under_load(served_anew: Served, newer: Path, expected: list[str], mode: str) -> None:
    before = [served_anew.complete(prompt, TOKENS) for prompt in PROMPTS]
    assert before != expected
    with ThreadPoolExecutor(8) as pool, served_anew.leaving_nothing_behind():
        long = [pool.submit(complete, served_anew, prompt, MANY_TOKENS) for prompt in PROMPTS]
        wait_until(lambda: served_anew.state().running_rows == len(PROMPTS))
        replaced = pool.submit(update, served_anew, newer, mode=mode, weight_version="newer")
        late = [pool.submit(complete, served_anew, prompt) for prompt in PROMPTS]
        answer = replaced.result()
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.json()["success"]
        assert answer.json()["loaded_beside"]
        for request in long:
            found = request.result()
            assert found["usage"]["completion_tokens"] == MANY_TOKENS
            assert found["weight_version"] == ("default" if mode == "drain" else "newer")
        for request in late:
            assert request.result()["usage"]["completion_tokens"] == TOKENS
    answers = [complete(served_anew, prompt) for prompt in PROMPTS]
    assert [found["choices"][0]["text"] for found in answers] == expected
    assert {found["weight_version"] for found in answers} == {"newer"}


def test_weights_that_do_not_fit_change_nothing(
    served_anew: Served, newer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [served_anew.complete(prompt, TOKENS) for prompt in PROMPTS]
    damaged = tmp_path / newer.name
    damaged.write_bytes(newer.read_bytes()[:1_000_000])
    spoilt = tmp_path / "spoilt" / newer.name
    spoilt.parent.mkdir()
    content = bytearray(newer.read_bytes())
    np.frombuffer(content, np.float32, 1, read_header(newer).tensors["output_norm.weight"].offset)[0] = np.nan
    spoilt.write_bytes(content)
    for path in (damaged, spoilt, tmp_path / "nowhere", "all-minilm-l6-v2"):
        answer = update(served_anew, path)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert not answer.json()["success"]
        assert answer.json()["message"]
    assert [served_anew.complete(prompt, TOKENS) for prompt in PROMPTS] == before
    scheduler = served_anew.deployment.address_of("scheduler")
    assert main(["weights", "show", "--scheduler", scheduler]) == 0
    assert "version default" in capsys.readouterr().out


def test_a_scheduler_or_worker_that_is_killed_keeps_the_current_weights(
    served_anew: Served, newer: Path, expected: list[str], ranks: int
) -> None:
    scheduler = served_anew.deployment.address_of("scheduler")
    assert main(["weights", "update", str(newer), "--version", "newer", "--scheduler", scheduler]) == 0
    names = ["scheduler", "worker-1" if ranks > 1 else "worker"]
    for name in names:
        kill_and_wait_until_replaced(served_anew, name)
        wait_until(served_anew.is_ready, timeout_s=120)
        assert served_anew.complete(PROMPTS[0], TOKENS) == expected[0]
        assert served_anew.state().weight_version == "newer"


def test_a_scheduler_that_restarts_needs_no_files_of_weights_that_its_worker_has(
    run_root: Path, newer: Path, tmp_path: Path
) -> None:
    """A worker that restarts does, and serves as soon as they are back."""
    path = tmp_path / newer.name
    shutil.copy(newer, path)
    for served in serve(Settings(gateway=GATEWAY), run_root):
        assert update(served, path, weight_version="newer").status_code == httpx.codes.OK
        expected = [complete(served, prompt)["choices"] for prompt in PROMPTS]
        path.write_bytes(b"damaged")
        for gone in (False, True):
            if gone:
                path.unlink()
            kill_and_wait_until_replaced(served, "scheduler")
            wait_until(served.is_ready, timeout_s=60)
            answers = [complete(served, prompt) for prompt in PROMPTS]
            assert [found["choices"] for found in answers] == expected
            assert {found["weight_version"] for found in answers} == {"newer"}
        restarts = served.deployment.restarts_of("scheduler")
        kill_and_wait_until_replaced(served, "worker")
        wait_until(lambda: served.deployment.restarts_of("scheduler") > restarts, timeout_s=60)  # noqa: B023
        assert not served.is_ready()
        shutil.copy(newer, path)
        wait_until(served.is_ready, timeout_s=60)
        found = complete(served, PROMPTS[0])
        assert (found["choices"], found["weight_version"]) == (expected[0], "newer")


def test_weights_are_replaced_by_others_of_the_same_path(run_root: Path, newer: Path, tmp_path: Path) -> None:
    path = tmp_path / newer.name
    shutil.copy(resolve_model(ModelSettings().reference).path, path)
    for served in serve(Settings(model=ModelSettings(reference=str(path)), gateway=GATEWAY), run_root):
        before = served.complete(PROMPTS[0], TOKENS)
        shutil.copy(newer, path)
        for _ in range(2):
            # Under the version's name before, too.
            assert update(served, path, weight_version="newer").status_code == httpx.codes.OK
            assert served.complete(PROMPTS[0], TOKENS) != before
            shutil.copy(resolve_model(ModelSettings().reference).path, path)
            assert update(served, path, weight_version="newer").status_code == httpx.codes.OK
            assert served.complete(PROMPTS[0], TOKENS) == before
            shutil.copy(newer, path)


@pytest.mark.parametrize("delay_s", [0.05, 0.6])
def test_an_update_during_which_a_rank_dies_ends_with_the_old_or_the_new_weights(
    served_anew: Served, newer: Path, expected: list[str], ranks: int, delay_s: float
) -> None:
    """On all ranks the same, as the next answers show; requests that ran are finished with them."""
    before = [served_anew.complete(prompt, TOKENS) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool, served_anew.leaving_nothing_behind():
        running = pool.submit(complete, served_anew, PROMPTS[0], 100)
        wait_until(lambda: served_anew.state().running_rows == 1)
        replacing = pool.submit(update, served_anew, newer, mode="recompute", weight_version="newer")
        time.sleep(delay_s)
        kill_and_wait_until_replaced(served_anew, "worker-1" if ranks > 1 else "worker")
        is_replaced = replacing.result().status_code == httpx.codes.OK
        assert running.result()["usage"]["completion_tokens"] == 100
        wait_until(served_anew.is_ready, timeout_s=120)
        answers = [complete(served_anew, prompt) for prompt in PROMPTS]
    assert [found["choices"][0]["text"] for found in answers] == (expected if is_replaced else before)
    assert {found["weight_version"] for found in answers} == {"newer" if is_replaced else "default"}


def test_neither_host_nor_storage_matches_pages_of_the_old_weights(newer: Path, run_root: Path, tmp_path: Path) -> None:
    """Storage is seen to be used before: with device and host emptied, it has the prompt's pages."""
    settings = Settings(
        gateway=GATEWAY,
        scheduler=SchedulerSettings(
            max_rows=4,
            device_pages=64,
            host_tier=HostTierSettings(pages=64),
            storage=StorageSettings(prefetch="wait_complete", keyring=tmp_path / "keyring.db"),
        ),
        worker=WorkerSettings(storage=WorkerStorageSettings(location=SecretStr(str(tmp_path / "pages")))),
    )
    prompt = "One of many long stories begins as follows. " * 12
    for served in serve(settings, run_root):
        old = complete(served, prompt)
        assert cached_of(old) == 0
        wait_until(lambda: served.state().storage.stored_pages > 0)  # noqa: B023
        with served.http() as http:
            http.post("/flush_cache").raise_for_status()
        again = complete(served, prompt)
        assert cached_of(again) > 0
        assert again["choices"] == old["choices"]
        assert update(served, newer, weight_version="newer").status_code == httpx.codes.OK
        fresh = complete(served, prompt)
        assert (cached_of(fresh), fresh["weight_version"]) == (0, "newer")
        assert cached_of(complete(served, prompt)) > 0


def cached_of(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached
