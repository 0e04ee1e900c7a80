"""A model with recurrent layers and random weights through all five services: later turns continue from snapshots."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from common.models import resolve_model
from common.settings import GatewaySettings, ModelSettings, SchedulerSettings, Settings
from common.settings.scheduler import HostTierSettings
from tests.e2e.conftest import serve
from tests.services.worker.engine.families import FAMILIES, save_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.served import Served

# Of 256 words, and as many tokens or a few more: they take several times as long to compute as to load from the host.
FIRST = " ".join(["the cat sat on a mat and slept"] * 32)
# Later turns continue from a snapshot after this many tokens, or from a later one.
FOUND = 240


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, run_root: Path) -> Iterator[Served]:
    directory, source = tmp_path_factory.mktemp("hybrid"), resolve_model("all-minilm-l6-v2").path
    name, options = FAMILIES["qwen3.5"]
    save_model(directory, name, {**options, "vocab_size": 30522})
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(source / file, directory / file)
    settings = Settings(
        model=ModelSettings(reference=str(directory), dtype="float32"),
        gateway=GatewaySettings(port=0, anonymous="vouched"),
        # Two chats of two turns.
        scheduler=SchedulerSettings(device_pages=40, host_tier=HostTierSettings(pages=400)),
    )
    yield from serve(settings, run_root)


def answer(served: Served, prompt: str, user: str) -> tuple[str, int]:
    """Return the continuation and the number of cached tokens."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "user": user}
    with served.http() as http:
        response = http.post("/v1/completions", json={**body, "ignore_eos": True})
    response.raise_for_status()
    content = response.json()
    return content["choices"][0]["text"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def continued(served: Served, turn: str, user: str) -> tuple[str, int]:
    """Return the continuation of a later turn, and after how many of its tokens there is a snapshot.

    On a machine that stalls, computing tokens may be estimated to be faster than loading them.
    """
    before = served.state().host_tier.skipped_load_tokens
    text, cached = answer(served, turn, user)
    return text, cached + served.state().host_tier.skipped_load_tokens - before


def test_a_second_turn_is_found_and_answered_as_by_a_cold_run(hybrid: Served) -> None:
    text, cached = answer(hybrid, FIRST, "alice")
    assert cached == 0
    turn = f"{FIRST}{text} and what did the dog do"
    warm, cached = answer(hybrid, turn, "alice")
    assert cached >= FOUND
    # What alice has is not found by bob, who gets the same tokens.
    assert answer(hybrid, turn, "bob") == (warm, 0)
    wait_until(hybrid.is_idle)
    tiers = {tier.tier: tier for tier in hybrid.state().tiers}
    assert tiers["device_snapshots"].evictable_pages >= 4


def test_chats_that_left_the_device_continue_from_the_host(hybrid: Served) -> None:
    texts = {f"user{number}": f"{number} {FIRST}" for number in range(8)}
    answers = {user: answer(hybrid, text, user)[0] for user, text in texts.items()}
    turns = {user: f"{texts[user]}{answers[user]} and what did the dog do" for user in texts}
    found = {user: continued(hybrid, turn, user) for user, turn in turns.items()}
    assert min(tokens for _, tokens in found.values()) >= FOUND
    wait_until(hybrid.is_idle)
    state = hybrid.state()
    tiers = {tier.tier: tier for tier in state.tiers}
    assert tiers["host_snapshots"].evictable_pages >= 16
    assert any(one.direction == "host_to_device" and one.transfers for one in state.host_tier.traffic)
    # A stranger, who computes everything, gets the same.
    assert answer(hybrid, turns["user0"], "stranger") == (found["user0"][0], 0)


def test_a_chat_continues_after_its_model_has_slept(hybrid: Served) -> None:
    text, _ = answer(hybrid, FIRST, "dora")
    with hybrid.http() as http:
        http.post("/sleep?level=1&keep_cache=true").raise_for_status()
        http.post("/wake_up").raise_for_status()
    turn = f"{FIRST}{text} and what did the dog do"
    # After the other tests dora is the third user with these words, which become shared before her next turn or later.
    warm, tokens = continued(hybrid, turn, "dora")
    assert tokens >= FOUND
    # Ernie finds nothing, unless dora has computed shared pages again.
    assert answer(hybrid, turn, "ernie")[0] == warm


def test_after_a_restart_of_the_worker_everything_is_computed_again(hybrid: Served) -> None:
    text, _ = answer(hybrid, FIRST, "carol")
    hybrid.deployment.kill("worker")
    wait_until(lambda: not hybrid.is_ready())
    wait_until(hybrid.is_ready, timeout_s=120.0)
    assert answer(hybrid, FIRST, "carol") == (text, 0)
    assert answer(hybrid, FIRST, "carol")[1] >= FOUND
