"""Chats of the experiment with models that have recurrent layers, and what they find, with a server that is made up."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from deploy.evaluation.bench.partial_results import PartialResults
from deploy.evaluation.experiments import hybrid_chats
from deploy.evaluation.experiments.hybrid_chats import (
    DEFAULT_MODELS,
    FIRST_USERS,
    LEFT_OUT,
    OPENING,
    REPEATED,
    Chat,
    ChatHits,
    ChatLoad,
    add,
    common_length,
)
from deploy.models.evidence import gather
from deploy.models.facts import facts_of

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 16
ARGUMENTS = argparse.Namespace(
    seed=3, users=5, turns=3, system_tokens=40, message_tokens=30, answer_tokens=21, repeats=1
)


class CachingServer:
    """Answers with tokens that it has not used before, and finds prompts as one cache for all does, in whole pages.

    With an `interval`, only up to multiples of it and ends of prompts and answers, as with recurrent layers.
    """

    def __init__(self, interval: int | None = None) -> None:
        self.interval = interval
        self.bodies: list[dict[str, Any]] = []
        self._computed: list[list[int]] = []
        self._resumable: list[set[int]] = []
        self._last = 10_000

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        prompt = body["prompt"]
        answer = list(range(self._last, self._last + body["max_tokens"]))
        self._last = answer[-1] + 1
        cached = self.find(prompt)
        self._computed.append([*prompt, *answer[:-1]])
        ends = {(len(prompt) - 1) // PAGE * PAGE, (len(prompt) + len(answer) - 1) // PAGE * PAGE}
        self._resumable.append(ends | set(range(0, len(prompt), self.interval or PAGE)))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return httpx.Response(200, json={"choices": [{"token_ids": answer}], "usage": usage})

    def find(self, prompt: list[int]) -> int:
        found = 0
        for computed, resumable in zip(self._computed, self._resumable, strict=True):
            pages = common_length(prompt[:-1], computed) // PAGE * PAGE
            found = max([found, *(end for end in resumable if end <= pages)])
        return found


def client_of(server: CachingServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(server))


def test_a_chat_repeats_prompts_and_answers() -> None:
    chat = Chat("ann", [1, 2, 3], REPEATED, is_system_known=False)
    assert chat.ask([4, 5]) == 0
    assert chat.prompt == [1, 2, 3, 4, 5]
    chat.take([6, 7])
    # The last token of the answer is sampled, and not computed.
    assert chat.ask([4]) == 6
    assert chat.prompt == [1, 2, 3, 4, 5, 6, 7, 4]


def test_a_chat_whose_reasoning_is_left_out_continues_within_its_last_prompt() -> None:
    chat = Chat("ann", [1, 2, 3], LEFT_OUT, is_system_known=True)
    assert chat.ask([4, 5]) == 3
    assert chat.prompt == [1, 2, 3, 4, 5, *OPENING]
    chat.take([30, 31, 32, 33])
    assert chat.ask([4]) == 5
    assert chat.prompt == [1, 2, 3, 4, 5, 32, 33, 4, *OPENING]


def test_the_last_token_of_a_prompt_cannot_be_cached() -> None:
    chat = Chat("ann", [1, 2, 3], REPEATED, is_system_known=True)
    assert chat.ask([]) == 2


def test_shares_are_of_what_could_be_cached() -> None:
    found = ChatHits()
    found.add(1, 0, 0)
    found.add(1, 100, 80)
    found.add(2, 150, 150)
    found.add(2, 150, 50)
    assert found.share([1]) == 80
    assert found.share([1, 2]) == 70
    assert found.share_at_intervals([1, 2], 100) == 75
    with pytest.raises(KeyError):
        found.share([3])


@pytest.mark.parametrize("kind", [REPEATED, LEFT_OUT])
async def test_a_round_has_all_turns_of_all_users(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_chats, "SHARING_S", 0.0)
    server = CachingServer()
    async with client_of(server) as client:
        found = await ChatLoad(client, "m", ARGUMENTS).round(kind)
    assert len(server.bodies) == 5 * 3
    # Only those who begin later can find the system prompt in their first turn.
    assert [len(found.possible[turn]) for turn in (1, 2, 3)] == [5 - FIRST_USERS, 5, 5]
    assert found.possible[1] == [40] * (5 - FIRST_USERS)
    assert found.cached[1] == [32] * (5 - FIRST_USERS)
    # All whole pages are found, and nothing else.
    for turn in (2, 3):
        assert found.cached[turn] == [possible // PAGE * PAGE for possible in found.possible[turn]]
    assert {body["max_tokens"] for body in server.bodies} == {21}
    assert len({body["user"] for body in server.bodies}) == 5


async def test_rounds_have_users_and_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_chats, "SHARING_S", 0.0)
    server = CachingServer()
    async with client_of(server) as client:
        load = ChatLoad(client, "m", ARGUMENTS)
        first, second = [await load.round(kind) for kind in (REPEATED, LEFT_OUT)]
    assert first.possible[1] == second.possible[1]
    assert len({body["user"] for body in server.bodies}) == 10
    assert len({tuple(body["prompt"][:40]) for body in server.bodies}) == 2


@pytest.mark.parametrize("interval", [None, 304, 1680, 4000])
async def test_the_distance_of_regular_snapshots_is_found(interval: int | None) -> None:
    async with client_of(CachingServer(interval)) as client:
        assert await ChatLoad(client, "m", ARGUMENTS).interval() == interval


async def test_a_model_whose_states_are_saved_at_ends_alone_has_no_distance() -> None:
    async with client_of(CachingServer(10_000)) as client:
        assert await ChatLoad(client, "m", ARGUMENTS).interval() is None


async def test_a_refused_request_is_an_error() -> None:
    async with httpx.AsyncClient(
        base_url="http://server", transport=httpx.MockTransport(lambda _: httpx.Response(503))
    ) as client:
        with pytest.raises(httpx.HTTPStatusError):
            await ChatLoad(client, "m", ARGUMENTS).round(REPEATED)


def test_figures_of_regular_snapshots_alone_are_those_of_models_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ChatHits()
    for turn in (1, 2):
        found.add(turn, 200, 190)
    for interval in (None, 150):
        path = tmp_path / f"{interval}.json"
        add(PartialResults("hybrid_chats", "m", path, label=REPEATED), found, 2, interval)
        figures = {entry["metric"]: entry["value"] for entry in json.loads(path.read_text())}
        regular = {"distance of regular snapshots": 150, "turns 2 to 2: found with these alone": 75}
        shares = dict.fromkeys(("turn 1: found", "turn 2: found", "turns 2 to 2: found"), 95)
        assert figures == shares | ({} if interval is None else regular)
    assert "turn 2: found" in capsys.readouterr().out


def test_the_models_are_of_one_size_and_differ_in_their_layers() -> None:
    facts = [facts_of(gather(str(path))) for path in DEFAULT_MODELS]
    assert [each.service for each in facts] == [facts[0].service] * 2
    assert [each.state_bytes is not None for each in facts] == [True, False]
    configs = [json.loads((path / "config.json").read_text()) for path in DEFAULT_MODELS]
    shapes = [config.get("text_config", config) for config in configs]
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_key_value_heads", "head_dim")
    assert [shapes[0][name] for name in same] == [shapes[1][name] for name in same]
