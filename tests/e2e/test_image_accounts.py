"""Usage, ledger and limits count the tokens of images as the model does."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import GatewaySettings, LimitsSettings, ModelSettings, Settings, TokenizerSettings
from common.settings.tokenizer import ImageDecodingSettings
from gateway.identity.keys import ApiKey, hash_of, save_keys
from tests.e2e.conftest import serve
from tests.e2e.seeing_model import chat_prompt, image_part, save_seeing_model
from tests.e2e.test_images import TOKENS, body_of, message
from tests.e2e.test_ledger import increase, ledger_of
from tests.services.tokenizer.images.pictures import picture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.e2e.served import Served

PICTURE = picture(200, 60, seed=2)
QUESTION = "What is it?"
WHOLE, TEXT = len(chat_prompt(PICTURE, QUESTION).ids), len(chat_prompt(QUESTION).ids)
# More than the text takes with its answer, and less than it takes with the picture.
MAX_CONTEXT = TEXT + TOKENS + 2
# Three answers to the text fit, and no more than one to the picture.
BUDGET = WHOLE + TOKENS
PER_MINUTE = 2
LIMITS = f"""
[tenants.short]
max_context = {MAX_CONTEXT}
[tenants.daily.each_subject]
tokens_per_day = {BUDGET}
[tenants.slow]
tokens_per_minute = {PER_MINUTE}
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, run_root: Path) -> Iterator[Served]:
    files = tmp_path_factory.mktemp("accounts")
    keys = [ApiKey(name, hash_of(name), name, vouches_for_users=True) for name in ("acme", "short", "daily", "slow")]
    save_keys(files / "keys.toml", [*keys, ApiKey("boss", hash_of("boss"), "operators", "boss", admin=True)])
    (files / "limits.toml").write_text(LIMITS)
    settings = Settings(
        model=ModelSettings(
            reference=str(save_seeing_model(tmp_path_factory.mktemp("seeing"))), dtype="float32", images="on"
        ),
        gateway=GatewaySettings(port=0, keys_file=files / "keys.toml"),
        limits=LimitsSettings(file=files / "limits.toml"),
        tokenizer=TokenizerSettings(images=ImageDecodingSettings(processes=1)),
    )
    yield from serve(settings, run_root)


def send(served: Served, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    with served.http() as http:
        return http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def ask(served: Served, key: str, user: str, *parts: Any) -> httpx.Response:
    return send(served, key, "/v1/chat/completions", body_of(served, user, message(*parts)))


def check_cost(response: httpx.Response, prompt_tokens: int) -> None:
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, TOKENS)


def test_usage_and_ledger_have_the_tokens_of_images_in_every_api(counted: Served) -> None:
    before = ledger_of(counted)
    # The second time, most of the prompt is cached, which is counted all the same.
    for _ in range(2):
        check_cost(ask(counted, "acme", "ada", PICTURE, QUESTION), WHOLE)
    url = image_part(PICTURE)["image_url"]["url"]
    common = {"model": counted.model, "temperature": 0}
    inputs = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
    response = send(
        counted, "acme", "/v1/responses",
        {**common, "input": [{"role": "user", "content": inputs}], "max_output_tokens": TOKENS, "user": "ada"},
    )  # fmt: skip
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages = send(
        counted, "acme", "/v1/messages",
        {
            **common, "messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS,
            "metadata": {"user_id": "ada"},
        },
    )  # fmt: skip
    outputs = 2 * TOKENS
    for answer in (response, messages):
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        read = usage.get("cache_read_input_tokens", 0)
        assert usage["input_tokens"] + read == WHOLE
        outputs += usage["output_tokens"]
    spent = {("acme", "user/ada"): Counter(requests=4, prompt_tokens=4 * WHOLE, output_tokens=outputs)}
    wait_until(
        lambda: increase(ledger_of(counted), before) == spent, what=lambda: f"{increase(ledger_of(counted), before)}"
    )


def test_an_image_that_exceeds_a_context_limit_is_refused_and_its_text_alone_is_not(counted: Served) -> None:
    check_cost(ask(counted, "short", "bea", QUESTION), TEXT)
    refused = ask(counted, "short", "bea", PICTURE, QUESTION)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"{MAX_CONTEXT} tokens" in error["message"]
    assert str(WHOLE) in error["message"]


def test_a_budget_is_used_up_by_an_image_and_not_by_its_text(counted: Served) -> None:
    assert 2 * (TEXT + TOKENS) < BUDGET
    for _ in range(3):
        check_cost(ask(counted, "daily", "carl", QUESTION), TEXT)
    check_cost(ask(counted, "daily", "dora", PICTURE, QUESTION), WHOLE)
    wait_until(lambda: ledger_of(counted)["daily", "user/dora"]["prompt_tokens"] == WHOLE)
    refused = ask(counted, "daily", "dora", QUESTION)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error["code"] == "insufficient_quota"
    assert f"{BUDGET} tokens per day" in error["message"]


def test_a_limit_by_the_minute_waits_for_all_tokens_of_an_image(counted: Served) -> None:
    started = time.monotonic()
    check_cost(ask(counted, "slow", "eve", PICTURE, QUESTION), WHOLE)
    # The use comes back steadily, and until it has, requests are refused.
    longest = (WHOLE + TOKENS) * 60 / PER_MINUTE

    def is_as_long() -> bool:
        refused = ask(counted, "slow", "eve", QUESTION)
        assert refused.status_code == 429
        assert f"{PER_MINUTE} tokens per minute" in refused.json()["error"]["message"]
        shortest = longest - (time.monotonic() - started)
        return shortest <= int(refused.headers["retry-after"]) <= math.ceil(longest)

    # Until the answer has ended, an estimate counts.
    wait_until(is_as_long)
