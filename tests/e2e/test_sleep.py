"""Real services whose model sleeps and wakes: the same tokens, nothing lost, and asleep again after a kill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers

from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import AdapterSettings, HostTierSettings, SleepSettings
from deploy.cli import main
from tests.e2e.conftest import serve
from tests.e2e.test_restarts import kill_and_wait_until_replaced
from tests.services.worker.engine.adapters.peft_adapters import ATTENTION, FEED_FORWARD, save_adapter
from tests.services.worker.engine.families import VOCABULARY, save_family
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

pytestmark = pytest.mark.extended

PROMPT = list(range(40, 90))
MODELS = ("tiny", "tiny:first")
TOKENS = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model, and an adapter for it."""
    root = tmp_path_factory.mktemp("sleep")
    model = save_family(root / "model", "llama")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(str(model / "tokenizer.json"))
    return {"model": model, "first": save_adapter(root / "model", root / "first", (*ATTENTION, *FEED_FORWARD), r=8)}


def settings(files: dict[str, Path], *, host_pages: int = 0, wakes: bool = False) -> Settings:
    return Settings(
        model=ModelSettings(reference=str(files["model"]), served_name="tiny", dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        scheduler=SchedulerSettings(
            max_rows=8,
            device_pages=256,
            adapters=AdapterSettings(slots=2, load={"first": str(files["first"])}),
            host_tier=HostTierSettings(pages=host_pages or None),
            sleep=SleepSettings(wake_on_request=wakes),
        ),
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def tiered(request: pytest.FixtureRequest, files: dict[str, Path], run_root: Path) -> Iterator[Served]:
    yield from serve(settings(files, host_pages=64), run_root, ranks=request.param)


@pytest.fixture
def waking(files: dict[str, Path], run_root: Path) -> Iterator[Served]:
    yield from serve(settings(files, wakes=True), run_root)


def complete(served: Served, model: str = "tiny", tokens: int = TOKENS) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    with served.http() as http:
        answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def tokens_of(served: Served, model: str = "tiny", tokens: int = TOKENS) -> list[int]:
    ids: list[int] = complete(served, model, tokens)["choices"][0]["token_ids"]
    return ids


def cached(served: Served) -> int:
    count: int = complete(served)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def post(served: Served, path: str) -> dict[str, Any]:
    with served.http() as http:
        answer = http.post(path)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


def is_sleeping(served: Served) -> bool:
    """Return what the gateway says, once it has an answer: a service that was killed may not be linked again yet."""
    answers: list[httpx.Response] = []

    def has_answered() -> bool:
        with served.http() as http:
            answers[:] = [http.get("/is_sleeping"), http.get("/ready")]
        return all(answer.status_code == httpx.codes.OK for answer in answers)

    wait_until(has_answered, timeout_s=120, what=lambda: str([answer.text for answer in answers]))
    sleeping: bool = answers[0].json()["is_sleeping"]
    assert (answers[1].json()["status"] == "sleeping") == sleeping
    return sleeping


@pytest.mark.parametrize("keeps", [False, True], ids=["", "host tier"])
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_are_the_same_after_waking(tiered: Served, level: int, keeps: bool) -> None:
    before = [tokens_of(tiered, model) for model in MODELS]
    assert before[0] != before[1]
    assert cached(tiered) > 0
    with tiered.leaving_nothing_behind():
        post(tiered, f"/sleep?level={level}&keep_cache={keeps}")
        assert is_sleeping(tiered)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(tokens_of, tiered, model) for model in MODELS]
            wait_until(lambda: tiered.state().waiting_requests == len(waiting))
            assert post(tiered, "/wake_up") == {"is_sleeping": False}
            assert [request.result() for request in waiting] == before
    assert not is_sleeping(tiered)
    post(tiered, f"/sleep?level={level}&keep_cache={keeps}")
    pages = {tier.tier: tier for tier in tiered.state().tiers}
    assert pages["device"].free_pages == pages["device"].capacity_pages
    assert (pages["host"].evictable_pages > 0) == keeps
    post(tiered, "/wake_up")
    assert [tokens_of(tiered, model) for model in MODELS] == before


@pytest.mark.parametrize("mode", ["drain", "requeue"])
def test_requests_that_run_lose_nothing(tiered: Served, mode: str) -> None:
    wanted = [tokens_of(tiered, model, 200) for model in MODELS]
    with ThreadPoolExecutor(4) as pool, tiered.leaving_nothing_behind():
        running = [pool.submit(tokens_of, tiered, model, 200) for model in MODELS]
        wait_until(lambda: tiered.state().running_rows == len(MODELS) or all(each.done() for each in running))
        post(tiered, f"/sleep?level=2&mode={mode}")
        assert post(tiered, "/wake_up?tags=weights") == {"is_sleeping": True}
        assert post(tiered, "/wake_up?tags=kv_cache") == {"is_sleeping": False}
        assert [request.result() for request in running] == wanted


def test_whoever_is_killed_comes_back_asleep(tiered: Served, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [tokens_of(tiered, model) for model in MODELS]
    scheduler = tiered.deployment.address_of("scheduler")
    workers = [service.name for service in tiered.deployment.layout.services if service.name.startswith("worker")]
    for name in (workers[-1], "scheduler"):
        assert main(["sleep", "--level", "2", "--scheduler", scheduler]) == 0
        kill_and_wait_until_replaced(tiered, name)
        wait_until(tiered.is_ready, timeout_s=120)
        assert is_sleeping(tiered)
        assert main(["wake", "--scheduler", scheduler]) == 0
        wait_until(tiered.is_ready, timeout_s=120)
        assert [tokens_of(tiered, model) for model in MODELS] == wanted
    assert "the model is awake" in capsys.readouterr().out


def test_a_request_wakes_the_model(waking: Served) -> None:
    wanted = tokens_of(waking)
    post(waking, "/sleep?level=2")
    with waking.http() as http:
        assert "a request" in http.get("/ready").json()["sleeping"][0]
    assert tokens_of(waking) == wanted
    assert not is_sleeping(waking)
