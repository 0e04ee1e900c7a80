"""Keys, limits and what they keep apart, over all five services."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from common.settings import CacheSettings, GatewaySettings, LimitsSettings, ModelSettings, SchedulerSettings, Settings
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
PAGE = 16
# Less than the words that the chat template puts in front of all messages, and more.
TEMPLATE_TOKENS = 64
# Short epochs, but what a busy machine does in minutes still counts together.
SCHEDULER = SchedulerSettings(cache=CacheSettings(epoch_seconds=0.5, promotion_epochs=1000))
# What a reverse proxy adds to what a client elsewhere asks.
REMOTE = {"x-forwarded-for": "203.0.113.7"}
# Where a client may write a name of its own.
FIELDS = [
    "user",
    "session_id",
    *(pytest.param(name, marks=pytest.mark.extended) for name in ("cache_salt", "prompt_cache_key")),
]
LIMITS = """
[tenants.small]
max_context = 100
[tenants.slow.each_user]
requests_per_minute = 2
"""


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tenants = {"app-1": "acme", "app-2": "acme", "trusted": "acme", "small": "small", "slow": "slow", "old": "acme"}
    tenants |= {"ann-laptop": "acme", "rival": "globex", "third": "initech"}
    keys = [
        ApiKey(
            name,
            hash_of(name),
            tenant,
            user="ann" if name == "ann-laptop" else None,
            vouches_for_users=name == "trusted",
        )
        for name, tenant in tenants.items()
    ]
    path = tmp_path_factory.mktemp("identity") / "keys.toml"
    save_keys(path, keys)
    path.with_name("limits.toml").write_text(LIMITS)
    return path


@pytest.fixture(scope="module")
def guarded(run_root: Path, keys_file: Path) -> Iterator[Served]:
    gateway = GatewaySettings(port=0, keys_file=keys_file)
    limits = LimitsSettings(file=keys_file.with_name("limits.toml"))
    settings = Settings(model=ModelSettings(load_format="fake"), limits=limits, gateway=gateway, scheduler=SCHEDULER)
    yield from serve(settings, run_root)


@pytest.fixture(scope="module")
def laptop(run_root: Path) -> Iterator[Served]:
    """A deployment without keys, as `pando up` starts it."""
    gateway = GatewaySettings(port=0)
    settings = Settings(model=ModelSettings(load_format="fake"), gateway=gateway, scheduler=SCHEDULER)
    yield from serve(settings, run_root)


def ask(served: Served, key: str | None, prompt: list[int] = PROMPT, **fields: Any) -> httpx.Response:
    headers = REMOTE if key is None else {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": served.model, "prompt": prompt, "max_tokens": 2, **fields}
    with served.http() as http:
        return http.post("/v1/completions", json=body, headers=headers)


def found(served: Served, key: str | None, prompt: list[int], **fields: Any) -> int:
    """Return the number of a prompt's cached tokens; `key` is "" for the person here, None elsewhere."""
    return cached(ask(served, key, prompt, **fields))


SEEDS = count(1)


def text(tokens: int = 128) -> list[int]:
    """Return token ids that no other test has asked for."""
    return random.Random(next(SEEDS)).choices(range(1000, 9000), k=tokens)


@dataclass(frozen=True)
class Stranger:
    """Another subject than those whose text is at stake: of their tenant, or of another one."""

    key: str
    user: str | None = None

    def found(self, served: Served, prompt: list[int]) -> int:
        return found(served, self.key, prompt, **({"user": self.user} if self.user else {}))


STRANGERS = (Stranger("app-2"), Stranger("trusted", "bob"), Stranger("rival"))


def pass_epochs(served: Served, epochs: int = 2) -> None:
    until = served.state().cache_accounting.epoch + epochs
    wait_until(lambda: served.state().cache_accounting.epoch >= until)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_name_means_the_same_user_only_under_the_same_key(guarded: Served) -> None:
    # A text each, as three keys are three subjects, who share what all of them ask.
    for number, (key, user) in enumerate((("app-2", "ann"), ("trusted", "ann"), ("app-2", "/app-1/ann"))):
        prompt = text()
        assert found(guarded, "app-1", prompt, user="ann") == 0
        assert found(guarded, "app-1", prompt, user="ann") > 0
        assert found(guarded, key, prompt, user=user) == 0, number


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


def test_prompts_of_enough_vouched_subjects_are_shared_in_their_tenant(guarded: Served) -> None:
    """The control of all tests below, in which nothing may be shared."""
    prompt = text()
    assert [found(guarded, "trusted", prompt, user=f"person-{number}") for number in range(3)] == [0, 0, 0]
    pass_epochs(guarded)
    assert found(guarded, "trusted", prompt, user="newcomer") == 112


@pytest.mark.parametrize("fields", [{}, {"session_id": "one-chat"}], ids=["names nobody", "names its session"])
def test_1_1_turns_of_a_chat_find_its_earlier_turns_and_stay_private(guarded: Served, fields: dict[str, str]) -> None:
    chats = {stranger: text() for stranger in STRANGERS}
    for turn in range(4):
        for stranger, chat in chats.items():
            # All whole pages of the turn before.
            assert found(guarded, "app-1", chat, **fields) >= (len(chat) - 48 - PAGE if turn else 0)
            chats[stranger] = [*chat, *text(48)]
        pass_epochs(guarded, 1)
    pass_epochs(guarded)
    for stranger, chat in chats.items():
        assert stranger.found(guarded, chat) == 0, stranger
        assert found(guarded, "app-1", chat, **fields) >= 128


@pytest.mark.parametrize("fields", [{}, {"session_id": "one-chat"}], ids=["names nobody", "names its session"])
def test_1_1_without_keys_only_a_local_chat_finds_its_earlier_turns(laptop: Served, fields: dict[str, str]) -> None:
    chat = text()
    for turn in range(4):
        assert (found(laptop, "", chat, **fields) > 0) is (turn > 0)
    pass_epochs(laptop)
    assert [found(laptop, None, chat, **fields) for _ in range(4)] == [0, 0, 0, 0]
    # Nor do clients elsewhere find each other's, however many of them ask.
    elsewhere = text()
    assert [found(laptop, None, elsewhere, user=f"name-{number}", **fields) for number in range(4)] == [0, 0, 0, 0]
    pass_epochs(laptop)
    assert found(laptop, None, elsewhere) == found(laptop, "", elsewhere) == 0


@pytest.mark.parametrize("field", FIELDS)
def test_1_2_conversations_of_one_person_count_as_one_subject(guarded: Served, field: str) -> None:
    repositories = {stranger: text() for stranger in STRANGERS}
    for repository in repositories.values():
        seen = [found(guarded, "ann-laptop", repository, **{field: f"conversation-{number}"}) for number in range(4)]
        # A salt and a name narrow what is found; a conversation's name does not.
        assert (seen[-1] > 0) is (field in ("session_id", "prompt_cache_key"))
    pass_epochs(guarded)
    for stranger, repository in repositories.items():
        assert stranger.found(guarded, repository) == 0, stranger
        assert found(guarded, "ann-laptop", repository, **{field: "conversation-0"}) > 0


def test_1_2_sessions_of_an_anthropic_client_are_not_separate_subjects(guarded: Served) -> None:
    def found_in_message(key: str, words: str, user: str) -> int:
        body = {"model": guarded.model, "max_tokens": 2, "messages": [{"role": "user", "content": words}]}
        with guarded.http() as http:
            answer = http.post("/v1/messages", json={**body, "metadata": {"user_id": user}}, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["cache_read_input_tokens"])

    for key in ("app-1", "rival"):
        words = f"The repository of a person who has told only {key} of it, and that by mistake. " * 12
        seen = [found_in_message("ann-laptop", words, f"user_1_session_{number}") for number in range(4)]
        assert seen[-1] > TEMPLATE_TOKENS
        pass_epochs(guarded)
        # Everybody's prompts begin with the chat template's own words.
        assert found_in_message(key, words, "session") < TEMPLATE_TOKENS


@pytest.mark.parametrize("field", FIELDS)
def test_1_3_three_invented_names_do_not_reveal_a_rival_s_cached_texts(guarded: Served, field: str) -> None:
    held, other = [text() for _ in range(5)], [text() for _ in range(5)]
    for number, prompt in enumerate(held):
        found(guarded, "trusted", prompt, user=f"victim-{number}")
    for name in ("made-up-1", "made-up-2"):
        for prompt in (*held, *other):
            found(guarded, "rival", prompt, **{field: name})
    pass_epochs(guarded)
    seen = [found(guarded, "rival", prompt, **{field: "made-up-3"}) for prompt in held]
    assert seen == [found(guarded, "rival", prompt, **{field: "made-up-3"}) for prompt in other]


def test_1_3_text_that_a_tenant_shares_is_not_found_by_another(guarded: Served) -> None:
    prompt = text()
    for number in range(3):
        found(guarded, "trusted", prompt, user=f"colleague-{number}")
    pass_epochs(guarded)
    assert found(guarded, "trusted", prompt, user="new-colleague") > 0
    assert [found(guarded, "rival", prompt, user=f"made-up-{number}") for number in range(3)] == [0, 0, 0]
    assert found(guarded, "third", prompt) == 0


def test_1_5_invented_names_of_a_rival_do_not_disable_sharing(guarded: Served) -> None:
    prompt = text()
    for number in range(3):
        found(guarded, "trusted", prompt, user=f"holder-{number}")
    pass_epochs(guarded)
    before = found(guarded, "trusted", prompt, user="first-newcomer")
    assert before > 0
    # Quarantine and demotion took two names with many hits, in two windows that closed.
    until = guarded.state().cache_accounting.epoch + 6
    while guarded.state().cache_accounting.epoch < until:
        for _ in range(10):
            for name in ("made-up-1", "made-up-2"):
                found(guarded, "rival", prompt, user=name)
    assert found(guarded, "trusted", prompt, user="last-newcomer") == before
