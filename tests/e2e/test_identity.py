"""Keys, limits and what they keep apart, over all five services."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings, ModelSettings, Settings
from gateway.identity.keys import ApiKey, hash_of, load_keys, save_keys
from tests.e2e.conftest import serve
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.e2e.served import Served

# Several whole pages.
PROMPT = list(range(1000, 1200))
LIMITS = """
[tenants.small]
max_context = 100
[tenants.slow.each_user]
requests_per_minute = 2
"""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tenants = {"app-1": "acme", "app-2": "acme", "trusted": "acme", "small": "small", "slow": "slow", "old": "acme"}
    keys = [
        ApiKey(name, hash_of(name), tenant, vouches_for_users=name == "trusted") for name, tenant in tenants.items()
    ]
    path = tmp_path_factory.mktemp("identity") / "keys.toml"
    save_keys(path, keys)
    path.with_name("limits.toml").write_text(LIMITS)
    return path


@pytest.fixture(scope="module")
def guarded(run_root: Path, keys_file: Path) -> Iterator[Served]:
    gateway = GatewaySettings(port=0, keys_file=keys_file, limits_file=keys_file.with_name("limits.toml"))
    yield from serve(Settings(model=ModelSettings(load_format="fake"), gateway=gateway), run_root)


def ask(served: Served, key: str, **fields: Any) -> httpx.Response:
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": 2, **fields}
    with served.http() as http:
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_name_means_the_same_user_only_under_the_same_key(guarded: Served) -> None:
    assert cached(ask(guarded, "app-1", user="ann")) == 0
    assert cached(ask(guarded, "app-1", user="ann")) > 0
    assert cached(ask(guarded, "app-2", user="ann")) == 0
    assert cached(ask(guarded, "trusted", user="ann")) == 0
    # Whoever may act for users reaches those of other keys by no name that these could make up.
    assert cached(ask(guarded, "app-2", user="/app-1/ann")) == 0


def test_a_context_limit_holds_for_prompt_and_output(guarded: Served) -> None:
    refused = ask(guarded, "small")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "100 tokens" in refused.json()["error"]["message"]
    with guarded.http() as http:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 200}}
        assert http.post("/generate", json=body, headers={"authorization": "Bearer small"}).status_code == 400


def test_requests_beyond_the_limit_wait(guarded: Served) -> None:
    answers = [ask(guarded, "slow", user=name) for name in ("ann", "bob", "carl")]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["retry-after"]) >= 1


def test_a_revoked_key_is_refused_without_restart(guarded: Served, keys_file: Path) -> None:
    assert ask(guarded, "old").status_code == 200
    save_keys(keys_file, [key for key in load_keys(keys_file) if key.id != "old"])
    wait_until(lambda: ask(guarded, "old").status_code == 401, timeout_s=120, what=lambda: "refused")
    assert ask(guarded, "app-1").status_code == 200
